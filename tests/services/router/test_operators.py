"""What operators see and do: health, explanations, drained machines, changes of the cluster."""

from __future__ import annotations

import asyncio
import socket
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from splitwise.rpc.v1 import common_pb2, router_pb2
from tests.services.gateway.live_cluster import PATIENCE
from tests.services.router.cluster import PROMPT, RouterCluster, expected, request

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


async def serving(cluster: RouterCluster) -> bool:
    asked = health_pb2.HealthCheckRequest(service="splitwise.v1.Router")
    answer = await health_pb2_grpc.HealthStub(cluster.channel).Check(asked)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def drained(cluster: RouterCluster, machine: str, *, undo: bool = False) -> str:
    asked = router_pb2.DrainMachineRequest(machine_id=machine, undo=undo)
    return str((await cluster.stub.DrainMachine(asked)).state)


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def test_a_router_without_machines_says_so(tmp_path: Path) -> None:
    lonely = RouterCluster(tmp_path)
    try:
        await lonely.start_router()
        assert not await serving(lonely)
        answer = await lonely.ask(request("x", model=""))
        assert answer.error is not None
        assert answer.error.code() == grpc.StatusCode.UNAVAILABLE
        assert answer.retry_after_ms == 1000
    finally:
        await lonely.stop()


async def test_every_machine_that_was_weighed_is_explained(cluster: RouterCluster) -> None:
    async with asyncio.timeout(10):
        while not await serving(cluster):  # noqa: ASYNC110 - the health follows at the next tick
            await asyncio.sleep(0.01)
    asked = request(max_tokens=30, logprobs=2)
    asked.client_request_id = "mine"
    messages = [message async for message in cluster.stream(asked)]
    assert {message.client_request_id for message in messages} == {"mine"}
    assert sum(len(message.logprobs) for message in messages) == 30
    placement = messages[-1].finished.placement
    found = await cluster.stub.Explain(router_pb2.ExplainRequest(request_id=messages[0].request_id))
    assert [record.kind for record in found.decisions] == ["assign", "finish"]
    assign = found.decisions[0]
    assert (assign.prompt_machine, assign.token_machine) == (
        placement.prompt_machine,
        placement.token_machine,
    )
    weighed = {(seen.machine_id, seen.phase, seen.chosen) for seen in assign.candidates}
    prompt, token = common_pb2.PHASE_PROMPT, common_pb2.PHASE_TOKEN
    assert weighed == {
        (f"{home}-0-{node}", phase, f"{home}-0-{node}" in (assign.prompt_machine, assign.token_machine))
        for home, phase in (("prompt", prompt), ("token", token))
        for node in "ab"
    }
    assert all(seen.kv_blocks > 0 for seen in assign.candidates)
    unknown = cluster.stub.Explain(router_pb2.ExplainRequest(request_id="none"))
    assert (await refusal(unknown))[0] == grpc.StatusCode.NOT_FOUND
    await cluster.until_free()


async def test_idle_machines_take_turns(cluster: RouterCluster) -> None:
    """One request after the other finds all machines idle, and uses all of them."""
    placed = []
    for _ in range(4):
        answer = await cluster.ask(request(PROMPT[:40], max_tokens=3))
        placed.append(answer.finished.placement.prompt_machine)
        await cluster.until_free()
    assert placed[0] != placed[1]
    assert placed[:2] == placed[2:]


async def test_a_drained_machine_gets_no_work_until_it_is_given_back(cluster: RouterCluster) -> None:
    code, message = await refusal(
        cluster.stub.DrainMachine(router_pb2.DrainMachineRequest(machine_id="none"))
    )
    assert code == grpc.StatusCode.NOT_FOUND
    assert "token-0-a" in message
    assert await drained(cluster, "token-0-a") == "draining"
    answers = [await cluster.ask(request(max_tokens=3)) for _ in range(3)]
    assert {answer.finished.placement.token_machine for answer in answers} == {"token-0-b"}
    assert await drained(cluster, "token-0-a", undo=True) == "serving"
    answers = [await cluster.ask(request(max_tokens=3)) for _ in range(2)]
    assert "token-0-a" in {answer.finished.placement.token_machine for answer in answers}
    await cluster.until_free()


async def test_changes_of_the_cluster_are_streamed(cluster: RouterCluster) -> None:
    watch: Any = cluster.stub.WatchCluster(router_pb2.DescribeClusterRequest())
    first = await watch.read()
    assert {machine.state for machine in first.machines} == {"serving"}
    await drained(cluster, "token-0-a")
    async with asyncio.timeout(PATIENCE):
        while "draining" not in {machine.state for machine in (await watch.read()).machines}:
            pass
    watch.cancel()
    await drained(cluster, "token-0-a", undo=True)


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this host has no IPv6 loopback")
async def test_a_router_on_ipv6(tmp_path: Path) -> None:
    six = RouterCluster(tmp_path)
    try:
        await six.start_router("--listen", "[::1]:0")
        assert six.address.startswith("[::1]:")
        await six.start_nodes({"a": ["1xH100:prompt", "1xH100:token"]})
        assert (await six.ask(request(max_tokens=5))).ids == expected(5)
    finally:
        await six.stop()
