"""A token machine that dies, and a client that leaves, over gRPC and as an HTTP stream."""

from __future__ import annotations

import asyncio
import json
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import grpc.aio
import pytest

from splitwise.rpc.v1 import router_pb2
from tests.services.requests import characters
from tests.services.requests.ways import grpc_request, http_body
from tests.services.router.cluster import MODEL, expected, text_of

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from tests.services.router.cluster import RouterCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PROMPT = list(range(1, 301))
COUNT = 3000
WAYS = ["grpc", "sse"]
Event = tuple[str, str, str | None]
"""The request's id, text, and how it ended: stop, length, an error, or None."""


async def over_grpc(cluster: RouterCluster, model: str, **sampling: Any) -> AsyncGenerator[Event, None]:
    call = cluster.stub.Generate(grpc_request(PROMPT, model, **sampling))
    try:
        async for message in call:
            ended = message.finished.reason if message.HasField("finished") else None
            yield message.request_id, message.text, {1: "stop", 2: "length"}.get(ended or 0)
    except grpc.aio.AioRpcError as error:
        yield "", "", f"error {error.code().name}"
    finally:
        call.cancel()


async def over_http(http: aiohttp.ClientSession, model: str, **sampling: Any) -> AsyncGenerator[Event, None]:
    path, body = http_body(PROMPT, model, **sampling)
    async with http.post(path, json={**body, "stream": True}) as response:
        async for line in response.content:
            data = line.decode().strip().removeprefix("data: ")
            if not data or data == "[DONE]":
                continue
            content = json.loads(data)
            if "error" in content:
                yield "", "", f"error {content['error']['code']}"
                with pytest.raises(aiohttp.ClientPayloadError):  # the body is cut after it
                    await response.content.read()
                return
            choice = content["choices"][0]
            yield response.headers["x-request-id"], choice["text"], choice["finish_reason"]


def ask(
    way: str, cluster: RouterCluster, http: aiohttp.ClientSession, model: str = MODEL
) -> AsyncGenerator[Event, None]:
    options = {"temperature": 0.0, "ignore_eos": True, "max_tokens": COUNT}
    return over_grpc(cluster, model, **options) if way == "grpc" else over_http(http, model, **options)


async def kill_token_machine(cluster: RouterCluster, request_id: str) -> None:
    explained = await cluster.stub.Explain(router_pb2.ExplainRequest(request_id=request_id))
    machine = next(d.token_machine for d in reversed(explained.decisions) if d.kind == "assign")
    await cluster.signal_machine(machine, signal.SIGKILL)


@pytest.mark.parametrize("way", WAYS)
async def test_the_stream_goes_on_when_its_token_machine_dies(
    cluster: RouterCluster, http: aiohttp.ClientSession, way: str
) -> None:
    text, endings, killed = "", [], False
    async for request_id, more, ended in ask(way, cluster, http):
        text += more
        endings += [ended] if ended else []
        if text.count(" t") >= 3 and not killed:
            killed = True
            await kill_token_machine(cluster, request_id)
    assert text == text_of(expected(COUNT, PROMPT, ignore_eos=True))
    assert endings == ["length"]
    await cluster.until_serving(5)
    await cluster.until_free()


@pytest.mark.parametrize("way", WAYS)
async def test_when_it_cannot_go_on_the_stream_ends_with_an_error(
    cluster: RouterCluster, http: aiohttp.ClientSession, way: str
) -> None:
    """Every machine of its model died: never an end that looks like one."""
    endings, killed = [], False
    async for _, _, ended in ask(way, cluster, http, characters.MODEL):
        endings += [ended] if ended else []
        if not killed:
            killed = True
            for machine in ("prompt-0-b", "token-0-b"):
                await cluster.signal_machine(machine, signal.SIGKILL)
    assert endings == [{"grpc": "error UNAVAILABLE", "sse": "error unavailable"}[way]]
    await cluster.until_serving(5)
    await cluster.until_free()


@pytest.mark.parametrize("way", WAYS)
async def test_who_leaves_after_the_first_token_frees_everything(
    cluster: RouterCluster, http: aiohttp.ClientSession, way: str
) -> None:
    before = (await cluster.describe()).counters.cancelled
    stream = ask(way, cluster, http)
    await anext(stream)
    await stream.aclose()
    # Half a second of patience for the report itself; a stuck request would hold its blocks for a minute.
    async with asyncio.timeout(30):
        after = await cluster.until_free()
    assert after.counters.cancelled == before + 1
