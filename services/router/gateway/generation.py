"""The two generation routes: one call to the router for each prompt, answered whole or as a stream.

Nothing is sent before the router's first message, so everything that goes wrong until then
is an HTTP status. Later it is an SSE error event, after which the connection is closed in
the middle of the body: a client that reads no error events must not take what it has for
the whole answer.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING

from aiohttp import web

from services.router.gateway.bodies import ChatBody, CompletionBody
from services.router.gateway.logprobs import LogprobWriter
from services.router.gateway.merge import run_all
from services.router.gateway.metrics import FAILED_STREAMS, STALLED_STREAMS, STREAMS
from services.router.gateway.refusals import Refusal, from_error, invalid
from services.router.gateway.render import DONE, Answer, Choice, event
from services.router.gateway.requests import read_body
from services.router.gateway.stream import EventStream
from services.router.gateway.translate import chat_call, completion_call, parse
from splitwise.errors import RemoteError, UnavailableError
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from services.router.gateway.backend import GatewayBackend, PreparedRequest
    from services.router.gateway.requests import GatewayOptions
    from services.router.gateway.translate import Call
    from splitwise.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse

    Indexed = tuple[int, GenerateResponse]
    Messages = AsyncGenerator[Indexed, None]

LARGE = 65_536
"""Bytes of JSON that take about a millisecond to read."""


class GenerationRoutes:
    """``/v1/completions`` and ``/v1/chat/completions``."""

    def __init__(self, backend: GatewayBackend, options: GatewayOptions) -> None:
        self._backend = backend
        self._options = options

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """Serve ``POST /v1/completions``."""
        client_id = _client_request_id(request)

        def translate(body: bytes) -> Call:
            return completion_call(parse(CompletionBody, body), client_id)

        return await self._serve(request, await self._read(request, translate))

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """Serve ``POST /v1/chat/completions``."""
        client_id = _client_request_id(request)

        def translate(body: bytes) -> Call:
            return chat_call(parse(ChatBody, body), client_id)

        return await self._serve(request, await self._read(request, translate))

    async def _read(self, request: web.Request, translate: Callable[[bytes], Call]) -> Call:
        """Translate the body; a large one in a thread, so that it holds up no other stream."""
        body = await read_body(request, self._options)
        if len(body) < LARGE:
            return translate(body)
        return await asyncio.to_thread(translate, body)

    async def _serve(self, http: web.Request, call: Call) -> web.StreamResponse:
        prepared, choices = [], []
        for index, asked in enumerate(call.prompts):
            try:
                one = await self._prepare(asked.request)
                choices.append(await self._choice(call, index, one.prompt_tokens))
            except RemoteError as error:
                raise from_error(error, asked.names) from error
            prepared.append(one)
        answer = Answer(
            chat=call.chat,
            request_id=prepared[0].request_id,
            model=call.prompts[0].request.model,
            created=int(time.time()),
            choices=choices,
        )
        ids = ", ".join(one.request_id for one in prepared)
        headers = {"x-request-id": ids}
        async with aclosing(run_all(prepared, [asked.names for asked in call.prompts])) as messages:
            first = await anext(messages)
            if not call.stream:
                return await _whole(answer, len(prepared), first, messages, headers)
            stream = EventStream(http, self._options.stall_s, headers)
            return await _stream(stream, call, answer, first, messages, ids)

    async def _prepare(self, request: GenerateRequest) -> PreparedRequest:
        request.model = self._model(request.model)
        return await self._backend.prepare(request)

    def _model(self, asked: str) -> str:
        """Return the model's name: the only one when none was asked for."""
        names = [model.name for model in self._backend.list_models()]
        if not names:
            raise UnavailableError("no machine has joined yet", code="UNAVAILABLE", retry_after=1.0)
        if not asked and len(names) > 1:
            raise invalid("model", f"missing; write one of {', '.join(sorted(names))}")
        return asked or names[0]

    async def _choice(self, call: Call, index: int, prompt_tokens: int) -> Choice:
        request = call.prompts[index].request
        writer = None
        if call.logprobs is not None:
            spell = partial(self._backend.spell, request.model)
            writer = LogprobWriter(spell, call.logprobs, tokens_as_ids=call.tokens_as_ids)
        echo = await self._text_of(request) if call.echo else ""
        return Choice(index, chat=call.chat, prompt_tokens=prompt_tokens, logprobs=writer, echo=echo)

    async def _text_of(self, request: GenerateRequest) -> str:
        if request.WhichOneof("prompt") == "text":
            return request.text
        return await self._backend.detokenize(request.model, request.token_ids.ids)


async def _stream(
    stream: EventStream, call: Call, answer: Answer, first: Indexed, messages: Messages, ids: str
) -> web.StreamResponse:
    await stream.begin()
    with STREAMS.track_inprogress():
        try:
            await _send_all(stream, call, answer, first, messages)
        except ConnectionError:  # the client is gone
            pass
        except TimeoutError:
            STALLED_STREAMS.inc()
            get_logger().warning("gateway.stream_stalled", request_id=ids)
            stream.cut()
        except Exception as error:  # noqa: BLE001 - headers are out: an event is all that is left
            await _fail(stream, error, ids)
    return stream.response


async def _send_all(
    stream: EventStream, call: Call, answer: Answer, first: Indexed, messages: Messages
) -> None:
    usage = "running" if call.continuous_usage else "null" if call.include_usage else None
    index, message = first
    while True:
        chunk = answer.chunk(index, message, usage)
        if answer.finished:
            break
        await stream.send(chunk)
        index, message = await anext(messages)
    if call.include_usage:
        chunk += answer.usage_chunk()
    await stream.send(chunk + DONE)
    await stream.end()


async def _fail(stream: EventStream, error: Exception, ids: str) -> None:
    """Send an error event and cut the body short."""
    if isinstance(error, Refusal):
        refusal = error
    elif isinstance(error, RemoteError):  # an ending that is no answer
        refusal = from_error(error)
    else:
        get_logger().exception("gateway.stream_failed", request_id=ids, error=str(error))
        refusal = Refusal(500, "the gateway failed", kind="server_error", code="internal_error")
    FAILED_STREAMS.labels(refusal.code or refusal.kind).inc()
    with suppress(ConnectionError, TimeoutError):
        await stream.send(event(refusal.body()))
    stream.cut()


async def _whole(
    answer: Answer, count: int, first: Indexed, messages: Messages, headers: dict[str, str]
) -> web.Response:
    responses: list[list[GenerateResponse]] = [[] for _ in range(count)]
    responses[first[0]].append(first[1])
    async for index, message in messages:
        responses[index].append(message)
    return web.Response(text=answer.whole(responses), content_type="application/json", headers=headers)


def _client_request_id(request: web.Request) -> str:
    """Return the client's own id; bytes that are not UTF-8 become U+FFFD."""
    given = request.headers.get("x-request-id", "")
    return given.encode(errors="surrogateescape").decode(errors="replace")
