"""The scheduler's event log on disk: every event with what was decided, to be replayed.

Off unless `router.event_log` names a file. When the file has its size, it becomes ``FILE.1``
(the one before goes), and a new one begins with the scheduler's state: two files at most,
and each replays by itself (`splitwise replay`). It holds ids, sizes, times and machines;
never prompts or outputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.scheduling.eventlog import Recorder
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from splitwise.scheduling.cluster import ClusterScheduler
    from splitwise.scheduling.decisions import Decision
    from splitwise.scheduling.events import Event


class EventLog:
    """Stands between the dispatcher and a new scheduler. A full disk ends the log, never a request."""

    def __init__(self, path: Path, max_bytes: int, scheduler: ClusterScheduler) -> None:
        """Begin a log; one of an earlier run becomes ``FILE.1``. Raises `ConfigError`."""
        self._path = path
        self._older = path.with_name(path.name + ".1")
        self._max_bytes = max_bytes
        self._scheduler = scheduler
        self._size = 0  # of the events; a large cluster's first line does not count
        self._failed = False
        try:
            if path.is_file() and path.stat().st_size:
                path.replace(self._older)
            self._file = path.open("w", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"router.event_log: {path}: {error.strerror}") from None
        self._recorder = Recorder(scheduler, self._write)
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failed:
            self._give_up(failed)

    def handle(self, event: Event) -> list[Decision]:
        """Let the scheduler decide, and write it down."""
        if self._failed:
            return self._scheduler.handle(event)
        decided = self._recorder.handle(event)
        if self._size >= self._max_bytes:
            self._begin_again()
        return decided

    def flush(self) -> None:
        """Hand over what is buffered, so that a kill costs the last moments only."""
        if not self._failed:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)

    def _write(self, line: str) -> None:
        if self._failed:
            return
        try:
            self._size += self._file.write(line + "\n")
        except OSError as error:
            self._give_up(error)

    def _begin_again(self) -> None:
        try:
            self._file.close()
            self._path.replace(self._older)
            self._file = self._path.open("w", encoding="utf-8")
        except OSError as error:
            self._give_up(error)
            return
        self._recorder.begin_again()
        self._size = 0
        get_logger().info("event_log.rotated", older=str(self._older))

    def _give_up(self, error: OSError) -> None:
        """With a line missing nothing behind it would replay, so the log ends here."""
        if not self._failed:
            get_logger().warning("event_log.ended", file=str(self._path), error=error.strerror)
        self._failed = True
