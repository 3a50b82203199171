"""The previous limits of GPUs, kept in a file from before they are changed until they are back.

The file is what a start after a crash restores from. It is replaced as a whole, synced to
disk first, so that it is never half written. Limits do not outlive a reboot, so a file from
before one is ignored.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, TYPE_CHECKING

from splitwise.errors import ConfigError, ListenError
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class LimitsFile:
    """UUID to the limit (watts) that its GPU had before. One process at a time has it open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock: IO[str] | None = None
        self._limits: dict[str, float] = {}

    def open(self) -> None:
        """Lock and read it; raises `ConfigError` when it cannot be written, `ListenError` when in use."""
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = self._path.with_suffix(".lock").open("w")
        except OSError as error:
            raise ConfigError(
                f"power.state: {error.filename}: {error.strerror}; previous limits could not be kept there:"
                " name a file in a folder that the agent may write"
            ) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            self._lock = None
            raise ListenError(
                f"power.state: another power agent of this node has {self._path}: stop it, or give this one"
                " its own file"
            ) from None
        self._limits = self._read()

    def close(self) -> None:
        """Unlock it. An empty file is removed."""
        if self._lock is None:
            return
        if not self._limits:
            self._path.unlink(missing_ok=True)
        self._lock.close()
        self._lock = None

    def names(self) -> list[str]:
        """Return the UUIDs of the GPUs that are owed their limit."""
        return list(self._limits)

    def __len__(self) -> int:
        return len(self._limits)

    def get(self, uuid: str) -> float | None:
        """Return the limit that a GPU gets back, if it is owed one."""
        return self._limits.get(uuid)

    def remember(self, limits: Mapping[str, float]) -> None:
        """Keep GPUs' limits (watts); the first that was kept stays. On disk on return; raises `OSError`."""
        if not limits.keys() <= self._limits.keys():
            self._write({**limits, **self._limits})

    def forget(self, uuids: Iterable[str]) -> None:
        """These GPUs have their limits back; raises `OSError`."""
        gone = set(uuids)
        left = {uuid: watts for uuid, watts in self._limits.items() if uuid not in gone}
        if len(left) < len(self._limits):
            self._write(left)

    def _read(self) -> dict[str, float]:
        try:
            content = json.loads(self._path.read_text(encoding="utf-8"))
            if content["boot_id"] != _boot_id():
                return {}
            return {str(uuid): float(watts) for uuid, watts in content["limits"].items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            get_logger().error(
                "power.state_damaged",
                file=str(aside),
                error=str(error),
                remedy="previous limits are unknown: compare nvidia-smi -q -d POWER with what you want",
            )
            return {}

    def _write(self, limits: dict[str, float]) -> None:
        scratch = self._path.with_suffix(".new")
        with scratch.open("w", encoding="utf-8") as file:
            json.dump({"boot_id": _boot_id(), "limits": limits}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._limits = limits


def _boot_id() -> str:
    return BOOT_ID.read_text().strip()
