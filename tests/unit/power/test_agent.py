"""The agent over emulated GPUs: limits, errors of the driver, and what outlives a crash."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from structlog.testing import capture_logs

from services.power.agent import RESCAN_S, PowerAgent
from services.power.limits_file import LimitsFile
from services.power.nvml import Nvml
from splitwise.config import PowerSettings
from splitwise.errors import InvalidRequestError, PreconditionError, StaleError
from splitwise.launch.emulated_gpus import (
    FILE_VARIABLE,
    IGNORED,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    EmulatedGpus,
)
from splitwise.power import Role
from splitwise.rpc.v1 import common_pb2, power_pb2
from tests.support.emulated_gpus import UUIDS, GpuNode

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "services.power.emulated_nvml"


class Bench:
    """A node, and agents on it one after the other, with a clock of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = GpuNode(folder)
        self.now = 100.0
        self.kept: LimitsFile | None = None

    def start(self, **settings: Any) -> PowerAgent:
        self.crash()
        self.kept = LimitsFile(self.folder / "limits.json")
        self.kept.open()
        options = PowerSettings(nvml=MODULE, **settings)
        self.agent = PowerAgent(options, Nvml(MODULE), self.kept, clock=lambda: self.now)
        self.agent.start()
        return self.agent

    def crash(self) -> None:
        """What kill -9 leaves: the file as it is, and the lock given up."""
        if self.kept is not None and self.kept._lock is not None:
            self.kept._lock.close()

    def hold(self, role: Role = Role.TOKEN, *gpus: str, **fields: Any) -> power_pb2.HoldResponse:
        identity = common_pb2.MachineIdentity(
            machine_id=fields.pop("machine", "m"), incarnation=fields.pop("start", 1)
        )
        request = power_pb2.HoldRequest(identity=identity, gpus=gpus, lease_ms=5000, **fields)
        return self.agent.hold(request, role)

    @property
    def owed(self) -> dict[str, float]:
        file = self.folder / "limits.json"
        return json.loads(file.read_text())["limits"] if file.exists() else {}  # type: ignore[no-any-return]


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setenv(FILE_VARIABLE, str(made.node.file))
    return made


def events(logs: list[Any]) -> list[str]:
    return [line["event"] for line in logs]


def test_a_token_machine_s_gpus(bench: Bench) -> None:
    bench.start()
    bench.node.draw(0, 500)
    bench.node.draw(1, 120)
    answer = bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 350]
    power = answer.power
    assert (power.gpus, power.requested_watts, power.enforced_watts) == (2, 700, 700)
    assert (power.draw_watts, power.reason, power.problem) == (470, "token-cap", "")
    assert (power.floor_watts, power.wanted_watts) == (400, 700)
    assert (power.prompt_watts, power.token_watts, power.borrowed_watts) == (1400, 700, 1400)
    assert [(gpu.uuid, gpu.previous_watts, list(gpu.machines)) for gpu in answer.gpus] == [
        (UUIDS[0], 700, ["m"]),
        (UUIDS[1], 700, ["m"]),
    ]
    bench.hold(Role.BORROWED)
    assert bench.node.limits == [700, 700]


def test_the_previous_limit_is_on_disk_before_it_is_changed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = bench.start()
    seen: list[dict[str, float]] = []
    plain = agent._nvml.set_limit

    def set_limit(*arguments: Any) -> None:
        seen.append(bench.owed)
        plain(*arguments)

    monkeypatch.setattr(agent._nvml, "set_limit", set_limit)
    bench.node.set_limit(0, 600)
    agent.tick()  # an operator's choice, made while nobody claims the GPU
    bench.hold(Role.TOKEN, "0")
    assert seen == [{UUIDS[0]: 600}]


def test_limits_are_returned_and_forgotten(bench: Bench) -> None:
    agent = bench.start()
    bench.hold(Role.TOKEN)
    assert bench.owed == dict.fromkeys(UUIDS[:2], 700)
    agent.release("m", 1)
    assert bench.node.limits == [700, 700]
    assert bench.owed == {}


def test_everything_is_returned_at_the_end(bench: Bench) -> None:
    agent = bench.start()
    bench.hold(Role.TOKEN)
    agent.close()
    assert bench.kept is not None
    bench.kept.close()
    assert bench.node.limits == [700, 700]
    assert not (bench.folder / "limits.json").exists()


def test_a_silent_machine(bench: Bench) -> None:
    agent = bench.start()
    bench.hold(Role.TOKEN)
    bench.now += 4.9
    agent.tick()
    assert bench.node.limits == [350, 350]
    bench.now += 0.2
    with capture_logs() as logs:
        described = agent.tick()
    assert bench.node.limits == [700, 700]
    assert [line["code"] for line in logs if line["event"] == "power.note"] == ["lease-expired"]
    assert not any(gpu.machines for gpu in described.gpus)


