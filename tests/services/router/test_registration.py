"""Which machines a router takes, and what it says to the others."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from splitwise.rpc.v1 import common_pb2, router_pb2
from tests.services.gateway.live_cluster import PATIENCE
from tests.services.router.cluster import RouterCluster, expected, request

if TYPE_CHECKING:
    from tests.services.gateway.live_cluster import Process

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


async def known(cluster: RouterCluster, name: str = "token-0-a") -> Any:
    machines = (await cluster.describe()).machines
    return next(m.description for m in machines if m.description.identity.machine_id == name)


async def refusal(cluster: RouterCluster, machine: Any) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stub.Register(router_pb2.RegisterRequest(machine=machine))
    return caught.value.code().name, caught.value.details() or ""


async def logged(process: Process, event: str) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE):
        while True:
            for line in process.lines:
                if line["event"] == event:
                    return line
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("change", "code", "says"),
    [
        ({"home_pool": common_pb2.POOL_MIXED}, "INVALID_ARGUMENT", "machine.home_pool"),
        ({"home_pool": 9}, "INVALID_ARGUMENT", "machine.home_pool"),
        ({"model": ""}, "INVALID_ARGUMENT", "machine.model"),
        ({"kv_fingerprint": ""}, "INVALID_ARGUMENT", "machine.kv_fingerprint"),
        ({"kv_blocks": 0}, "INVALID_ARGUMENT", "machine.kv_blocks"),
        ({"address": "nowhere"}, "INVALID_ARGUMENT", "machine.address"),
        ({"address": "127.0.0.1:1"}, "ALREADY_EXISTS", "give every machine its own id"),
    ],
)
async def test_bad_descriptions_are_refused_by_field(
    cluster: RouterCluster, change: dict[str, Any], code: str, says: str
) -> None:
    machine = await known(cluster)
    for name, value in change.items():
        setattr(machine, name, value)
    assert (got := await refusal(cluster, machine))[0] == code, got
    assert says in got[1]


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "../x"])
async def test_names_are_names(cluster: RouterCluster, name: str) -> None:
    machine = await known(cluster)
    machine.identity.machine_id = name
    assert (await refusal(cluster, machine))[0] == "INVALID_ARGUMENT"


@pytest.mark.parametrize("change", [-1, 1])
async def test_another_incarnation_must_be_there_to_replace_one(cluster: RouterCluster, change: int) -> None:
    """A registration alone, older or newer, never costs the machine that serves."""
    machine = await known(cluster)
    stream = asyncio.create_task(cluster.ask(request(max_tokens=300)))
    machine.identity.incarnation += change
    code, details = await refusal(cluster, machine)
    assert code == "ABORTED"
    assert "incarnation" in details
    answer = await stream
    assert answer.ids == expected(300)
    assert answer.finished.restarts == 0
    assert (await known(cluster)).identity.incarnation == machine.identity.incarnation - change


async def test_registering_again_under_load_changes_nothing(cluster: RouterCluster) -> None:
    stream = asyncio.create_task(cluster.ask(request(max_tokens=300)))
    for _ in range(50):
        renewed = await cluster.stub.Register(router_pb2.RegisterRequest(machine=await known(cluster)))
        assert renewed.lease_ms > renewed.heartbeat_ms > 0
    answer = await stream
    assert (answer.ids, answer.finished.restarts) == (expected(300), 0)
    assert len((await cluster.describe()).machines) == 6
    await cluster.until_free()


async def test_a_machine_that_is_not_there_is_unavailable(cluster: RouterCluster) -> None:
    machine = await known(cluster)
    machine.identity.machine_id, machine.address = "ghost", "127.0.0.1:1"
    code, details = await refusal(cluster, machine)
    assert code == "UNAVAILABLE"
    assert "127.0.0.1:1" in details


async def test_other_kv_blocks_are_refused_with_the_difference(cluster: RouterCluster) -> None:
    """Nor does the refused machine's shorter limit become the model's."""
    machine = await cluster.start_machine("a", "odd", "token", layers=5, max_model_len=100)
    line = await logged(machine, "registration.failed")
    assert line["code"] == "FAILED_PRECONDITION"
    assert "machine.kv_fingerprint" in line["error"]
    assert "layers is 5 here and 4 there" in line["error"]
    assert all(m.description.identity.machine_id != "odd" for m in (await cluster.describe()).machines)
    assert (await cluster.ask(request(max_tokens=30))).ids == expected(30)
    assert await machine.stop() == 0


async def test_two_ids_alike_the_second_is_refused(cluster: RouterCluster) -> None:
    machine = await cluster.start_machine("b", "token-0-a", "token")
    line = await logged(machine, "registration.failed")
    assert line["code"] == "ALREADY_EXISTS"
    assert "token-0-a is connected at" in line["error"]
    assert await machine.stop() == 0


async def test_a_second_router_shares_the_machines(cluster: RouterCluster) -> None:
    """It dials them from its settings; that one of them registers as well makes no second connection."""
    other = RouterCluster(cluster.folder / "other")
    other.folder.mkdir()
    addresses = [m.description.address for m in (await cluster.describe()).machines]
    try:
        await other.start_router("--router-id", "second", "--machines", json.dumps(addresses))
        await other.until_serving(len(addresses))
        for _ in range(3):
            await other.stub.Register(router_pb2.RegisterRequest(machine=await known(cluster)))
        answers = await asyncio.gather(
            *(router.ask(request(max_tokens=100)) for router in (cluster, other) for _ in range(8))
        )
        assert all(answer.ids == expected(100) for answer in answers)
        joined = [line["machine"] for line in other.router.lines if line["event"] == "machine.joined"]
        assert len(joined) == len(set(joined)) == len(addresses)
        await other.until_free()
        assert await other.router.stop() == 0
    finally:
        await other.stop()
    assert (await cluster.ask(request(max_tokens=30))).ids == expected(30)
    await cluster.until_free()
