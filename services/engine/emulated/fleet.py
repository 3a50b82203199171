"""Many emulated machines as children of one process that has imported everything once.

    python -m services.engine.emulated.fleet machines.json

The file is a list of ``{"home": "prompt", "arguments": ["--id", "prompt-0", ...]}``: the
arguments are those of ``python -m services.prompt`` (or ``token``), and every child is such
a process, with its own sockets, signals and logs. Forking after the imports makes forty
machines start in about the time of two and share most of their memory.

SIGTERM and SIGINT go on to all children; the parent ends when they have. A child that
dies is started again, later each time, unless it refused its configuration.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitwise.errors import ExitCode
from splitwise.launch.service import DIE_WITH_PARENT, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST_PAUSE_S, LONGEST_PAUSE_S, SOUND_AFTER_S = 0.2, 5.0, 10.0
ENDING = (signal.SIGTERM, signal.SIGINT)


@dataclass(slots=True)
class Child:
    """One machine: how to run it, and how its process fares."""

    name: str
    run: Callable[[], int]
    pid: int = 0  # 0: not running
    started: float = 0.0
    pause: float = FIRST_PAUSE_S
    start_at: float = 0.0  # when to start it (again)
    exit_code: int | None = None  # set when it is not started again


class Fleet:
    """The parent. It has one thread and no event loop, so that it can fork at any time."""

    def __init__(self, children: list[Child]) -> None:
        self._children = children
        self._ending = False

    def run(self) -> int:
        """Run until all children have ended for good; returns the worst exit code."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {*ENDING, signal.SIGCHLD})
        while any(child.exit_code is None for child in self._children):
            now = time.monotonic()
            for child in self._children:
                if child.pid == 0 and child.exit_code is None and child.start_at <= now:
                    self._start(child)
            self._wait()
            self._reap()
        return max((child.exit_code or 0 for child in self._children), default=0)

    def _start(self, child: Child) -> None:
        child.started = time.monotonic()
        pid = os.fork()
        if pid:
            child.pid = pid
            return
        code = int(ExitCode.FAILED)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {*ENDING, signal.SIGCHLD})
            code = child.run()
        except BaseException as error:  # noqa: BLE001 - a fork must never return into the parent's code
            print(f"splitwise fleet: {child.name}: {type(error).__name__}: {error}", file=sys.stderr)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _wait(self) -> None:
        """Sleep until a child ended, a signal came, or a child is to be started."""
        starts = [c.start_at for c in self._children if c.pid == 0 and c.exit_code is None]
        pause = max(0.0, min(starts) - time.monotonic()) if starts else LONGEST_PAUSE_S
        came = signal.sigtimedwait({*ENDING, signal.SIGCHLD}, pause)
        if came is not None and came.si_signo in ENDING:
            self._end(came.si_signo)

    def _end(self, number: int) -> None:
        self._ending = True
        for child in self._children:
            if child.pid:
                os.kill(child.pid, number)
            elif child.exit_code is None:
                child.exit_code = 0

    def _reap(self) -> None:
        by_pid = {child.pid: child for child in self._children if child.pid}
        while by_pid:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            child = by_pid.pop(pid, None)
            if child is not None:
                child.pid = 0
                self._ended(child, os.waitstatus_to_exitcode(status))

    def _ended(self, child: Child, code: int) -> None:
        if self._ending or code in (ExitCode.OK, ExitCode.CONFIG):
            # One that was signalled before it listened for signals ended as it should, too.
            child.exit_code = 0 if -code in ENDING else abs(code)
            return
        now = time.monotonic()
        if now - child.started > SOUND_AFTER_S:
            child.pause = FIRST_PAUSE_S
        child.start_at = now + child.pause
        child.pause = min(2 * child.pause, LONGEST_PAUSE_S)
        print(f"splitwise fleet: {child.name} ended with {code}; starting it again", file=sys.stderr)


def _machine(entry: dict[str, Any]) -> Child:
    """Return the child that runs ``python -m services.HOME`` with the entry's arguments."""
    from services.machine.service import serve_machine
    from splitwise.launch.service import run_service

    home, arguments = str(entry["home"]), [str(argument) for argument in entry["arguments"]]
    if home not in ("prompt", "token"):
        raise ValueError(f"home is {home!r}; it must be prompt or token")
    name = arguments[arguments.index("--id") + 1] if "--id" in arguments else home
    return Child(name, lambda: run_service(home, "machine", serve_machine(home), arguments))


def main(path: Path) -> int:
    """Run the machines that a file lists."""
    os.environ.setdefault("NUMBA_DISABLE_JIT", "1")  # as in services.machine.engines
    die_with_parent()
    if os.environ.get(DIE_WITH_PARENT):
        os.environ[DIE_WITH_PARENT] = str(os.getpid())  # the children's parent is this process
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
        children = [_machine(entry) for entry in entries]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"splitwise fleet: {path}: not a list of machines: {error!r}", file=sys.stderr)
        return int(ExitCode.CONFIG)
    from splitwise.perf.catalog import shipped

    shipped()
    gc.freeze()  # the children's collections then leave the shared pages alone
    return Fleet(children).run()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
