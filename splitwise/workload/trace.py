"""A trace: requests in order of arrival, as flat arrays, checked once when it is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitwise.errors import SplitwiseError

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TOKENS = 2**31 - 1


class TraceError(SplitwiseError, ValueError):
    """A trace cannot be used; the message names the row and what to do about it."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in order of arrival.

    `arrival` is float64 seconds from the trace's own zero, `prompt_tokens` and
    `output_tokens` are int32; all have the same length. `output_tokens` counts the first
    token, which the prompt phase makes.
    """

    arrival: NDArray[np.float64]
    prompt_tokens: NDArray[np.int32]
    output_tokens: NDArray[np.int32]
    name: str = "trace"

    def __len__(self) -> int:
        return len(self.arrival)

    @property
    def duration(self) -> float:
        """Seconds from the first to the last arrival."""
        return float(self.arrival[-1] - self.arrival[0]) if len(self) else 0.0

    @property
    def rate(self) -> float:
        """Requests per second over the trace's duration; 0 when it has no duration."""
        return (len(self) - 1) / self.duration if self.duration > 0 else 0.0

    @classmethod
    def of(
        cls,
        arrival: object,
        prompt_tokens: object,
        output_tokens: object,
        *,
        name: str = "trace",
    ) -> Trace:
        """Build a checked trace from anything that numpy takes for an array.

        Raises TraceError for what `check` finds.
        """
        trace = cls(
            np.ascontiguousarray(np.asarray(arrival, dtype=np.float64)),
            _tokens(prompt_tokens, "prompt_tokens", name),
            _tokens(output_tokens, "output_tokens", name),
            name,
        )
        trace.check()
        return trace

    def check(self, *, first_row: int = 1, after: float | None = None) -> None:
        """Raise TraceError unless it is non-empty, sorted, non-negative and has no zero sizes.

        `first_row` is the row number of the first request and `after` the arrival before
        it, so that a chunk of a file is checked as the part of the whole that it is.
        """
        if not len(self.arrival) == len(self.prompt_tokens) == len(self.output_tokens):
            raise TraceError(
                f"{self.name}: {len(self.arrival)} arrival times, {len(self.prompt_tokens)} prompt sizes and "
                f"{len(self.output_tokens)} output sizes; every request needs all three"
            )
        if not len(self):
            raise TraceError(f"{self.name}: no requests in it")
        self._check_times(first_row, after)
        for sizes, what in ((self.prompt_tokens, "prompt"), (self.output_tokens, "output")):
            bad = np.flatnonzero(sizes < 1)
            if len(bad):
                raise TraceError(
                    f"{self.name}, row {first_row + bad[0]}: {sizes[bad[0]]} {what} tokens "
                    f"({len(bad)} such rows); every request needs at least 1: drop these rows or import "
                    "with --drop-invalid"
                )

    def _check_times(self, first_row: int, after: float | None) -> None:
        bad = np.flatnonzero(~np.isfinite(self.arrival))
        if len(bad):
            raise TraceError(f"{self.name}, row {first_row + bad[0]}: the arrival time is not a number")
        previous = np.concatenate(([self.arrival[0] if after is None else after], self.arrival[:-1]))
        bad = np.flatnonzero(self.arrival < previous)
        if len(bad):
            raise TraceError(
                f"{self.name}, row {first_row + bad[0]}: arrival at {self.arrival[bad[0]]:g} s "
                f"after a row at {previous[bad[0]]:g} s ({len(bad)} such rows); sort the trace or import "
                "with --sort"
            )
        bad = np.flatnonzero(self.arrival < 0)
        if len(bad):
            raise TraceError(
                f"{self.name}, row {first_row + bad[0]}: arrival at {self.arrival[bad[0]]:g} s "
                f"({len(bad)} such rows); times count from 0: shift the trace"
            )

    def slice(self, start: float, end: float) -> Trace:
        """Return the requests of [start, end) seconds, with times shifted so that `start` is 0."""
        low, high = np.searchsorted(self.arrival, (start, end), side="left")
        part = Trace(
            self.arrival[low:high] - start,
            self.prompt_tokens[low:high],
            self.output_tokens[low:high],
            self.name,
        )
        if not len(part):
            raise TraceError(f"{self.name}: no requests between {start:g} s and {end:g} s")
        return part

    def sorted(self) -> Trace:
        """Return the requests in order of arrival (stable), the first at 0 if any was negative."""
        order = np.argsort(self.arrival, kind="stable")
        arrival = self.arrival[order]
        if len(arrival) and arrival[0] < 0:
            arrival = arrival - arrival[0]
        return Trace(arrival, self.prompt_tokens[order], self.output_tokens[order], self.name)


def _tokens(values: object, what: str, name: str) -> NDArray[np.int32]:
    wide = np.asarray(values)
    if wide.dtype.kind not in "iu":
        whole = np.asarray(wide, dtype=np.float64)
        if not np.all(np.isfinite(whole)) or np.any(whole != np.floor(whole)):
            raise TraceError(f"{name}: {what} must be whole numbers")
        wide = whole
    if len(wide) and (wide.max() > MAX_TOKENS or wide.min() < -MAX_TOKENS):
        raise TraceError(f"{name}: {what} holds {wide[np.argmax(np.abs(wide))]:.0f}, which is no token count")
    return np.ascontiguousarray(wide.astype(np.int32))
