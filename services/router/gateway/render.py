"""Answers as JSON: whole ones and SSE chunks, for completions and for chats.

What is equal in all chunks of an answer is written once; each chunk then adds its text.
All JSON here is ASCII, so that no client splits an event at a line separator in the text.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from splitwise.errors import CancelledError, ServerError
from splitwise.rpc.v1.common_pb2 import FinishReason

if TYPE_CHECKING:
    from services.router.gateway.logprobs import LogprobWriter
    from splitwise.rpc.v1.router_pb2 import Finished, GenerateResponse

_REASONS = {FinishReason.FINISH_REASON_STOP: "stop", FinishReason.FINISH_REASON_LENGTH: "length"}
DONE = b"data: [DONE]\n\n"


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


class Answer:
    """The JSON form of one answer. `echo` is text that goes before it (completions only)."""

    def __init__(
        self,
        *,
        chat: bool,
        request_id: str,
        model: str,
        created: int,
        logprobs: LogprobWriter | None,
        echo: str = "",
    ) -> None:
        self._chat = chat
        self._logprobs = logprobs
        self._echo = echo
        self._identity = {
            "id": f"chatcmpl-{request_id}" if chat else f"cmpl-{request_id}",
            "object": ("chat.completion" if chat else "text_completion"),
            "created": created,
            "model": model,
        }
        self._prompt_tokens = 0
        self._output_tokens = 0
        self._begun = False
        self._head = json.dumps(self._identity | {"object": self._chunk_object()}, separators=(",", ":"))[:-1]

    def _chunk_object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    # ---- streaming

    def chunk(self, response: GenerateResponse, usage: str | None) -> bytes:
        """Return the event for one message. `usage`: None leaves it out, else ``null`` or ``running``."""
        ended = response.HasField("finished")
        reason = finish_reason(response.finished) if ended else None
        self._count(response)
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
        logprobs = "null" if self._logprobs is None else json.dumps(self._shape(response, self._logprobs))
        tail = f',"finish_reason":"{reason}"' if reason else ',"finish_reason":null'
        if ended:
            tail += f',"stop_reason":{json.dumps(response.finished.stop_matched or None)}'
        choice = f'{{"index":0,{content},"logprobs":{logprobs}{tail}}}'
        shown = ""
        if usage is not None:
            shown = f',"usage":{self._running_usage() if usage == "running" else "null"}'
        return event(f'{self._head},"choices":[{choice}]{shown}}}')

    def usage_chunk(self, finished: Finished) -> bytes:
        """Return the event after the last chunk: no choices, the whole usage."""
        return event(f'{self._head},"choices":[],"usage":{json.dumps(_final_usage(finished))}}}')

    def _count(self, response: GenerateResponse) -> None:
        self._prompt_tokens = response.prompt_tokens or self._prompt_tokens
        self._output_tokens += len(response.token_ids)

    def _running_usage(self) -> str:
        return json.dumps(usage_of(self._prompt_tokens, self._output_tokens))

    def _shape(self, response: GenerateResponse, writer: LogprobWriter) -> dict[str, Any]:
        return writer.chat(response.logprobs) if self._chat else writer.completion(response.logprobs)

    # ---- whole

    def whole(self, responses: list[GenerateResponse]) -> str:
        """Return the body for all messages of an answer; the last one is `finished`."""
        finished = responses[-1].finished
        text = "".join([response.text for response in responses])
        choice: dict[str, Any] = {"index": 0}
        if self._chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = self._echo + text
        choice["logprobs"] = None
        if self._logprobs is not None:
            every = [entry for response in responses for entry in response.logprobs]
            writer = self._logprobs
            choice["logprobs"] = writer.chat(every) if self._chat else writer.completion(every)
        choice["finish_reason"] = finish_reason(finished)
        choice["stop_reason"] = finished.stop_matched or None
        return json.dumps(self._identity | {"choices": [choice], "usage": _final_usage(finished)})


def _final_usage(finished: Finished) -> dict[str, Any]:
    return usage_of(finished.prompt_tokens, finished.output_tokens, finished.cached_prompt_tokens)
