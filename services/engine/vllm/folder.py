"""The folder of one engine: vLLM's sockets, the hotline. It outlives nobody for long.

A process that is killed cannot remove its folder, but its lock on it ends: the next engine
that starts removes what nobody holds.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "splitwise-engine-"
LOCK = "lock"
# A folder without a lock file is being made, or its maker died in between.
MAKING_S = 60.0
# vLLM names its sockets by UUIDs, and the path of a socket has at most 107 bytes.
MAX_PARENT = 107 - len("/" + PREFIX + "12345678") - len("/00000000-0000-0000-0000-000000000000")


class EngineFolder:
    """A new folder under `parent` (default: where temporary files go), locked while used.

    Where the parent's path is too long for sockets it is made in ``/tmp``.
    """

    def __init__(self, parent: Path | None = None) -> None:
        base = Path(tempfile.gettempdir()) if parent is None else parent
        if len(os.fsencode(base)) > MAX_PARENT:
            base = Path("/tmp")  # noqa: S108 - mkdtemp makes a name and a mode of its own
        _sweep(base)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
            self._lock = os.open(self.path / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if os.fstat(self._lock).st_nlink:
                break
            os.close(self._lock)  # another's sweep came between the last two calls

    def remove(self) -> None:
        """Remove the folder with all that is in it. May be called again."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(base: Path) -> None:
    """Remove this user's engine folders whose process is gone."""
    for folder in base.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid() and not _in_use(folder):
                shutil.rmtree(folder, ignore_errors=True)


def _in_use(folder: Path) -> bool:
    try:
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - folder.stat().st_mtime < MAKING_S
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False
