"""What systemd is told, over a real socket."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from splitwise.launch.notify import keep_alive, notify, watchdog_period_s

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def listener(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        path = tmp_path / "notify"
        sock.bind(str(path))
        sock.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", str(path))
        yield sock


def test_a_state_is_sent(listener: socket.socket) -> None:
    assert notify("READY=1")
    assert listener.recv(100) == b"READY=1"


def test_abstract_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0splitwise-test-{os.getpid()}")
        sock.settimeout(30)
        monkeypatch.setenv("NOTIFY_SOCKET", f"@splitwise-test-{os.getpid()}")
        assert notify("STOPPING=1")
        assert sock.recv(100) == b"STOPPING=1"


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("READY=1")


@pytest.mark.parametrize(
    ("usec", "pid", "period"),
    [
        ("30000000", None, 15.0),
        ("0", None, None),
        ("", None, None),
        ("x", None, None),
        ("30000000", "1", None),
    ],
)
def test_watchdog_period(
    monkeypatch: pytest.MonkeyPatch, usec: str, pid: str | None, period: float | None
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    if pid is not None:
        monkeypatch.setenv("WATCHDOG_PID", pid)
    assert watchdog_period_s() == period


async def test_the_loop_keeps_the_watchdog_quiet(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WATCHDOG_USEC", "20000")
    monkeypatch.delenv("WATCHDOG_PID", raising=False)
    task = asyncio.create_task(keep_alive())
    for _ in range(3):
        assert await asyncio.to_thread(listener.recv, 100) == b"WATCHDOG=1"
    task.cancel()


def test_a_service_says_ready_and_stopping(listener: socket.socket) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "services.router", "--listen", "127.0.0.1:0"],
        env={**os.environ, "WATCHDOG_USEC": "60000000", "NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[3],
        stderr=subprocess.DEVNULL,
    )
    try:
        told = {listener.recv(100), listener.recv(100)}
        assert told == {b"READY=1", b"WATCHDOG=1"}
        process.terminate()
        assert listener.recv(100) == b"STOPPING=1"
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
