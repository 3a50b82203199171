"""Whatever the driver does and whenever the agent dies: in the end every GPU has its limit back."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from services.power.agent import RESCAN_S, PowerAgent
from services.power.limits_file import LimitsFile
from services.power.nvml import Nvml
from splitwise.config import PowerSettings
from splitwise.errors import RemoteError
from splitwise.launch.emulated_gpus import FILE_VARIABLE, IGNORED, LOST, NO_PERMISSION
from splitwise.power import Role
from splitwise.rpc.v1 import common_pb2, power_pb2
from tests.support.emulated_gpus import GpuNode

MODULE = "services.power.emulated_nvml"
GPU = st.integers(0, 2)
STEP = st.one_of(
    st.tuples(
        st.just("hold"),
        st.sampled_from("mn"),
        st.lists(GPU, max_size=3, unique=True),
        st.sampled_from(list(Role)),
        st.sampled_from([0.0, 500.0, 900.0, 2000.0]),
    ),
    st.tuples(st.just("release"), st.sampled_from("mn")),
    st.tuples(st.just("wait"), st.sampled_from([0.1, 1.0, 6.0, 12.0])),
    st.tuples(st.just("fault"), GPU, st.sampled_from([0, LOST, NO_PERMISSION, IGNORED])),
    st.tuples(st.just("crash")),
)


class World:
    """One node, and agents on it one after the other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = GpuNode(folder, 3)
        self.before = [700.0, 650.0, 300.0]
        for index, watts in enumerate(self.before):
            self.node.set_limit(index, watts)
        self.now = 0.0
        self.kept = LimitsFile(folder / "limits.json")
        self.start()

    def start(self) -> None:
        self.kept.open()
        self.agent = PowerAgent(PowerSettings(nvml=MODULE), Nvml(MODULE), self.kept, clock=lambda: self.now)
        self.agent.start()

    def crash(self) -> None:
        assert self.kept._lock is not None
        self.kept._lock.close()  # what the kernel does for a process that is killed
        self.kept = LimitsFile(self.folder / "limits.json")
        self.start()

    def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("hold", name, gpus, role, share):
                identity = common_pb2.MachineIdentity(machine_id=name, incarnation=1)
                request = power_pb2.HoldRequest(
                    identity=identity, gpus=map(str, gpus), share_watts=share, lease_ms=5000
                )
                with suppress(RemoteError):  # a GPU that does not answer is none of the node's
                    self.agent.hold(request, role)
            case ("release", name):
                self.agent.release(name, 1)
            case ("wait", seconds):
                self.now += seconds
                self.agent.tick()
            case ("fault", gpu, fault):
                self.node.fault(gpu, fault)
            case ("crash",):
                self.crash()
        for limit, before in zip(self.node.limits, self.before, strict=True):
            assert 200 <= limit <= before  # never above what was there, never outside the range


@settings(max_examples=150)
@given(st.lists(STEP, max_size=25))
def test_every_gpu_gets_its_limit_back(steps: list[tuple[Any, ...]]) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    try:
        with tempfile.TemporaryDirectory() as folder:
            check(Path(folder), steps)
    finally:
        structlog.reset_defaults()


def check(folder: Path, steps: list[tuple[Any, ...]]) -> None:
    node_file = str(folder / "gpus.bin")
    with mock.patch.dict(os.environ, {FILE_VARIABLE: node_file}), mock.patch("os.fsync"):
        world = World(folder)
        for step in steps:
            world.step(step)
        for index in range(3):
            world.node.fault(index, 0)
        world.crash()  # one that found no permission stays as it is until it is started again
        for _ in range(2):
            world.now += RESCAN_S
            world.agent.tick()
        world.agent.close()
        world.kept.close()
        assert world.node.limits == world.before
        assert not (folder / "limits.json").exists()