def test_a_crash_is_made_good_by_the_next_start(bench: Bench) -> None:
    bench.node.set_limit(1, 650)
    bench.start()
    bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 350]
    bench.start()
    assert bench.node.limits == [700, 650]
    assert bench.owed == {}
    bench.hold(Role.TOKEN)  # the machine is still there
    assert bench.node.limits == [350, 350]
    bench.agent.close()
    assert bench.node.limits == [700, 650]


def test_a_file_from_before_a_reboot_is_ignored(bench: Bench) -> None:
    bench.start()
    bench.hold(Role.TOKEN)
    file = bench.folder / "limits.json"
    file.write_text(file.read_text().replace('"boot_id": "', '"boot_id": "other'))
    bench.node.set_limit(0, 500)
    bench.node.set_limit(1, 500)
    bench.start()
    assert bench.node.limits == [500, 500]


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"limits": 3}', '{"boot_id": "x", "limits": {"a": "b"}}']
)
def test_a_damaged_file_is_put_aside(bench: Bench, content: str) -> None:
    file = bench.folder / "limits.json"
    file.write_text(content)
    with capture_logs() as logs:
        bench.start()
    if "boot_id" not in content:
        assert "power.state_damaged" in events(logs)
        assert (bench.folder / "limits.damaged").read_text() == content
    bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 350]


def test_no_permission(bench: Bench) -> None:
    for index in range(2):
        bench.node.fault(index, NO_PERMISSION)
    bench.start()
    with capture_logs() as logs:
        answer = bench.hold(Role.TOKEN)
    (line,) = [line for line in logs if line["event"] == "power.reporting_only"]
    assert "Insufficient Permissions" in line["error"]
    assert "splitwise-power.service" in line["error"]
    assert "needs root" in answer.power.problem
    assert bench.node.limits == [700, 700]
    assert bench.owed == {}
    assert (answer.power.requested_watts, answer.power.enforced_watts) == (700, 1400)
    assert answer.power.floor_watts == answer.power.token_watts == 1400  # the router must not count on less
    described = bench.agent.tick()
    assert described.reporting_only
    with capture_logs() as logs:
        for _ in range(20):
            bench.now += 1
            bench.hold(Role.TOKEN)
            bench.agent.tick()
    assert events(logs) == []


def test_permission_that_ends_in_the_middle(bench: Bench) -> None:
    bench.node.fault(1, NO_PERMISSION)
    bench.start()
    bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 700]
    assert bench.owed == {UUIDS[0]: 700}  # the one that was changed; the other never was
    bench.node.fault(1, 0)
    bench.start()
    assert bench.node.limits == [700, 700]


