"""Progress of long commands on standard error: bars on a terminal, a line per step elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType


class Steps:
    """Several steps, each with an estimate of what it still needs, and the time left for all.

    `unit` is what a step counts, such as ``clusters``. `update` may be called from any thread.
    """

    def __init__(self, names: Sequence[str], unit: str, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._unit = unit
        self._done: dict[str, float] = dict.fromkeys(names, 0.0)  # share of each step
        self._told: set[str] = set()
        self._began = time.monotonic()
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[count]}"), TimeElapsedColumn(), TextColumn("left:"),
            TimeRemainingColumn(), console=self._console, transient=True,
            disable=not self._console.is_terminal,
        )  # fmt: skip
        self._tasks = {name: self._bar.add_task(name, total=1.0, count="") for name in names}
        self._all = self._bar.add_task("all", total=float(len(names)), count="") if len(names) > 1 else None

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def update(self, name: str, done: float, rest: float) -> None:
        """Say that a step has counted `done` units and expects `rest` more; 0 is its end."""
        share = done / (done + rest) if done + rest > 0 else 0.0
        if rest <= 0:
            share = 1.0
        # An estimate may grow; a bar that goes back would tell less than one that waits.
        self._done[name] = max(self._done[name], share)
        self._bar.update(
            self._tasks[name], completed=self._done[name], count=f"{done:.0f} {self._unit} simulated"
        )
        if self._all is not None:
            self._bar.update(self._all, completed=sum(self._done.values()))
        if rest <= 0 and name not in self._told:
            self._told.add(name)
            self._tell(name, done)

    def _tell(self, name: str, done: float) -> None:
        if self._console.is_terminal:
            return
        finished, steps = sum(self._done.values()), len(self._done)
        spent = time.monotonic() - self._began
        left = spent / finished * (steps - finished) if finished else 0.0
        self._console.print(
            f"{name}: {done:.0f} {self._unit} simulated ({len(self._told)} of {steps} done, {spent:.0f} s, "
            f"about {left:.0f} s left)",
            soft_wrap=True,
            highlight=False,
        )
