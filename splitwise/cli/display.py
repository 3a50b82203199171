"""The terminal of `splitwise up` and `demo`: progress while it starts, then one merged log."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from splitwise.launch.process import State

if TYPE_CHECKING:
    from splitwise.launch.lines import LogLine
    from splitwise.launch.process import ManagedProcess

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_red", "bright_cyan", "bright_green")
LEVELS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 4}
LEVEL_STYLES = {"warning": "yellow", "error": "red", "critical": "bold red"}


class Display:
    """Tells a person on standard error what the processes do.

    While they start: a table on a terminal, a line per step elsewhere. Afterwards every event
    of at least `level`.
    """

    def __init__(self, *, level: str = "info", quiet: bool = False) -> None:
        self.console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._level = LEVELS[level]
        self._quiet = quiet
        self._processes: dict[str, ManagedProcess] = {}
        self._told: dict[str, str] = {}
        self._live: Live | None = None
        self._starting = False

    def begin(self, processes: list[ManagedProcess]) -> None:
        """Show the start of these processes."""
        self._processes = {process.name: process for process in processes}
        self._starting = True
        if self.console.is_terminal:
            self._live = Live(console=self.console, get_renderable=self._table, refresh_per_second=8)
            self._live.start()

    def end_start(self) -> None:
        """The start is over, for good or bad; from now on the log is shown."""
        self._starting = False
        if self._live is not None:
            self._live.stop()
            self._live = None

    def changed(self, process: ManagedProcess) -> None:
        """Say that a process entered another state."""
        if self._live is not None or process.state is State.EXITED:
            return
        told = f"{process.state} {process.detail}".rstrip()
        if self._told.get(process.name) == told or (self._quiet and not self._starting):
            return
        self._told[process.name] = told
        seconds = f" after {process.seconds_to_ready:.1f} s" if process.state is State.READY else ""
        self._print(process.name, f"{told}{seconds}")

    def logged(self, process: ManagedProcess, line: LogLine) -> None:
        """Show a line when it is severe enough and not told by `changed` already."""
        if self._quiet or LEVELS.get(line.level, 1) < max(
            self._level, LEVELS["error"] if self._starting else 0
        ):
            return
        if line.event in {"service.starting", "service.loading", "service.ready", "service.stopped"}:
            return
        self._print(line.source if process.name == "fleet" else process.name, line.shown, line.level)

    def died(self, process: ManagedProcess, pause_s: float | None) -> None:
        """Say that a process died, with its last lines."""
        again = (
            "not started again: its settings are refused" if pause_s is None else f"again in {pause_s:.1f} s"
        )
        self._print(process.name, f"ended with exit code {process.exit_code}; {again}", "error")
        self.last_lines(process)

    def last_lines(self, process: ManagedProcess) -> None:
        """Show the end of a process's log."""
        for line in list(process.last_lines)[-12:]:
            self._print(process.name, f"  | {line.shown}", line.level)

    def say(self, text: str, style: str = "") -> None:
        """Print a line that belongs to no process."""
        self.console.print(Text(text, style=style))

    def _print(self, name: str, text: str, level: str = "info") -> None:
        colour = COLOURS[sum(name.encode()) % len(COLOURS)]
        line = Text.assemble(
            (time.strftime("%H:%M:%S "), "dim"),
            (f"{name:<12} ", colour),
            (text, LEVEL_STYLES.get(level, "")),
        )
        self.console.print(line)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for process in self._processes.values():
            seconds = "" if process.state is State.WAITING else f"{time.monotonic() - process.started:5.1f} s"
            state: Text | Spinner
            match process.state:
                case State.READY:
                    state, seconds = Text("ready", style="green"), f"{process.seconds_to_ready:5.1f} s"
                case State.WAITING:
                    state = Text("waiting", style="dim")
                case State.EXITED:
                    state = Text(f"ended ({process.exit_code})", style="red")
                case _:
                    state = Spinner("dots", f"{process.state} {process.detail}")
            table.add_row(process.name, state, seconds)
        return table