def test_many_gpus_are_kept_in_one_write(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = bench.start()
    written: list[int] = []
    plain = agent._kept._write
    monkeypatch.setattr(agent._kept, "_write", lambda limits: (written.append(len(limits)), plain(limits)))
    bench.hold(Role.TOKEN)
    agent.release("m", 1)
    assert written == [2, 0]


def test_what_is_owed_stays_owed_without_permission(bench: Bench) -> None:
    bench.start()
    bench.hold(Role.TOKEN)
    for index in range(2):
        bench.node.fault(index, NO_PERMISSION)
    bench.start()
    assert bench.node.limits == [350, 350]
    assert bench.owed == dict.fromkeys(UUIDS[:2], 700)


def test_reporting_only_by_choice(bench: Bench) -> None:
    bench.start(report_only=True)
    bench.node.draw(0, 300)
    answer = bench.hold(Role.TOKEN)
    assert bench.node.limits == [700, 700]
    assert answer.power.draw_watts == 300
    assert answer.power.problem == "power.report_only is set"
    assert bench.owed == {}


def test_a_gpu_that_is_lost_and_found(bench: Bench) -> None:
    agent = bench.start()
    bench.hold(Role.TOKEN)
    bench.node.fault(0, LOST)
    with capture_logs() as logs:
        described = agent.tick()
    (line,) = [line for line in logs if line["event"] == "power.gpu_failed"]
    assert (line["gpu"], line["fault"]) == (UUIDS[0], "lost")
    assert "Xid" in described.gpus[0].problem
    assert described.gpus[0].enforced_watts == 0
    assert described.gpus[1].enforced_watts == 350
    answer = bench.hold(Role.BORROWED)
    assert bench.node.limits == [350, 700]
    assert answer.power.problem
    bench.node.fault(0, 0)
    bench.now += RESCAN_S
    bench.hold(Role.TOKEN)
    agent.tick()
    bench.hold(Role.TOKEN)
    agent.release("m", 1)
    assert bench.node.limits == [700, 700]  # what it was owed from before it was lost
    assert bench.owed == {}


def test_a_gpu_that_is_lost_while_it_is_set(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = bench.start()
    plain = agent._nvml.set_limit

    def set_limit(device: Any, watts: float) -> None:
        bench.node.fault(device.index, LOST)
        plain(device, watts)

    monkeypatch.setattr(agent._nvml, "set_limit", set_limit)
    answer = bench.hold(Role.TOKEN, "1")
    assert "GPU is lost" in answer.power.problem
    assert bench.owed == {UUIDS[1]: 700}


def test_a_gpu_without_power_limits_is_said_and_left_alone(bench: Bench) -> None:
    bench.node.fault(1, NOT_SUPPORTED)
    with capture_logs() as logs:
        bench.start()
    (line,) = [line for line in logs if line["event"] == "power.gpu_unusable"]
    assert line["fault"] == "not-supported"
    answer = bench.hold(Role.TOKEN)
    assert answer.power.gpus == 1
    assert bench.node.limits == [350, 700]
    with pytest.raises(PreconditionError, match=r"gpus\[0\]: '1' is no GPU of node node; it has 0 \(GPU-"):
        bench.hold(Role.TOKEN, "1")


def test_another_limiter_is_lower(bench: Bench) -> None:
    bench.start()
    bench.node.set_other_limit(0, 300)
    with capture_logs() as logs:
        answer = bench.hold(Role.TOKEN)
        bench.agent.tick()
    assert events(logs).count("power.enforced_differs") == 1
    assert (answer.power.requested_watts, answer.power.enforced_watts) == (700, 650)
    assert "300 W are enforced, 350 W were requested" in answer.power.problem


def test_a_limit_that_the_device_ignores(bench: Bench) -> None:
    bench.node.fault(0, IGNORED)
    bench.start()
    answer = bench.hold(Role.TOKEN)
    assert answer.power.enforced_watts == 1050
    assert "700 W are enforced, 350 W were requested" in answer.power.problem
    bench.node.fault(0, 0)
    bench.now += 5
    bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 350]


def test_below_the_minimum(bench: Bench) -> None:
    bench.start(token_cap="100W")
    with capture_logs() as logs:
        bench.hold(Role.TOKEN)
        bench.hold(Role.TOKEN)
    assert bench.node.limits == [200, 200]
    notes = [line for line in logs if line["event"] == "power.note"]
    assert [(line["code"], line["subject"]) for line in notes] == [("clamped", uuid) for uuid in UUIDS[:2]]
    assert "the token cap 100W is 100 W; the device takes 200 to 700 W: set to 200 W" in notes[0]["message"]


def test_there_is_no_driver_and_then_there_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE)
    with capture_logs() as logs:
        agent = bench.start()
        for _ in range(15):
            bench.now += 1
            agent.tick()
    assert events(logs) == ["power.driver_unavailable"]
    answer = bench.hold(Role.TOKEN)
    assert answer.power.gpus == 0
    assert "Driver Not Loaded" in answer.power.problem
    monkeypatch.setenv(FILE_VARIABLE, str(bench.node.file))
    bench.now += RESCAN_S
    agent.tick()
    bench.hold(Role.TOKEN)
    assert bench.node.limits == [350, 350]


def test_an_operator_has_all_limits_back(bench: Bench) -> None:
    agent = bench.start()
    bench.hold(Role.TOKEN)
    described = agent.suspend(undo=False)
    assert described.suspended
    assert bench.node.limits == [700, 700]
    assert bench.hold(Role.TOKEN).power.problem == "an operator has suspended capping"
    agent.suspend(undo=True)
    assert bench.node.limits == [350, 350]


def test_how_gpus_are_named(bench: Bench) -> None:
    bench.start()
    bench.hold(Role.TOKEN, "1", machine="a")
    assert bench.node.limits == [700, 350]
    bench.hold(Role.TOKEN, UUIDS[0], machine="b")
    bench.hold(Role.PROMPT, UUIDS[0][:12], machine="b")  # shortened, as CUDA_VISIBLE_DEVICES may be
    bench.now += 3
    bench.agent.tick()
    assert bench.node.limits == [700, 350]
    for wrong in ("2", "GPU-", "MIG-1", "x" * 300):
        with pytest.raises(PreconditionError, match=r"gpus\[0\]"):
            bench.hold(Role.TOKEN, wrong)
    with pytest.raises(InvalidRequestError, match="one GPU is named twice"):
        bench.hold(Role.TOKEN, "0", UUIDS[0])


def test_an_older_start_of_a_machine_is_refused(bench: Bench) -> None:
    bench.start()
    bench.hold(Role.TOKEN, start=5)
    with pytest.raises(StaleError, match="a newer incarnation of m is known"):
        bench.hold(Role.PROMPT, start=4)


def test_the_state_file_cannot_be_written(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = bench.start()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(agent._kept, "_write", full)
    answer = bench.hold(Role.TOKEN)
    assert bench.node.limits == [700, 700]  # nothing is changed that could not be undone
    assert "No space left on device" in answer.power.problem


def test_a_file_that_is_none_of_emulated_gpus(tmp_path: Path) -> None:
    from splitwise.errors import ConfigError

    (tmp_path / "x").write_bytes(b"123")
    with pytest.raises(ConfigError, match="is no file of emulated GPUs"):
        EmulatedGpus(tmp_path / "x")
