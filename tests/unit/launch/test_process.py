"""Supervised processes: real children, ended in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import textwrap
from typing import TYPE_CHECKING

import psutil
import pytest

from splitwise.launch.lines import read_line
from splitwise.launch.process import ManagedProcess, State

if TYPE_CHECKING:
    from pathlib import Path

READY = 'print(\'{"event": "service.ready", "name": "x", "address": "127.0.0.1:1"}\', flush=True)'


@pytest.fixture
async def started(tmp_path: Path):
    """Start children from source text; none is left at the end."""
    processes: list[ManagedProcess] = []

    def start(source: str, machines: int = 1) -> ManagedProcess:
        script = tmp_path / f"child{len(processes)}.py"
        script.write_text(textwrap.dedent(source))
        process = ManagedProcess("child", lambda *_: None, lambda _: None, machines=machines)
        process.start([str(script)], {"EXTRA": "yes"})
        processes.append(process)
        return process

    yield start
    for process in processes:
        await process.stop(0)


async def until(condition, seconds: float = 30) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.01)


async def test_it_becomes_ready_and_stops_on_sigterm(started):
    process = started(f"import time, os\nassert os.environ['EXTRA'] == 'yes'\n{READY}\ntime.sleep(600)")
    await until(lambda: process.state is State.READY)
    assert process.ready["address"] == "127.0.0.1:1"
    await process.stop(20)
    assert process.exit_code == -signal.SIGTERM
    assert process.state is State.EXITED


async def test_it_is_killed_when_it_does_not_stop(started):
    ignoring = f"import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{READY}\ntime.sleep(600)"
    process = started(ignoring)
    await until(lambda: process.state is State.READY)
    await process.stop(0.2)
    assert process.exit_code == -signal.SIGKILL


async def test_its_children_go_with_it(started, tmp_path: Path):
    process = started(
        f"""
        import subprocess, sys, time
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        child = subprocess.Popen(sleep, start_new_session=True)
        open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
        {READY}
        time.sleep(600)
        """
    )
    await until(lambda: process.state is State.READY)
    grandchild = psutil.Process(int((tmp_path / "pid").read_text()))
    await process.stop(20)
    await until(lambda: not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE)


async def test_an_exit_is_seen_although_a_child_holds_the_log_open(started):
    process = started(
        """
        import os, subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print("last words", flush=True)
        os._exit(7)
        """
    )
    await until(lambda: process.state is State.EXITED)
    assert process.exit_code == 7
    assert process.last_lines[-1].text == "last words"


async def test_it_dies_with_its_parent(started):
    source = f"""
        import time
        from splitwise.launch.service import die_with_parent
        die_with_parent()
        {READY}
        time.sleep(600)
    """
    parent = started(
        f"""
        import os, subprocess, sys, time
        environment = dict(os.environ, SPLITWISE_DIE_WITH_PARENT=str(os.getpid()))
        child = subprocess.Popen([sys.executable, "-c", {textwrap.dedent(source)!r}], env=environment,
                                 start_new_session=True)
        print(child.pid, flush=True)
        time.sleep(600)
        """
    )
    await until(lambda: parent.state is State.READY)
    child = psutil.Process(int(parent.last_lines[0].text))
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    await until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


async def test_several_machines_are_ready_when_all_are(started):
    line = 'print(\'{{"event": "service.ready", "name": "{}"}}\', flush=True)'
    process = started(
        f"import time\n{line.format('a')}\n{line.format('a')}\ntime.sleep(0.3)\n"
        f"print('between', flush=True)\n"
        f"time.sleep(0.3)\n{line.format('b')}\ntime.sleep(600)",
        machines=2,
    )
    await until(lambda: any(entry.text == "between" for entry in process.last_lines))
    assert process.state is State.LOADING
    await until(lambda: process.state is State.READY)


def test_lines_are_read_as_events_or_text():
    line = read_line(b'{"event": "x.done", "level": "warning", "name": "n", "bytes": 5, "none": null}\n')
    assert (line.event, line.level, line.source, line.fields) == ("x.done", "warning", "n", {"bytes": 5})
    assert line.shown == "x.done bytes=5"
    for raw in (b"plain\n", b"{broken", b'{"no": "event"}', b"\xff\xfe"):
        assert read_line(raw).event == ""
    assert read_line(b"Traceback (most recent call last):").level == "error"
