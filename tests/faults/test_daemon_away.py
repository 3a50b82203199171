"""The only pair's KV daemon dies: requests wait for it, as for any machine, and none fails for that."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Any

import grpc
import pytest
import pytest_asyncio

from tests.services.router.cluster import RouterCluster, expected, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    cluster = RouterCluster(tmp_path_factory.mktemp("away"))
    try:
        await cluster.start_router()
        await cluster.start_nodes({"a": ["1xH100:prompt", "1xH100:token"]})
        yield cluster
    finally:
        await cluster.stop()


async def kill_daemon(cluster: RouterCluster) -> None:
    cluster.kvds["a"].process.send_signal(signal.SIGKILL)
    await cluster.kvds["a"].process.wait()


def all_paused(state: Any) -> bool:
    return {machine.state for machine in state.machines} == {"paused"}


async def test_what_runs_and_what_comes_waits_for_the_daemon(cluster: RouterCluster) -> None:
    running = asyncio.create_task(cluster.ask(request(max_tokens=400)))
    await cluster.until_cluster(lambda state: state.running)
    await kill_daemon(cluster)
    state = await cluster.until_cluster(all_paused)
    assert [model.serving for model in state.models] == [False]
    waiting = [asyncio.create_task(cluster.ask(request(max_tokens=20))) for _ in range(5)]
    await cluster.until_cluster(lambda state: state.queued >= 5)
    assert not any(task.done() for task in waiting)
    await cluster.start_daemon("a")
    for answer in await asyncio.gather(*waiting):
        assert answer.error is None, answer.error
        assert answer.ids == expected(20)
    assert (await running).ids == expected(400)
    await cluster.until_free()
    await cluster.until_serving(2)


async def test_a_deadline_ends_the_wait(cluster: RouterCluster) -> None:
    await kill_daemon(cluster)
    await cluster.until_cluster(all_paused)
    answer = await cluster.ask(request(max_tokens=20), timeout=1.0)
    assert answer.error is not None
    assert answer.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await cluster.start_daemon("a")
    await cluster.until_serving(2)
    assert (await cluster.ask(request(max_tokens=20))).ids == expected(20)
    await cluster.until_free()
