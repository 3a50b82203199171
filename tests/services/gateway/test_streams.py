"""Streams that do not end well: failures in the middle, clients that leave or take nothing, stops."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from services.router.gateway import GatewayOptions, serve_gateway
from services.router.gateway.metrics import REQUESTS, STALLED_STREAMS
from splitwise import errors
from splitwise.config import Address
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_CANCELLED

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.services.gateway.scripted import ScriptedBackend

BODY = {"model": "tiny", "prompt": "x", "stream": True}


async def eventually(condition: Callable[[], bool], seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.01)


async def read_events(response: aiohttp.ClientResponse, events: list[str]) -> None:
    async for line in response.content:
        if line.strip():
            events.append(line.decode().removeprefix("data: ").strip())  # noqa: PERF401 - kept on errors


async def collect(stream: Any, seen: list[Any]) -> None:
    async for chunk in stream:
        seen.append(chunk)  # noqa: PERF401 - kept on errors


def fail_with_error(backend: ScriptedBackend) -> None:
    backend.failures = {3: errors.UnavailableError("the token machine is lost", code="UNAVAILABLE")}


def fail_with_bug(backend: ScriptedBackend) -> None:
    backend.failures = {3: RuntimeError("hunter2")}


def be_cancelled(backend: ScriptedBackend) -> None:
    backend.finish = FINISH_REASON_CANCELLED


def end_early(backend: ScriptedBackend) -> None:
    backend.unfinished = True


BREAKS = [fail_with_error, fail_with_bug, be_cancelled, end_early]


@pytest.mark.parametrize("break_", BREAKS)
async def test_a_broken_stream_is_an_error_event_and_no_end(
    http: aiohttp.ClientSession, backend: ScriptedBackend, break_: Callable[[ScriptedBackend], None]
) -> None:
    break_(backend)
    events: list[str] = []
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.status == 200
        # Cut: not even a client that reads no error events takes it for whole.
        with pytest.raises(aiohttp.ClientPayloadError):
            await read_events(response, events)
    assert "[DONE]" not in events
    *chunks, last = map(json.loads, events)
    assert len(chunks) >= 3
    assert {chunk["choices"][0]["finish_reason"] for chunk in chunks} == {None}
    assert last.keys() == {"error"}
    assert "hunter2" not in last["error"]["message"]
    assert backend.running == 0


@pytest.mark.parametrize("break_", BREAKS)
@pytest.mark.parametrize("chat", [False, True])
async def test_the_official_client_raises_in_the_middle(
    client: openai.AsyncOpenAI,
    backend: ScriptedBackend,
    break_: Callable[[ScriptedBackend], None],
    chat: bool,
) -> None:
    break_(backend)
    stream: Any
    if chat:
        stream = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "x"}], stream=True
        )
    else:
        stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    seen: list[Any] = []
    with pytest.raises(openai.APIError):
        await collect(stream, seen)
    assert seen
    assert {chunk.choices[0].finish_reason for chunk in seen} == {None}


@pytest.mark.parametrize("break_", BREAKS)
async def test_an_answer_that_is_not_streamed_fails_as_a_whole(
    http: aiohttp.ClientSession, backend: ScriptedBackend, break_: Callable[[ScriptedBackend], None]
) -> None:
    break_(backend)
    async with http.post("/v1/completions", json=BODY | {"stream": False}) as response:
        assert response.status in (500, 503)
        assert (await response.json()).keys() == {"error"}


async def test_a_client_that_leaves_a_stream_cancels_it(address: Address, backend: ScriptedBackend) -> None:
    backend.endless = True
    backend.pauses = {2: asyncio.Event()}  # never set: nothing would be written that could fail
    async with aiohttp.ClientSession() as session:
        response = await session.post(f"http://{address}/v1/completions", json=BODY)
        await response.content.readline()
        assert backend.running == 1
        response.close()
        await eventually(lambda: backend.running == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_cancels_too(
    address: Address, backend: ScriptedBackend, stream: bool
) -> None:
    backend.pauses = {0: asyncio.Event()}
    async with aiohttp.ClientSession() as session:
        call = asyncio.ensure_future(
            session.post(f"http://{address}/v1/completions", json=BODY | {"stream": stream})
        )
        await eventually(lambda: backend.running == 1)
        call.cancel()
        await eventually(lambda: backend.running == 0)


async def test_the_official_client_leaving_cancels(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.endless = True
    backend.pauses = {2: asyncio.Event()}
    stream = await client.completions.create(model="tiny", prompt="x", stream=True)
    async for _ in stream:
        break
    await stream.close()
    await eventually(lambda: backend.running == 0)


async def test_tokens_are_sent_as_they_come(http: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.pauses = {1: asyncio.Event()}
    async with http.post("/v1/completions", json=BODY) as response:
        async with asyncio.timeout(20):
            first = await response.content.readline()
        assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == "H"
        backend.pauses[1].set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")


class TestStall:
    @pytest.fixture
    def options(self) -> GatewayOptions:
        return GatewayOptions(stall_s=0.3, drain_s=5)

    async def test_a_client_that_takes_nothing_is_given_up(
        self, address: Address, backend: ScriptedBackend
    ) -> None:
        backend.endless = True
        backend.context = 10**6  # some 100 MB of events: no buffer of the kernel takes that
        before = STALLED_STREAMS._value.get()
        body = json.dumps(BODY | {"logprobs": 3}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1024)
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        await eventually(lambda: backend.running == 1)
        await eventually(lambda: backend.running == 0, 60)
        assert STALLED_STREAMS._value.get() == before + 1
        writer.close()


async def test_stopping_lets_streams_finish_and_takes_no_new_ones(backend: ScriptedBackend) -> None:
    backend.pauses = {2: asyncio.Event()}
    options = GatewayOptions(drain_s=30)
    manager = serve_gateway(backend, Address("127.0.0.1", 0), options)
    gateway = await manager.__aenter__()
    async with aiohttp.ClientSession(f"http://{gateway.address}") as session:
        response = await session.post("/v1/completions", json=BODY)
        stopping = asyncio.ensure_future(manager.__aexit__(None, None, None))
        await asyncio.sleep(0.2)
        assert not stopping.done()
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.post("/v1/completions", json=BODY)
        backend.pauses[2].set()
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(20):
            await stopping


async def test_what_does_not_finish_in_time_is_cancelled(backend: ScriptedBackend) -> None:
    backend.pauses = {2: asyncio.Event()}
    async with aiohttp.ClientSession() as session:
        async with serve_gateway(backend, Address("127.0.0.1", 0), GatewayOptions(drain_s=0.1)) as gateway:
            response = await session.post(f"http://{gateway.address}/v1/completions", json=BODY)
        await eventually(lambda: backend.running == 0)
        with pytest.raises(aiohttp.ClientError):
            await response.read()


async def test_many_streams_at_once_stay_apart(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    async def ask(count: int) -> str:
        stream = await client.completions.create(model="tiny", prompt="x", max_tokens=count, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    answers = await asyncio.gather(*[ask(count) for count in range(1, 13)])
    assert answers == ["Hello, world"[:count] for count in range(1, 13)]
    assert backend.running == 0


async def test_leavers_are_counted_as_such(address: Address, backend: ScriptedBackend) -> None:
    backend.pauses = {0: asyncio.Event()}
    counted = REQUESTS.labels("/v1/completions", "499")._value
    before = counted.get()
    body = json.dumps(BODY).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for sent in (body, body[:5]):  # one leaves while it waits, one in the middle of its body
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + sent)
        await writer.drain()
        await asyncio.sleep(0.3)
        writer.close()
    await eventually(lambda: counted.get() == before + 2)
    assert backend.running == 0
