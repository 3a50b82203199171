"""Killed processes as clients see them: the text goes on exactly, or a typed error; nothing is left.

The tests share a cluster and run in order: the first finds it without machines, the last ends
its router.
"""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitwise.rpc.v1 import router_pb2
from tests.services.router.cluster import Answer, RouterCluster, expected, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
PAIR = ["1xH100:prompt", "1xH100:token"]
COUNT = 400
STREAMS = 8
SETTINGS = ("--machine-lease-ms", "2000", "--drain-s", "60")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    """Two nodes are started by the first test: each a daemon, a prompt and a token machine."""
    cluster = RouterCluster(tmp_path_factory.mktemp("faults"))
    try:
        await cluster.start_router(*SETTINGS)
        yield cluster
    finally:
        await cluster.stop()


async def serving(cluster: RouterCluster) -> bool:
    stub = health_pb2_grpc.HealthStub(cluster.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def machine_of(cluster: RouterCluster, message: Any, phase: str) -> str:
    explained = await cluster.stub.Explain(router_pb2.ExplainRequest(request_id=message.request_id))
    placed = [decision for decision in explained.decisions if decision.kind == "assign"]
    return str(getattr(placed[-1], f"{phase}_machine"))


async def streams_through(
    cluster: RouterCluster, fault: Callable[[Any], Awaitable[None]], after: int = 5
) -> list[Answer]:
    """Run many streams at once; `fault` gets a message of the first after its `after`th token."""

    async def one(number: int) -> Answer:
        answer, asked, done = Answer(), request(max_tokens=COUNT + number), False
        try:
            async for message in cluster.stream(asked, timeout=120):
                answer.add(message)
                if number == 0 and len(answer.ids) >= after and not done:
                    done = True
                    await fault(message)
        except grpc.aio.AioRpcError as error:
            answer.error = error
        return answer

    return await asyncio.gather(*map(one, range(STREAMS)))


def check_whole(answers: list[Answer]) -> None:
    for number, answer in enumerate(answers):
        assert answer.error is None, answer.error
        assert answer.ids == expected(COUNT + number)


async def test_without_machines_it_waits_for_them(cluster: RouterCluster) -> None:
    assert not await serving(cluster)
    answer = await cluster.ask(request(max_tokens=3))
    assert answer.error is not None
    assert answer.error.code() == grpc.StatusCode.UNAVAILABLE
    assert answer.retry_after_ms > 0
    await cluster.start_nodes({"a": PAIR, "b": PAIR})
    await cluster.until_cluster(lambda c: any(model.serving for model in c.models))
    assert (await cluster.ask(request(max_tokens=3))).ids == expected(3)


@pytest.mark.parametrize("phase", ["token", "prompt"])
async def test_a_killed_machine_is_not_seen_by_any_stream(cluster: RouterCluster, phase: str) -> None:
    noticed = 0.0

    async def kill(message: Any) -> None:
        nonlocal noticed
        machine = await machine_of(cluster, message, phase)
        incarnation = {
            m.description.identity.machine_id: m.description.identity.incarnation
            for m in (await cluster.describe()).machines
        }
        await cluster.signal_machine(machine)
        killed = time.monotonic()
        await cluster.until_cluster(
            lambda c: (
                not any(
                    m.description.identity.machine_id == machine
                    and m.description.identity.incarnation == incarnation[machine]
                    for m in c.machines
                )
            )
        )
        noticed = time.monotonic() - killed

    answers = await streams_through(cluster, kill)
    check_whole(answers)
    if phase == "token":
        assert any(answer.finished.restarts for answer in answers)
    assert 0 < noticed < 5  # a broken connection is noticed at once; a loaded host may be slow
    await cluster.until_serving(4)  # it is started again, as a new incarnation
    await cluster.until_free()


async def test_a_prompt_machine_killed_before_the_first_token(cluster: RouterCluster) -> None:
    asked = [asyncio.create_task(cluster.ask(request([7] * 8000, max_tokens=20))) for _ in range(6)]
    described = await cluster.until_cluster(lambda c: any(m.pending_prompt_tokens for m in c.machines))
    busy = max(described.machines, key=lambda m: m.pending_prompt_tokens)
    await cluster.signal_machine(busy.description.identity.machine_id)
    answers = await asyncio.gather(*asked)
    assert all(answer.ids == expected(20, [7] * 8000) for answer in answers), answers
    assert any(answer.finished.restarts for answer in answers)
    await cluster.until_serving(4)
    await cluster.until_free()


@pytest.mark.parametrize("node", ["a", "b"])
async def test_a_killed_daemon_costs_no_token(cluster: RouterCluster, node: str) -> None:
    async def kill(_message: Any) -> None:
        cluster.kvds[node].process.kill()
        await cluster.kvds[node].process.wait()

    check_whole(await streams_through(cluster, kill))
    answer = await cluster.ask(request(max_tokens=30))
    assert answer.ids == expected(30)
    await cluster.start_daemon(node)
    await cluster.until_serving(4)
    await cluster.until_free()


async def test_a_stopped_machine_is_lost_when_its_lease_ends(cluster: RouterCluster) -> None:
    stopped = ""

    async def stop(message: Any) -> None:
        nonlocal stopped
        stopped = await machine_of(cluster, message, "token")
        await cluster.signal_machine(stopped, signal.SIGSTOP)

    answers = await streams_through(cluster, stop)
    await cluster.signal_machine(stopped, signal.SIGCONT)  # what it still says is of nobody's attempt
    check_whole(answers)
    await cluster.until_serving(4)
    await cluster.until_free()


async def test_a_drained_machine_ends_what_it_runs_and_gets_no_more(cluster: RouterCluster) -> None:
    drained = ""

    async def drain(message: Any) -> None:
        nonlocal drained
        drained = await machine_of(cluster, message, "token")
        answer = await cluster.stub.DrainMachine(router_pb2.DrainMachineRequest(machine_id=drained))
        assert answer.state == "draining"

    answers = await streams_through(cluster, drain)
    check_whole(answers)
    assert not any(answer.finished.restarts for answer in answers)
    later = await asyncio.gather(*(cluster.ask(request(max_tokens=5)) for _ in range(6)))
    assert all(answer.finished.placement.token_machine != drained for answer in later)
    await cluster.stub.DrainMachine(router_pb2.DrainMachineRequest(machine_id=drained, undo=True))
    await cluster.until_serving(4)
    with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND") as unknown:
        await cluster.stub.DrainMachine(router_pb2.DrainMachineRequest(machine_id="nobody"))
    assert drained in (unknown.value.details() or "")


async def test_all_machines_lost_under_load_and_back(cluster: RouterCluster) -> None:
    async def kill_all(_message: Any) -> None:
        for machine in cluster.machines:
            await cluster.signal_machine(machine)

    answers = await streams_through(cluster, kill_all)
    assert any(answer.error is not None for answer in answers)
    for answer in answers:
        assert answer.ids == expected(COUNT + STREAMS)[: len(answer.ids)]
        if answer.error is not None:
            assert answer.error.code() == grpc.StatusCode.UNAVAILABLE
            assert answer.retry_after_ms > 0
            assert answer.finished is None
        else:
            assert answer.finished is not None
    await cluster.until_serving(4)
    assert (await cluster.ask(request(max_tokens=20))).ids == expected(20)
    await cluster.until_free()


async def test_a_killed_router_leaves_nothing_on_the_machines(cluster: RouterCluster) -> None:
    async def kill(_message: Any) -> None:
        cluster.router.process.kill()
        await cluster.router.process.wait()

    for answer in await streams_through(cluster, kill):
        assert answer.error is not None
        assert answer.error.code() == grpc.StatusCode.UNAVAILABLE
        assert answer.ids == expected(COUNT)[: len(answer.ids)]
    await cluster.restart_router(*SETTINGS)
    await cluster.until_serving(4)
    await cluster.until_free()
    assert (await cluster.ask(request(max_tokens=20))).ids == expected(20)


async def test_a_router_that_drains_ends_its_streams_and_exits_cleanly(cluster: RouterCluster) -> None:
    refused: list[Answer] = []
    healthy: list[bool] = []

    async def terminate(_message: Any) -> None:
        cluster.router.process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.3)
        healthy.append(await serving(cluster))
        refused.append(await cluster.ask(request(max_tokens=2)))

    check_whole(await streams_through(cluster, terminate))
    assert healthy == [False]
    assert refused[0].error is not None
    assert refused[0].error.code() == grpc.StatusCode.UNAVAILABLE
    assert await asyncio.wait_for(cluster.router.process.wait(), 60) == 0
