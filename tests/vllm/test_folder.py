"""Engine folders are removed with their process, at the latest by the next one that starts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from services.engine.vllm.folder import LOCK, MAKING_S, MAX_PARENT, PREFIX, EngineFolder

HOLDER = """
import sys, time
from pathlib import Path
from services.engine.vllm.folder import EngineFolder
folder = EngineFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_stays(short: Path) -> None:
    first = EngineFolder(short)
    second = EngineFolder(short)
    assert first.path.is_dir()
    for folder in (first, second):
        folder.remove()
        folder.remove()
    assert list(short.iterdir()) == []


def test_a_killed_process_leaves_nothing_for_long(short: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(short)], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "hotline.sock").touch()
        mine = EngineFolder(short)
        assert left.is_dir(), "the other process still uses it"
        mine.remove()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    mine = EngineFolder(short)
    assert list(short.iterdir()) == [mine.path]
    mine.remove()


def test_a_folder_that_is_being_made_stays(short: Path) -> None:
    fresh, old = short / f"{PREFIX}fresh", short / f"{PREFIX}old"
    for folder in (fresh, old):
        folder.mkdir()
    long_ago = time.time() - 2 * MAKING_S
    os.utime(old, (long_ago, long_ago))
    other = short / "something-else"
    other.mkdir()
    mine = EngineFolder(short)
    assert sorted(short.iterdir()) == sorted([fresh, other, mine.path])
    assert (mine.path / LOCK).is_file()


def test_the_longest_socket_fits(short: Path) -> None:
    """Where it would not, the folder is made elsewhere."""
    longest = short / ("x" * (MAX_PARENT - len(str(short)) - 1))
    too_long = short / (longest.name + "x")
    for parent, same in ((longest, True), (too_long, False)):
        parent.mkdir()
        folder = EngineFolder(parent)
        assert (folder.path.parent == parent) is same
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder.path / str(uuid.uuid4())))
        folder.remove()
