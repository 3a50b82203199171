"""Engine folders are removed with their process, at the latest by the next one that starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from services.engine.vllm.folder import LOCK, MAKING_S, PREFIX, EngineFolder

HOLDER = """
import sys, time
from pathlib import Path
from services.engine.vllm.folder import EngineFolder
folder = EngineFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
time.sleep(600)
"""


def test_a_folder_in_use_stays(tmp_path: Path) -> None:
    first = EngineFolder(tmp_path)
    second = EngineFolder(tmp_path)
    assert first.path.is_dir()
    for folder in (first, second):
        folder.remove()
        folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_nothing_for_long(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        left = Path(process.stdout.readline().strip())
        (left / "hotline.sock").touch()
        mine = EngineFolder(tmp_path)
        assert left.is_dir(), "the other process still uses it"
        mine.remove()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    mine = EngineFolder(tmp_path)
    assert list(tmp_path.iterdir()) == [mine.path]
    mine.remove()


def test_a_folder_that_is_being_made_stays(tmp_path: Path) -> None:
    fresh, old = tmp_path / f"{PREFIX}fresh", tmp_path / f"{PREFIX}old"
    for folder in (fresh, old):
        folder.mkdir()
    long_ago = time.time() - 2 * MAKING_S
    os.utime(old, (long_ago, long_ago))
    other = tmp_path / "something-else"
    other.mkdir()
    mine = EngineFolder(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([fresh, other, mine.path])
    assert (mine.path / LOCK).is_file()
