"""A thousand clients that leave, over gRPC and HTTP: every count is back at nothing, and it serves on."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING, Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.services.requests.ways import grpc_request, http_body
from tests.services.router.cluster import MODEL, expected

if TYPE_CHECKING:
    import aiohttp

    from tests.services.router.cluster import RouterCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 4000}
AT_ONCE = 50


async def test_a_thousand_leave(cluster: RouterCluster, http: aiohttp.ClientSession) -> None:
    """At any moment of the request's life: before it is admitted, while it waits, between tokens."""
    before = (await cluster.describe()).counters
    choose = random.Random(11)
    free = asyncio.Semaphore(AT_ONCE)

    async def over_grpc(prompt: list[int], seconds: float) -> None:
        call = cluster.stub.Generate(grpc_request(prompt, MODEL, **OPTIONS))
        await asyncio.sleep(seconds)
        call.cancel()

    async def over_http(prompt: list[int], seconds: float) -> None:
        path, body = http_body(prompt, MODEL, **OPTIONS)
        asking = asyncio.create_task(http.post(path, json={**body, "stream": True}))
        await asyncio.sleep(seconds)
        if asking.done():
            (await asking).close()
        asking.cancel()

    async def one(number: int) -> None:
        async with free:
            leave = over_http if number % 2 else over_grpc
            await leave([1 + number % 250] * choose.randrange(1, 400), choose.choice([0, 0.005, 0.05, 0.2]))

    await asyncio.gather(*map(one, range(1000)))
    after = (await cluster.until_free()).counters
    assert after.cancelled > before.cancelled
    assert (after.finished, after.failed) == (before.finished, before.failed)
    gone = after.received - before.received
    assert gone == (after.cancelled - before.cancelled) + (after.rejected - before.rejected)
    health = await health_pb2_grpc.HealthStub(cluster.channel).Check(health_pb2.HealthCheckRequest())
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    answer = await cluster.ask(grpc_request([5, 6, 7], MODEL, temperature=0.0, max_tokens=9))
    assert answer.ids == expected(9, [5, 6, 7])


@pytest.mark.slow
async def test_after_an_idle_while_the_same_connections_serve(
    cluster: RouterCluster, http: aiohttp.ClientSession
) -> None:
    """Longer than three keep-alive pings of each end: neither takes the other's for too many."""
    path, body = http_body([5, 6, 7], MODEL, temperature=0.0, max_tokens=9)
    for idle_s in (70, 0):
        answer = await cluster.ask(grpc_request([5, 6, 7], MODEL, temperature=0.0, max_tokens=9))
        assert answer.ids == expected(9, [5, 6, 7])
        async with http.post(path, json=body) as response:
            assert response.status == 200
        await asyncio.sleep(idle_s)
    assert "too_many_pings" not in (cluster.folder / "router.log").read_text()
    assert "too_many_pings" not in (cluster.folder / "fleet.log").read_text()
