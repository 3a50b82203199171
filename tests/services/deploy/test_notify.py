"""Every service tells systemd, over a real socket, that it is ready, alive, reloading and stopping."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ExitCode
from splitwise.launch.emulated_gpus import FILE_VARIABLE
from tests.support.compose_file import ROOT
from tests.support.emulated_gpus import GpuNode

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE_S = 120.0
ANYWHERE = "127.0.0.1:0"


class Unit:
    """One service, started as its unit starts it: by notification, with a watchdog."""

    def __init__(self, folder: Path, module: str, *flags: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = folder / f"{module}.notify"
        self.listener.bind(str(path))
        self.listener.settimeout(PATIENCE_S)
        self.log = folder / f"{module}.log"
        variables = {"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "1000000", "NUMBA_DISABLE_JIT": "1"}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{module}", *flags],
                env={**os.environ, **variables},
                cwd=ROOT,
                stderr=log,
                stdout=log,
            )

    def until(self, wanted: str) -> list[str]:
        """Return what is said up to and including `wanted`."""
        said: list[str] = []
        end = time.monotonic() + PATIENCE_S
        while not said or not said[-1].startswith(wanted):
            assert time.monotonic() < end, f"no {wanted} in {said}; {self.log.read_text()[-2000:]}"
            said.append(self.listener.recv(4096).decode())
        return said

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.listener.close()


@pytest.fixture
def units() -> Iterator[tuple[Path, list[Unit]]]:
    folder = Path(tempfile.mkdtemp(prefix="sw-notify-"))
    started: list[Unit] = []
    yield folder, started
    for unit in reversed(started):
        unit.close()
    shutil.rmtree(folder)


@pytest.mark.parametrize("module", ["router", "kvd", "prompt", "token", "power"])
def test_ready_alive_reloading_stopping(
    units: tuple[Path, list[Unit]], module: str, monkeypatch: pytest.MonkeyPatch
):
    folder, started = units
    monkeypatch.setenv(FILE_VARIABLE, str(GpuNode(folder).file))
    kvd_socket = str(folder / "kvd.sock")
    kvd = ("--socket", kvd_socket, "--listen", ANYWHERE)
    power = ("--listen", ANYWHERE, "--nvml", "services.power.emulated_nvml", "--state", str(folder / "state"))
    flags = {"router": ("--listen", ANYWHERE), "kvd": kvd, "power": power}
    machine = ("--kvd_socket", kvd_socket, "--engine.kind", "emulated", "--routers", "127.0.0.1:1")
    if module in ("prompt", "token"):
        started.append(Unit(folder, "kvd", *kvd))
        started[0].until("READY=1")
    unit = Unit(folder, module, *flags.get(module, machine))
    started.append(unit)
    before = unit.until("READY=1")
    assert set(before) <= {"WATCHDOG=1", "READY=1"}
    unit.until("WATCHDOG=1")
    unit.process.send_signal(signal.SIGHUP)
    unit.until("RELOADING=1")
    unit.until("READY=1")
    unit.process.send_signal(signal.SIGTERM)
    unit.until("STOPPING=1")
    assert unit.process.wait(PATIENCE_S) == ExitCode.OK, unit.log.read_text()[-2000:]


@pytest.mark.parametrize("module", ["router", "kvd", "prompt", "token"])
def test_refused_settings_end_with_the_code_that_is_not_retried(units: tuple[Path, list[Unit]], module: str):
    folder, started = units
    started.append(Unit(folder, module, "--drain_s", "soon"))
    assert started[0].process.wait(PATIENCE_S) == ExitCode.CONFIG
    assert "drain_s" in started[0].log.read_text()
    started[0].listener.setblocking(False)
    with pytest.raises(BlockingIOError):
        started[0].listener.recv(100)  # it was never ready


def test_a_taken_port_is_tried_again(units: tuple[Path, list[Unit]]):
    folder, started = units
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        started.append(Unit(folder, "router", "--listen", address))
        assert started[0].process.wait(PATIENCE_S) == ExitCode.FAILED
    assert address in started[0].log.read_text()
