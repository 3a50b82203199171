"""One supervised process: started, watched through its log, taken down with all it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import deque
from enum import StrEnum
from typing import TYPE_CHECKING

import psutil

from splitwise.launch.lines import LogLine, read_line
from splitwise.launch.service import DIE_WITH_PARENT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

KEPT_LINES = 20
LAST_LINES_S = 2.0
LINE_BYTES = 2**20
# Python's helper that unlinks shared memory of a killed process; it must outlive the process.
TRACKER = "multiprocessing.resource_tracker"
TRACKER_GRACE_S = 2.0


class State(StrEnum):
    """Where a process is in its life."""

    WAITING = "waiting"
    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"
    EXITED = "exited"


class ManagedProcess:
    """A child in a process group of its own; `on_change` is called after each change of state.

    A process that runs several machines is ready once `machines` of them have said so.
    """

    def __init__(
        self,
        name: str,
        on_line: Callable[[ManagedProcess, LogLine], None],
        on_change: Callable[[ManagedProcess], None],
        *,
        machines: int = 1,
    ) -> None:
        self.name = name
        self.state = State.WAITING
        self.detail = ""
        self.exit_code: int | None = None
        self.started = time.monotonic()
        self.seconds_to_ready = 0.0
        self.ready: dict[str, object] = {}
        self.last_lines: deque[LogLine] = deque(maxlen=KEPT_LINES)
        self._machines = machines
        self._ready_names: set[str] = set()
        self._on_line = on_line
        self._on_change = on_change
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = asyncio.Event()
        self._follower: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int | None:
        """The process id while it runs."""
        return self._process.pid if self._process and self.exit_code is None else None

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Run ``python ARGUMENTS`` with these variables added to ours."""
        self.exit_code, self.detail, self.ready = None, "", {}
        self.started = time.monotonic()
        self._ready_names.clear()
        self._ended.clear()
        self.last_lines.clear()
        read_end, write_end = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env={**os.environ, **environment, DIE_WITH_PARENT: str(os.getpid())},
                process_group=0,  # Ctrl-C reaches us alone, and the group can be killed as one
            )
        finally:
            os.close(write_end)
        self._enter(State.STARTING)
        self._follower = asyncio.create_task(
            self._follow(self._process, read_end), name=f"follow-{self.name}"
        )

    async def wait_exit(self, timeout_s: float | None = None) -> bool:
        """Wait until it is gone; says whether it is."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ended.wait(), timeout_s)
        return self._ended.is_set()

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then after `grace_s` SIGKILL; whatever it started goes with it."""
        pid = self.pid
        if pid is None:
            return
        family = _descendants(pid)
        self._enter(State.STOPPING)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        if not await self.wait_exit(grace_s):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            await self.wait_exit()
        await _kill_family(pid, family)

    async def _follow(self, process: subprocess.Popen[bytes], read_end: int) -> None:
        """Read its log while it lives, then note its exit and take down what it left."""
        reading = asyncio.create_task(self._read(read_end))
        await _exited(process.pid)
        code = process.wait()
        await _kill_family(process.pid, _group(process.pid))
        await asyncio.wait([reading], timeout=LAST_LINES_S)
        reading.cancel()
        self.exit_code = code
        self._enter(State.EXITED)
        self._ended.set()

    async def _read(self, read_end: int) -> None:
        stream = asyncio.StreamReader(limit=LINE_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(read_end, "rb", 0)
        )
        try:
            while True:
                try:
                    raw = await stream.readline()
                except ValueError:  # longer than LINE_BYTES: dropped
                    continue
                if not raw:
                    return
                self._take(read_line(raw))
        finally:
            transport.close()

    def _take(self, line: LogLine) -> None:
        self.last_lines.append(line)
        match line.event:
            case "service.loading" if self.state is not State.READY:
                self.detail = str(line.fields.get("what", ""))
                self._enter(State.LOADING)
            case "service.ready":
                self._one_ready(line)
            case _:
                pass
        self._on_line(self, line)

    def _one_ready(self, line: LogLine) -> None:
        self._ready_names.add(line.source)
        if self.state is State.READY:
            return
        if len(self._ready_names) < self._machines:
            self.detail = f"{len(self._ready_names)} of {self._machines} machines"
            self._enter(State.LOADING)
            return
        self.ready, self.detail = dict(line.fields), ""
        self.seconds_to_ready = time.monotonic() - self.started
        self._enter(State.READY)

    def _enter(self, state: State) -> None:
        self.state = state
        self._on_change(self)


async def _exited(pid: int) -> None:
    """Wait for a child's exit without taking its exit code (the pipe may outlive it)."""
    descriptor = os.pidfd_open(pid)
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _descendants(pid: int) -> list[psutil.Process]:
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def _group(leader: int) -> list[psutil.Process]:
    """Return what is left of a dead process's group."""
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == leader and process.pid != leader:
                left.append(process)
    return left


async def _kill_family(leader: int, family: Sequence[psutil.Process]) -> None:
    """Kill what a process left behind: known descendants first, its group last.

    The resource tracker gets a moment in between, or shared memory would stay in /dev/shm.
    """
    trackers = []
    for process in family:
        with contextlib.suppress(psutil.Error):
            if any(TRACKER in word for word in process.cmdline()):
                trackers.append(process)
            else:
                process.kill()
    end = time.monotonic() + TRACKER_GRACE_S
    while any(p.is_running() for p in trackers) and time.monotonic() < end:  # noqa: ASYNC110 - not our child
        await asyncio.sleep(0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
