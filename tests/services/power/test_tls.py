"""The agent with TLS: who may hold GPUs, who may suspend, and everybody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from splitwise.config import Address
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1 import common_pb2, power_pb2
from splitwise.rpc.v1.power_pb2_grpc import PowerAgentStub
from tests.services.power.agent import AgentProcess
from tests.services.tls.cluster import flags, make_certificates, tls_of

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.emulated_gpus import GpuNode

HOLD = power_pb2.HoldRequest(
    identity=common_pb2.MachineIdentity(machine_id="m", incarnation=1),
    home_pool=common_pb2.POOL_TOKEN,
    pool=common_pb2.POOL_TOKEN,
    lease_ms=60_000,
)


async def outcome(call: grpc.aio.UnaryUnaryCall) -> str:  # type: ignore[type-arg]
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code().name
    return "OK"


async def test_roles_open_what_is_theirs(tmp_path: Path, node: GpuNode) -> None:
    folder = tmp_path / "certificates"
    assert make_certificates(folder).returncode == 0
    agent = AgentProcess(tmp_path, node)
    await agent.start(*flags(tls_of(folder, "power")))
    expected = {
        "machine": ("OK", "PERMISSION_DENIED", "PERMISSION_DENIED"),
        "operator": ("PERMISSION_DENIED", "OK", "OK"),
        "client": ("PERMISSION_DENIED",) * 3,
        "router": ("PERMISSION_DENIED",) * 3,
    }
    try:
        seen = {}
        for role in expected:
            tls = tls_of(folder, role)
            async with open_channel(Address.parse(agent.address), tls=tls, role=Role.POWER) as channel:
                stub = PowerAgentStub(channel)
                seen[role] = (
                    await outcome(stub.Hold(HOLD)),
                    await outcome(stub.Describe(power_pb2.DescribePowerRequest())),
                    await outcome(stub.Suspend(power_pb2.SuspendRequest(undo=True))),
                )
        assert seen == expected
        assert node.limits == [350, 350]
        async with open_channel(Address.parse(agent.address)) as channel:
            assert await outcome(PowerAgentStub(channel).Hold(HOLD)) == "UNAVAILABLE"
        wrong = tls_of(folder, "machine")
        async with open_channel(Address.parse(agent.address), tls=wrong, role=Role.KVD) as channel:
            assert await outcome(PowerAgentStub(channel).Hold(HOLD)) == "UNAVAILABLE"  # it is no KV daemon
    finally:
        await agent.stop()


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:0"])
async def test_a_plain_listener_beyond_loopback_is_warned_of(
    tmp_path: Path, node: GpuNode, listen: str
) -> None:
    agent = AgentProcess(tmp_path, node)
    agent.address = listen
    await agent.start()
    try:
        (line,) = await agent.process.said("rpc.plaintext")
        assert line["remedy"] == "set the tls section"
    finally:
        await agent.stop()
