"""A router behind the gateway that answers with given tokens: real validation, text and stops."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.errors import NotFoundError
from splitwise.requests import Answer, Arrived, check_prompt_tokens, check_request, complete_sampling
from splitwise.requests.validation import FieldError, decode_stops
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    TokenAlternative,
    TokenLogprob,
    TransferStats,
)
from splitwise.rpc.v1.router_pb2 import Finished, GenerateRequest, GenerateResponse, ModelDescription
from splitwise.text.stops import StopMatcher
from splitwise.text.vocabulary import ByteVocabulary

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from splitwise.rpc.v1.common_pb2 import SamplingParams

VOCABULARY = 300
CONTEXT = 512


@dataclass
class ScriptedRequest:
    backend: ScriptedBackend
    request_id: str
    sampling: SamplingParams
    prompt_tokens: int

    def run(self) -> AsyncGenerator[GenerateResponse, None]:
        return self.backend.run(self.request_id, self.sampling, self.prompt_tokens)


@dataclass
class ScriptedBackend:
    """Serves one model, "tiny", over the byte vocabulary.

    The answer is `tokens`, over and over up to max_tokens with `endless`, else ended by EOS
    after one round. `failures`: by token count, what is raised before that token.
    `pauses`: by token count, an event that is waited for before that token.
    """

    tokens: Sequence[int] = tuple(b"Hello, world")
    endless: bool = False
    failures: dict[int, Exception] = field(default_factory=dict)
    pauses: dict[int, asyncio.Event] = field(default_factory=dict)
    finish: int | None = None
    unfinished: bool = False
    context: int = CONTEXT
    cached: int = 0
    is_serving: bool = True
    names: tuple[str, ...] = ("tiny",)
    requests: list[GenerateRequest] = field(default_factory=list)
    running: int = 0
    prepared: int = 0
    vocabulary: ByteVocabulary = field(default_factory=lambda: ByteVocabulary(VOCABULARY))

    async def prepare(self, request: GenerateRequest) -> ScriptedRequest:
        self.requests.append(request)
        check_request(request)
        prompt = await self.tokenize(request)
        sampling = complete_sampling(request.sampling, room=max(1, self.context - len(prompt)))
        kind = request.WhichOneof("prompt")
        path = "token_ids.ids" if kind == "token_ids" else str(kind)
        check_prompt_tokens(path, prompt, sampling, max_model_len=self.context, vocab_size=VOCABULARY)
        self.prepared += 1
        return ScriptedRequest(self, f"r{self.prepared}", sampling, len(prompt))

    async def run(
        self, request_id: str, sampling: SamplingParams, prompt_tokens: int
    ) -> AsyncGenerator[GenerateResponse, None]:
        self.running += 1
        try:
            async for response in self._answer(sampling, prompt_tokens):
                response.request_id = request_id
                yield response
        finally:
            self.running -= 1

    async def _answer(
        self, sampling: SamplingParams, prompt_tokens: int
    ) -> AsyncGenerator[GenerateResponse, None]:
        stops = StopMatcher(decode_stops(sampling))
        answer = Answer(
            self.vocabulary.detokenizer(),
            stops,
            min_tokens=sampling.min_tokens,
            max_tokens=sampling.max_tokens,
        )
        count = 0
        while True:
            await asyncio.sleep(0)
            if count in self.pauses:
                await self.pauses[count].wait()
            if count in self.failures:
                raise self.failures[count]
            if self.unfinished and count == len(self.tokens):
                return
            token = self.tokens[count % len(self.tokens)]
            count += 1
            ended = not (self.endless or sampling.ignore_eos) and count > len(self.tokens)
            reason = FINISH_REASON_STOP if ended else FINISH_REASON_UNSPECIFIED
            logprobs = [_logprob(token)] if sampling.HasField("logprobs") else []
            piece = answer.push(Arrived([256 if ended else token], logprobs, reason))
            response = GenerateResponse(
                text=piece.text,
                token_ids=piece.token_ids,
                logprobs=piece.logprobs,
                prompt_tokens=prompt_tokens if count == 1 else 0,
            )
            if piece.finish:
                response.finished.CopyFrom(self._finished(piece, prompt_tokens, count))
            yield response
            if piece.finish:
                return

    def _finished(self, piece: object, prompt_tokens: int, count: int) -> Finished:
        return Finished(
            reason=piece.finish if self.finish is None else self.finish,
            prompt_tokens=prompt_tokens,
            output_tokens=count,
            cached_prompt_tokens=self.cached,
            stop_matched=piece.stop_matched,
            transfer=TransferStats(bytes=1),
        )

    def list_models(self) -> list[ModelDescription]:
        return [
            ModelDescription(name=n, max_model_len=self.context, serving=self.is_serving) for n in self.names
        ]

    def serving(self) -> bool:
        return self.is_serving

    def _check_model(self, name: str) -> None:
        if name not in ("", *self.names):
            raise NotFoundError(f"model: {name!r} is not served; known: {', '.join(self.names)}")

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        self._check_model(request.model)
        check_request(request)
        match request.WhichOneof("prompt"):
            case "text":
                return self.vocabulary.encode(request.text)
            case "chat":
                messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
                return self.vocabulary.encode_chat(messages)
            case _:
                return list(request.token_ids.ids)

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        self._check_model(model)
        for index, token in enumerate(token_ids):
            if token >= VOCABULARY:
                raise FieldError(f"token_ids[{index}]", f"token id {token} is outside the vocabulary")
        detokenizer = self.vocabulary.detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def spell(self, model: str, token_id: int) -> bytes:
        return bytes((token_id,)) if token_id < 256 else f" t{token_id}".encode()


def _logprob(token: int) -> TokenLogprob:
    top = [TokenAlternative(token_id=other, logprob=-float(i)) for i, other in enumerate((65, 66, 67, 68))]
    return TokenLogprob(token_id=token, logprob=-0.25, top=top)


LENGTH = FINISH_REASON_LENGTH
