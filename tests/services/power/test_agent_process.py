"""The agent's process over gRPC: limits, stops, crashes, refusals."""

from __future__ import annotations

import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from splitwise.errors import ExitCode
from splitwise.launch.emulated_gpus import NO_PERMISSION
from splitwise.rpc.v1 import common_pb2, power_pb2
from tests.services.gateway import live_cluster
from tests.services.power.agent import AgentProcess, ended
from tests.support.emulated_gpus import UUIDS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.emulated_gpus import GpuNode

MIXED = common_pb2.POOL_MIXED


@pytest_asyncio.fixture
async def agent(tmp_path: Path, node: GpuNode) -> AsyncIterator[AgentProcess]:
    made = AgentProcess(tmp_path, node)
    yield made
    if hasattr(made, "process"):
        await made.stop()


async def test_a_machine_is_capped_uncapped_and_capped_again(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start("--recap_after_s", "0.3")
    node.draw(0, 444)
    answer = await agent.hold()
    assert node.limits == [350, 350]
    assert answer.power.requested_watts == answer.power.enforced_watts == 700
    assert answer.gpus[0].draw_watts == 350
    await agent.hold(pool=MIXED)
    assert node.limits == [700, 700]
    answer = await agent.hold()
    assert answer.power.reason == "held"
    await agent.until_limits(350, 350)
    described = await agent.stub.Describe(power_pb2.DescribePowerRequest())
    assert [(gpu.uuid, gpu.reason, list(gpu.machines)) for gpu in described.gpus] == [
        (uuid, "token-cap", ["m"]) for uuid in UUIDS[:2]
    ]


async def test_sigterm_gives_everything_back(agent: AgentProcess, node: GpuNode) -> None:
    node.set_limit(1, 650)
    await agent.start()
    await agent.hold()
    assert json.loads(agent.state.read_text())["limits"] == {UUIDS[0]: 700, UUIDS[1]: 650}
    assert await agent.stop() == 0
    assert node.limits == [700, 650]
    assert not agent.state.exists()
    assert (await agent.process.said("power.restored"))[0]["level"] == "info"


async def test_an_impatient_stop_gives_everything_back_too(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start()
    await agent.hold()
    for _ in range(3):
        agent.process.process.terminate()
    assert await ended(agent.process) in (0, ExitCode.INTERRUPTED)  # signals in one moment are one
    assert node.limits == [700, 700]
    assert not agent.state.exists()


async def test_kill_9_is_made_good_by_the_next_start(agent: AgentProcess, node: GpuNode) -> None:
    node.set_limit(1, 650)
    await agent.start()
    await agent.hold()
    await agent.kill()
    assert node.limits == [350, 350]
    await agent.start()
    assert node.limits == [700, 650]  # before it was ready: nobody holds the GPUs yet
    assert [line["reason"] for line in await agent.process.said("power.limit_set", 2)] == ["returned"] * 2
    await agent.hold()
    assert node.limits == [350, 350]


async def test_kill_9_is_made_good_without_another_start(agent: AgentProcess, node: GpuNode) -> None:
    node.set_limit(1, 650)
    await agent.start()
    await agent.hold()
    await agent.kill()
    assert await ended(await agent.launch("--restore")) == 0  # as ExecStopPost of the unit does
    assert node.limits == [700, 650]
    assert await ended(await agent.launch("--restore")) == 0  # and again, when nothing is owed


async def test_what_cannot_be_restored_is_an_error(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start()
    await agent.hold()
    await agent.kill()
    node.fault(0, NO_PERMISSION)
    node.fault(1, NO_PERMISSION)
    assert await ended(await agent.launch("--restore")) == ExitCode.FAILED
    assert json.loads(agent.state.read_text())["limits"] == dict.fromkeys(UUIDS[:2], 700)


async def test_a_lease_that_runs_out(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start()
    await agent.hold(lease_ms=300)
    assert node.limits == [350, 350]
    await agent.until_limits(700, 700)
    (note,) = await agent.process.said("power.note")
    assert (note["code"], note["subject"]) == ("lease-expired", "m")


async def test_no_permission_is_said_with_the_remedy_and_the_agent_reports(
    agent: AgentProcess, node: GpuNode
) -> None:
    node.fault(0, NO_PERMISSION)
    node.fault(1, NO_PERMISSION)
    node.draw(0, 123)
    await agent.start()
    answer = await agent.hold()
    (line,) = await agent.process.said("power.reporting_only")
    assert "run the agent by its unit splitwise-power.service" in line["error"]
    assert answer.power.draw_watts == 123
    assert "Insufficient Permissions" in answer.power.problem
    described = await agent.stub.Describe(power_pb2.DescribePowerRequest())
    assert node.limits == [700, 700]
    assert await agent.stop() == 0
    assert described.gpus[0].previous_watts == 700


async def test_an_operator_suspends_and_resumes(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start()
    await agent.hold()
    assert (await agent.stub.Suspend(power_pb2.SuspendRequest())).suspended
    assert node.limits == [700, 700]
    assert not (await agent.stub.Suspend(power_pb2.SuspendRequest(undo=True))).suspended
    assert node.limits == [350, 350]


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        (
            {"identity": common_pb2.MachineIdentity(machine_id="a b")},
            "INVALID_ARGUMENT",
            "identity.machine_id",
        ),
        ({"home_pool": MIXED}, "INVALID_ARGUMENT", "home_pool"),
        ({"lease_ms": 50}, "INVALID_ARGUMENT", "lease_ms: 50"),
        ({"share_watts": -1.0}, "INVALID_ARGUMENT", "share_watts"),
        ({"share_watts": float("nan")}, "INVALID_ARGUMENT", "share_watts"),
        ({"pool": 9}, "INVALID_ARGUMENT", "pool"),
        ({"gpus": ["7"]}, "FAILED_PRECONDITION", "gpus[0]: '7' is no GPU of node rack-1"),
        ({"gpus": ["0", "0"]}, "INVALID_ARGUMENT", "one GPU is named twice"),
    ],
)
async def test_refusals_name_the_field(
    agent: AgentProcess, node: GpuNode, fields: dict[str, Any], code: str, said: str
) -> None:
    await agent.start("--node", "rack-1")
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await agent.hold(**fields)
    assert raised.value.code() is grpc.StatusCode[code]
    assert said in str(raised.value.details())
    assert node.limits == [700, 700]


async def test_health_and_reflection(agent: AgentProcess) -> None:
    await agent.start()
    health = health_pb2_grpc.HealthStub(agent.channel)
    answer = await health.Check(health_pb2.HealthCheckRequest(service="splitwise.v1.PowerAgent"))
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    with grpc.insecure_channel(agent.address) as channel:
        assert "splitwise.v1.PowerAgent" in ProtoReflectionDescriptorDatabase(channel).get_services()


async def test_two_agents_of_one_node(agent: AgentProcess, node: GpuNode) -> None:
    await agent.start()
    await agent.hold()
    other = await agent.launch("--listen", "127.0.0.1:0")
    assert await ended(other) == ExitCode.FAILED
    assert "another power agent of this node" in other.log.read_text()
    assert node.limits == [350, 350]  # the refused one has touched nothing


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (("--token_cap", "half"), "write none, a share such as 50%, or watts such as 350W"),
        (("--nvml", "no_such_module"), "power.nvml: cannot import 'no_such_module'"),
    ],
)
@pytest.mark.parametrize("words", [(), ("--check-config",)])
async def test_settings_that_are_refused(
    agent: AgentProcess, settings: tuple[str, ...], said: str, words: tuple[str, ...]
) -> None:
    process = await agent.launch(*settings, *words)
    assert await ended(process) == ExitCode.CONFIG
    assert said in process.log.read_text()


async def test_caps_are_taken_up_while_it_runs(agent: AgentProcess, node: GpuNode, tmp_path: Path) -> None:
    file = tmp_path / "splitwise.yaml"
    file.write_text("power: {token_cap: 400W}")
    await agent.start("--config", str(file))
    await agent.hold()
    assert node.limits == [400, 400]
    file.write_text("power: {token_cap: 450W}")
    agent.process.process.send_signal(signal.SIGHUP)
    await agent.until_limits(450, 450)
    file.write_text("power: {token_cap: lots}")
    agent.process.process.send_signal(signal.SIGHUP)
    (line,) = await agent.process.said("config.refused")
    assert "write none, a share such as 50%" in line["error"]
    assert node.limits == [450, 450]


async def test_settings_that_are_accepted(agent: AgentProcess) -> None:
    assert await ended(await agent.launch("--token_cap", "350W", "--check-config")) == 0


async def test_systemd_is_told(agent: AgentProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setitem(live_cluster.ENVIRONMENT, "NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setitem(live_cluster.ENVIRONMENT, "WATCHDOG_USEC", "60000000")
        await agent.start()
        assert {listener.recv(100), listener.recv(100)} == {b"READY=1", b"WATCHDOG=1"}
        os.kill(agent.process.process.pid, 15)
        assert listener.recv(100) == b"STOPPING=1"
        assert await ended(agent.process) == 0
