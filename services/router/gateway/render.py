"""Answers as JSON: whole ones and SSE chunks, for completions and for chats.

A body holds one choice for each prompt. What is equal in all chunks is written once; each chunk
then adds its choice's text.
All JSON here is ASCII, so that no client splits an event at a line separator in the text.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from splitwise.errors import CancelledError, ServerError
from splitwise.rpc.v1.common_pb2 import FinishReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.router.gateway.logprobs import LogprobWriter
    from splitwise.rpc.v1.common_pb2 import TokenLogprob
    from splitwise.rpc.v1.router_pb2 import Finished, GenerateResponse

_REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}
DONE = b"data: [DONE]\n\n"
FINGERPRINT = f"splitwise-{version('splitwise')}"
"""What OpenAI calls the system's fingerprint: equal seeds give equal texts only where it is equal."""


def event(body: str) -> bytes:
    """Return one SSE event with `body` (one line) as its data."""
    return f"data: {body}\n\n".encode()


def finish_reason(finished: Finished) -> str:
    """Return ``stop`` or ``length``; whatever else ended the answer is raised as an error."""
    reason = _REASONS.get(finished.reason)
    if reason is None:
        if finished.reason == FinishReason.FINISH_REASON_CANCELLED:
            raise CancelledError("the request was cancelled", code="CANCELLED")
        raise ServerError("the answer ended without a reason", code="INTERNAL")
    return reason


def usage_of(prompt_tokens: int, output_tokens: int, cached: int | None = None) -> dict[str, Any]:
    """Return OpenAI's usage object."""
    usage: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return usage


class Choice:
    """The JSON form of one prompt's answer. `echo` is text that goes before it (completions only)."""

    def __init__(
        self,
        index: int,
        *,
        chat: bool,
        prompt_tokens: int,
        logprobs: LogprobWriter | None = None,
        echo: str = "",
    ) -> None:
        self.index = index
        self.finished: Finished | None = None
        self._chat = chat
        self._logprobs = logprobs
        self._echo = echo
        self._prompt_tokens = prompt_tokens
        self._output_tokens = 0
        self._begun = False

    def part(self, response: GenerateResponse) -> str:
        """Return the choice in the chunk for one message."""
        text = response.text
        if self._begun:
            content = (
                f'"delta":{{"content":{json.dumps(text)}}}' if self._chat else f'"text":{json.dumps(text)}'
            )
        elif self._chat:
            content = f'"delta":{{"role":"assistant","content":{json.dumps(text)}}}'
        else:
            content = f'"text":{json.dumps(self._echo + text)}'
        self._begun = True
        self._output_tokens += len(response.token_ids)
        logprobs = "null"
        if self._logprobs is not None:
            logprobs = json.dumps(self._shape(response.logprobs, self._logprobs))
        if response.HasField("finished"):
            self.finished = response.finished
            stop_reason = json.dumps(response.finished.stop_matched or None)
            tail = f'"finish_reason":"{finish_reason(response.finished)}","stop_reason":{stop_reason}'
        else:
            tail = '"finish_reason":null'
        return f'{{"index":{self.index},{content},"logprobs":{logprobs},{tail}}}'

    def running_usage(self) -> str:
        """Return the usage of this choice so far."""
        return json.dumps(usage_of(self._prompt_tokens, self._output_tokens))

    def whole(self, responses: Sequence[GenerateResponse]) -> dict[str, Any]:
        """Return the choice for all messages of an answer; the last one is `finished`."""
        self.finished = responses[-1].finished
        text = "".join([response.text for response in responses])
        choice: dict[str, Any] = {"index": self.index}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = self._echo + text
        choice["logprobs"] = None
        if self._logprobs is not None:
            every = [entry for response in responses for entry in response.logprobs]
            choice["logprobs"] = self._shape(every, self._logprobs)
        choice["finish_reason"] = finish_reason(self.finished)
        choice["stop_reason"] = self.finished.stop_matched or None
        return choice

    def _shape(self, logprobs: Iterable[TokenLogprob], writer: LogprobWriter) -> dict[str, Any]:
        return writer.chat(logprobs) if self._chat else writer.completion(logprobs)


class Answer:
    """The JSON form of a body: its identity and its choices."""

    def __init__(
        self, *, chat: bool, request_id: str, model: str, created: int, choices: Sequence[Choice]
    ) -> None:
        self._choices = choices
        self._identity = {
            "id": f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}",
            "object": "chat.completion" if chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": FINGERPRINT,
        }
        chunk = "chat.completion.chunk" if chat else "text_completion"
        self._head = json.dumps(self._identity | {"object": chunk}, separators=(",", ":"))[:-1]

    @property
    def finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finished is not None for choice in self._choices)

    def chunk(self, index: int, response: GenerateResponse, usage: str | None) -> bytes:
        """Return the event for one message. `usage`: None leaves it out, else ``null`` or ``running``."""
        choice = self._choices[index]
        part = choice.part(response)
        shown = ""
        if usage is not None:
            shown = f',"usage":{choice.running_usage() if usage == "running" else "null"}'
        return event(f'{self._head},"choices":[{part}]{shown}}}')

    def usage_chunk(self) -> bytes:
        """Return the event after the last chunk: no choices, the whole usage."""
        return event(f'{self._head},"choices":[],"usage":{json.dumps(self._usage())}}}')

    def whole(self, responses: Sequence[Sequence[GenerateResponse]]) -> str:
        """Return the body for all messages of each choice."""
        choices = [choice.whole(each) for choice, each in zip(self._choices, responses, strict=True)]
        return json.dumps(self._identity | {"choices": choices, "usage": self._usage()})

    def _usage(self) -> dict[str, Any]:
        ended = [choice.finished for choice in self._choices if choice.finished is not None]
        return usage_of(
            sum(finished.prompt_tokens for finished in ended),
            sum(finished.output_tokens for finished in ended),
            sum(finished.cached_prompt_tokens for finished in ended),
        )
