"""GPUs: their driver, what processes and network cards may share of them, and power limits."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from splitwise.doctor.finding import Finding, failure, ok, warning

PROBE_TIMEOUT_S = 120.0
NO_PERMISSION = 4  # NVML_ERROR_NO_PERMISSION in nvml.h
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")  # the driver's own, and the one before it


def gpus(nvml_module: str, *, rdma: bool, root: Path = Path("/")) -> list[Finding]:
    """Judge all about GPUs; one line when the host has none."""
    version = root / "proc/driver/nvidia/version"
    if not version.exists():
        told = "none: emulated machines and vLLM's CPU engine run here"
        if not any((root / "dev").glob("nvidia[0-9]*")):
            return [ok("GPUs", told)]
        return [failure("GPUs", "devices without a driver", "load the NVIDIA driver: nvidia-smi must answer")]
    found = [ok("GPU driver", _driver(version.read_text()))]
    found += power(nvml_module)
    cuda = ask_cuda()
    found += judge_cuda(cuda)
    if rdma:
        dma_buf = any(device.get("dma_buf") for device in cuda.get("devices", ()))
        found.append(peer_memory(root, dma_buf=dma_buf))
    return found


def _driver(text: str) -> str:
    """Return the driver's version out of ``/proc/driver/nvidia/version``."""
    line = text.partition("\n")[0]
    return " ".join(line.removeprefix("NVRM version:").split())


def power(nvml_module: str) -> list[Finding]:
    """Judge each GPU's power limit: may it be set? Tried with the limit that it has."""
    try:
        nvml = importlib.import_module(nvml_module)
    except ImportError:
        remedy = "pip install 'splitwise[power]'"
        return [warning("power limit", "nvidia-ml-py is not installed: no capping, no watts", remedy)]
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        return [failure("GPUs", str(error), "nvidia-smi must answer; reboot after a driver's update")]
    try:
        return [_power_of(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    finally:
        nvml.nvmlShutdown()


def _power_of(nvml: Any, index: int) -> Finding:
    check = f"GPU {index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = _text(nvml.nvmlDeviceGetName(handle))
        limit = nvml.nvmlDeviceGetPowerManagementLimit(handle)
        low, high = nvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
    except nvml.NVMLError as error:
        return warning(
            check, str(error), "dmesg names Xid errors; the GPU needs a reset, or the host a reboot"
        )
    text = f"{name}, {limit // 1000} W of {low // 1000} to {high // 1000} W"
    try:
        nvml.nvmlDeviceSetPowerManagementLimit(handle, limit)
    except nvml.NVMLError as error:
        if error.value == NO_PERMISSION:
            remedy = (
                "the power agent needs root: run it by its unit (splitwise-power), or sudo splitwise doctor"
            )
            return warning(check, f"{text}; this user may not set it", remedy)
        return warning(check, f"{text}; cannot be set: {error}", "leave this GPU to power.report_only")
    return ok(check, f"{text}, may be set")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def ask_cuda() -> dict[str, Any]:
    """Run the CUDA probe in a process of its own."""
    command = [sys.executable, "-m", "splitwise.doctor.cuda"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {PROBE_TIMEOUT_S:.0f} s"}
    except (ValueError, IndexError):
        return {"error": f"the probe ended with {done.returncode}: {done.stderr.strip()[-200:]}"}
    return told


def judge_cuda(told: dict[str, Any]) -> list[Finding]:
    """Judge what the CUDA probe told of each device."""
    if "error" in told:
        remedy = "the user needs /dev/nvidia*; containers need the NVIDIA runtime (--gpus)"
        return [failure("CUDA", told["error"], remedy)]
    found = []
    for number, device in enumerate(told["devices"]):
        check = f"CUDA IPC {number}"
        if device["ipc"]:
            remedy = "processes that share a GPU need one IPC and PID namespace (ipc: host, pid: host)"
            found.append(warning(check, device["ipc"], remedy))
        else:
            found.append(ok(check, "another process has read this one's GPU memory"))
        check = f"KV memory {number}"
        if device["vmm"] and device["vmm_descriptor"]:
            found.append(ok(check, "can be handed to the daemon as a file descriptor"))
        else:
            remedy = "engines cannot give their KV memory to the daemon: a newer driver, or no vGPU"
            found.append(failure(check, "no CUDA memory as file descriptors", remedy))
        others = len(told["devices"]) - 1
        if others:
            found.append(_judge_peers(number, device["peers"], others))
    return found


def _judge_peers(number: int, peers: list[int], others: int) -> Finding:
    check = f"GPU peers {number}"
    if len(peers) == others:
        return ok(check, "reaches all other GPUs directly")
    told = f"reaches {len(peers)} of {others} other GPUs directly"
    remedy = "nvidia-smi topo -p2p r shows why; with ACS or an IOMMU on, copies go through main memory"
    return warning(check, told, remedy)


def peer_memory(root: Path, *, dma_buf: bool) -> Finding:
    """Judge whether network cards reach GPU memory: by a module of the driver, or by dma-buf."""
    modules = (root / "proc/modules").read_text().splitlines() if (root / "proc/modules").exists() else []
    loaded = [name for name in PEER_MODULES if any(line.split(" ")[0] == name for line in modules)]
    if loaded:
        return ok("GPU peer memory", f"{loaded[0]} is loaded: network cards reach GPU memory")
    if dma_buf:
        return ok("GPU peer memory", "by dma-buf")
    remedy = (
        "modprobe nvidia_peermem (and put it into /etc/modules-load.d); without it puts go through the host"
    )
    return warning("GPU peer memory", "network cards do not reach GPU memory", remedy)
