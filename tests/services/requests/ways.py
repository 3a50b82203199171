"""One request asked over gRPC, as one HTTP answer and as an HTTP stream, with the same outcome to compare."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import grpc
import grpc.aio

from splitwise.rpc.v1 import common_pb2, router_pb2

if TYPE_CHECKING:
    import aiohttp

    from tests.services.router.cluster import RouterCluster

Prompt = str | list[int] | list[dict[str, str]]
FINISH = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass
class Outcome:
    """What one way brought. `error` is the status (a gRPC name or an HTTP number) and the field at fault."""

    pieces: list[str] = field(default_factory=list)
    finish: str | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached: int = 0
    logprobs: int = 0
    error: tuple[str | int, str | None] | None = None
    message: str = ""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Way(Protocol):
    """A way to ask; `model` is left out where the cluster's default is meant."""

    async def ask(self, prompt: Prompt, *, model: str, **sampling: Any) -> Outcome: ...


def grpc_request(prompt: Prompt, model: str, **sampling: Any) -> router_pb2.GenerateRequest:
    """Return the request; `stop` is text, as over HTTP."""
    stops = [stop.encode() for stop in sampling.pop("stop", ())]
    request = router_pb2.GenerateRequest(
        model=model, sampling=common_pb2.SamplingParams(stop=stops, **sampling)
    )
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], dict):
        request.chat.messages.extend(router_pb2.ChatMessage(**message) for message in prompt)  # type: ignore[arg-type]
    else:
        request.token_ids.ids.extend(prompt)  # type: ignore[arg-type]
    return request


def http_body(prompt: Prompt, model: str, **sampling: Any) -> tuple[str, dict[str, Any]]:
    """Return path and body of the same request."""
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], dict)):
        return "/v1/completions", {"model": model, "prompt": prompt, **sampling}
    if "logprobs" in sampling:
        sampling |= {"top_logprobs": sampling["logprobs"], "logprobs": True}
    return "/v1/chat/completions", {"model": model, "messages": prompt, **sampling}


class Grpc:
    def __init__(self, cluster: RouterCluster) -> None:
        self._cluster = cluster

    async def ask(self, prompt: Prompt, *, model: str, **sampling: Any) -> Outcome:
        outcome = Outcome()
        try:
            async for message in self._cluster.stream(grpc_request(prompt, model, **sampling), 120):
                outcome.pieces.append(message.text)
                outcome.logprobs += len(message.logprobs)
                if message.HasField("finished"):
                    done = message.finished
                    outcome.finish = FINISH[done.reason]
                    outcome.prompt_tokens, outcome.output_tokens = done.prompt_tokens, done.output_tokens
                    outcome.cached = done.cached_prompt_tokens
        except grpc.aio.AioRpcError as error:
            outcome.message = error.details() or ""
            outcome.error = error.code().name, outcome.message.partition(": ")[0]
        return outcome


class Http:
    """`stream`: as server-sent events."""

    def __init__(self, session: aiohttp.ClientSession, *, stream: bool) -> None:
        self._session = session
        self._stream = stream

    async def ask(self, prompt: Prompt, *, model: str, **sampling: Any) -> Outcome:
        path, body = http_body(prompt, model, **sampling)
        return await self.post(path, body)

    async def post(self, path: str, body: dict[str, Any]) -> Outcome:
        """Send a body as it is."""
        if self._stream:
            body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with self._session.post(path, json=body) as response:
            if response.status != 200:
                return _refused(Outcome(), response.status, (await response.json())["error"])
            if not self._stream:
                return _take(Outcome(), await response.json())
            return await _events(response)


async def _events(response: aiohttp.ClientResponse) -> Outcome:
    outcome, done = Outcome(), False
    async for line in response.content:
        data = line.decode().strip().removeprefix("data: ")
        if data == "[DONE]":
            done = True
        elif data:
            content = json.loads(data)
            if "error" in content:
                return _refused(outcome, 200, content["error"])
            _take(outcome, content)
    assert done, "the stream ended without its end mark"
    return outcome


def _take(outcome: Outcome, content: dict[str, Any]) -> Outcome:
    for choice in content["choices"]:
        part = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        outcome.pieces.append(part["content"])
        outcome.finish = choice["finish_reason"] or outcome.finish
        logprobs = choice["logprobs"] or {}
        outcome.logprobs += len(logprobs.get("tokens") or logprobs.get("content") or ())
    if usage := content.get("usage"):
        outcome.prompt_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        outcome.cached = usage["prompt_tokens_details"]["cached_tokens"]
    return outcome


def _refused(outcome: Outcome, status: int, error: dict[str, Any]) -> Outcome:
    outcome.error, outcome.message = (status, error["param"]), error["message"]
    return outcome
