"""The parent of many machines: starts again what dies, ends with what ended, never two of one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ExitCode

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PATIENCE = 60.0
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import services.engine.emulated.fleet as fleet
folder = Path(sys.argv[1])

def child(name, code):
    def run():
        (folder / f"{name}.{os.getpid()}").touch()
        if code is not None:
            return code
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        while True:
            time.sleep(1000)
    return fleet.Child(name, run)

fleet.FIRST_PAUSE_S = 0.05
pairs = [part.split("=") for part in sys.argv[2:]]
children = [child(name, int(code) if code else None) for name, code in pairs]
sys.exit(fleet.Fleet(children).run())
"""


@pytest.fixture
def fleets() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)


def start(fleets: list[subprocess.Popen[str]], folder: Path, *children: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", SCRIPT, str(folder), *children]
    fleets.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    return fleets[-1]


def pids(folder: Path, name: str, count: int) -> list[int]:
    """Wait for `count` starts of a child; returns its process ids, oldest first."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        marks = sorted(folder.glob(f"{name}.*"), key=lambda mark: mark.stat().st_mtime_ns)
        if len(marks) >= count:
            return [int(mark.suffix[1:]) for mark in marks]
        time.sleep(0.02)
    raise AssertionError(f"{name} was not started {count} times")


def test_sigterm_ends_all_and_the_parent(tmp_path: Path, fleets: list[subprocess.Popen[str]]) -> None:
    fleet = start(fleets, tmp_path, "a=", "b=")
    found = [*pids(tmp_path, "a", 1), *pids(tmp_path, "b", 1)]
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(PATIENCE) == 0
    for pid in found:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_a_killed_child_is_started_again_and_the_others_stay(
    tmp_path: Path, fleets: list[subprocess.Popen[str]]
) -> None:
    fleet = start(fleets, tmp_path, "a=", "b=")
    (other,) = pids(tmp_path, "b", 1)
    for times in (1, 2, 3):
        os.kill(pids(tmp_path, "a", times)[-1], signal.SIGKILL)
    os.kill(pids(tmp_path, "a", 4)[-1], 0)
    assert pids(tmp_path, "b", 1) == [other]
    fleet.send_signal(signal.SIGTERM)
    assert fleet.wait(PATIENCE) == 0
    assert fleet.stderr is not None
    assert fleet.stderr.read().count("a ended with -9; starting it again") == 3


def test_a_refused_configuration_is_not_tried_again(
    tmp_path: Path, fleets: list[subprocess.Popen[str]]
) -> None:
    fleet = start(fleets, tmp_path, f"a={int(ExitCode.CONFIG)}", "b=0")
    assert fleet.wait(PATIENCE) == ExitCode.CONFIG
    assert len(pids(tmp_path, "a", 1)) == len(pids(tmp_path, "b", 1)) == 1


@pytest.mark.parametrize("text", ["", "[1]", '[{"home": "router", "arguments": []}]', '[{"home": "prompt"}]'])
def test_bad_lists_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "machines.json"
    file.write_text(text)
    command = [sys.executable, "-m", "services.engine.emulated.fleet", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == ExitCode.CONFIG
    assert f"{file}: not a list of machines" in done.stderr
