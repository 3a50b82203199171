"""GPUs that are not at hand: the CUDA and NVML calls against stand-ins, and how their facts are judged."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from splitwise.doctor import Finding, Verdict, cuda, gpu
from splitwise.launch.emulated_gpus import FILE_VARIABLE, NO_PERMISSION
from tests.support.emulated_gpus import GpuNode

if TYPE_CHECKING:
    from pathlib import Path

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE
VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed Jan 22\nGCC version: 12\n"


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    for finding in findings:
        assert bool(finding.remedy) == (finding.verdict is not OK), finding
    return {finding.check: finding.verdict for finding in findings}


class FakeDriver:
    """libcuda with two devices; what is shared by a handle is read back as it was set."""

    def __init__(self, attributes: dict[int, int], *, peers: bool = True, broken: str = "") -> None:
        self.attributes = attributes
        self.peers = peers
        self.broken = broken
        self.memory = 0

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: 201 if name == self.broken else self._do(name, arguments)

    def _do(self, name: str, arguments: tuple[Any, ...]) -> int:
        match name:
            case "cuDeviceGetCount":
                arguments[0]._obj.value = 2
            case "cuDeviceGetAttribute":
                arguments[0]._obj.value = self.attributes.get(arguments[1].value, 0)
            case "cuDeviceCanAccessPeer":
                arguments[0]._obj.value = int(self.peers)
            case "cuMemAlloc_v2":
                arguments[0]._obj.value = 0x7000
            case "cuMemsetD8_v2":
                self.memory = arguments[1].value
            case "cuIpcGetMemHandle":
                arguments[0]._obj.reserved[0] = 42
            case "cuIpcOpenMemHandle_v2":
                assert arguments[1].reserved[0] == 42
                arguments[0]._obj.value = 0x9000
            case "cuMemcpyDtoH_v2":
                assert arguments[1].value == 0x9000 + cuda.NBYTES - 1
                arguments[0]._obj.value = self.memory
            case _:
                pass
        return 0


ALL = dict.fromkeys(cuda.ATTRIBUTES.values(), 1)


@pytest.fixture
def other_process(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    started: list[list[str]] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(cuda.subprocess, "run", run)
    return started


def test_every_device_is_asked_and_shared(other_process: list[list[str]]) -> None:
    told = cuda.inspect(cuda.Cuda(FakeDriver(ALL)))
    assert [device["peers"] for device in told["devices"]] == [[1], [0]]
    assert all(device["vmm"] and device["dma_buf"] and device["ipc"] == "" for device in told["devices"])
    assert [command[-2] for command in other_process] == ["0", "1"]
    assert verdicts(gpu.judge_cuda(told)) == dict.fromkeys(
        (f"{check} {n}" for check in ("CUDA IPC", "KV memory", "GPU peers") for n in (0, 1)), OK
    )


def test_the_other_process_reads_what_was_set() -> None:
    driver = FakeDriver(ALL)
    handle = cuda.Cuda(driver).share()
    cuda.Cuda(driver).check_shared(handle)
    driver.memory = 0
    with pytest.raises(cuda.CudaError, match="something else"):
        cuda.Cuda(driver).check_shared(handle)


def test_what_is_missing_is_told(other_process: list[list[str]]) -> None:
    driver = FakeDriver({}, peers=False, broken="cuIpcGetMemHandle")
    findings = gpu.judge_cuda(cuda.inspect(cuda.Cuda(driver)))
    assert not other_process
    told = verdicts(findings)
    assert (told["CUDA IPC 0"], told["KV memory 0"], told["GPU peers 1"]) == (WARNING, FAILURE, WARNING)
    assert "cuIpcGetMemHandle failed with 201" in findings[0].found


def test_a_host_without_the_driver_is_told_by_the_probe_itself() -> None:
    told = gpu.ask_cuda()
    if "devices" in told:
        pytest.skip("this host has GPUs")
    assert verdicts(gpu.judge_cuda(told)) == {"CUDA": FAILURE}
    assert "libcuda" in told["error"]


# ---- power limits


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


def fake_nvml(fault: int = 0, count: int = 1) -> SimpleNamespace:
    """An NVML with GPUs of 700 W; `fault` is what setting a limit returns."""
    state = {"limits": [700_000] * count, "set": [], "shut": 0}

    def set_limit(handle: int, limit: int) -> None:
        if fault:
            raise NVMLError(fault)
        state["set"].append((handle, limit))

    return SimpleNamespace(
        NVMLError=NVMLError,
        state=state,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: state.update(shut=1),
        nvmlDeviceGetCount=lambda: count,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda _handle: b"NVIDIA H100",
        nvmlDeviceGetPowerManagementLimit=lambda handle: state["limits"][handle],
        nvmlDeviceGetPowerManagementLimitConstraints=lambda _handle: (200_000, 700_000),
        nvmlDeviceSetPowerManagementLimit=set_limit,
    )


@pytest.mark.parametrize(
    ("fault", "verdict", "says"),
    [(0, OK, "may be set"), (4, WARNING, "this user may not set it"), (3, WARNING, "cannot be set")],
)
def test_power_limits(monkeypatch: pytest.MonkeyPatch, fault: int, verdict: Verdict, says: str) -> None:
    nvml = fake_nvml(fault, count=2)
    monkeypatch.setitem(sys.modules, "fake_nvml", nvml)
    findings = gpu.power("fake_nvml")
    assert verdicts(findings) == {"GPU 0": verdict, "GPU 1": verdict}
    assert "NVIDIA H100, 700 W of 200 to 700 W" in findings[0].found
    assert says in findings[0].found
    assert nvml.state["set"] == ([] if fault else [(0, 700_000), (1, 700_000)])  # the limit that it has
    assert nvml.state["shut"] == 1


def test_the_emulated_driver_is_judged_like_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = GpuNode(tmp_path, count=2)
    monkeypatch.setenv(FILE_VARIABLE, str(node.file))
    node.set_limit(0, 400)
    node.fault(1, NO_PERMISSION)
    findings = gpu.power("services.power.emulated_nvml")
    assert verdicts(findings) == {"GPU 0": OK, "GPU 1": WARNING}
    assert "400 W of 200 to 700 W" in findings[0].found
    assert node.limits == [400, 700]  # nothing was changed
    monkeypatch.delenv(FILE_VARIABLE)
    assert verdicts(gpu.power("services.power.emulated_nvml")) == {"GPUs": FAILURE}


def test_a_missing_nvml_package_is_a_warning() -> None:
    assert verdicts(gpu.power("no_such_module")) == {"power limit": WARNING}


# ---- the whole


def test_a_host_without_gpus(tmp_path: Path) -> None:
    assert verdicts(gpu.gpus("no_such_module", rdma=True, root=tmp_path)) == {"GPUs": OK}
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    assert verdicts(gpu.gpus("no_such_module", rdma=True, root=tmp_path)) == {"GPUs": FAILURE}


@pytest.mark.parametrize(
    ("modules", "dma_buf", "verdict"),
    [
        ("nvidia_peermem 16384 0 - Live 0x0\n", False, OK),
        ("nvidia 16384 0 - Live 0x0\n", True, OK),
        ("nvidia_peermem_x 1 0 - Live 0x0\n", False, WARNING),
    ],
)
def test_peer_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modules: str, dma_buf: bool, verdict: Verdict
) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(VERSION)
    (tmp_path / "proc/modules").write_text(modules)
    device = {"ipc": "", "vmm": True, "vmm_descriptor": True, "dma_buf": dma_buf, "peers": []}
    monkeypatch.setattr(gpu, "ask_cuda", lambda: {"devices": [device]})
    findings = gpu.gpus("no_such_module", rdma=True, root=tmp_path)
    assert verdicts(findings)["GPU peer memory"] is verdict
    assert "570.86.15" in findings[0].found
    without = verdicts(gpu.gpus("no_such_module", rdma=False, root=tmp_path))
    assert "GPU peer memory" not in without
