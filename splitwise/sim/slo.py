"""Service level objectives: slowdowns against the same request alone on a reference machine.

The default table and the reference (an uncontended DGX-A100) are the Splitwise paper's
(Table VI): nine limits, all of which must hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitwise.errors import ConfigError
from splitwise.perf.kernels import (
    compat_prompt_seconds,
    compat_token_seconds,
    prompt_seconds,
    token_run_seconds,
)
from splitwise.sim.compiled import compiled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from splitwise.sim.results import Result

    Floats = NDArray[np.float64]

TABLE_VI = {
    "ttft": {50: 2.0, 90: 3.0, 99: 6.0},
    "tbt": {50: 1.25, 90: 1.5, 99: 5.0},
    "e2e": {50: 1.25, 90: 1.5, 99: 5.0},
}


@dataclass(frozen=True, slots=True)
class Limit:
    """One objective and how it was met: `measured` and `limit` are slowdowns."""

    metric: str
    percentile: float
    limit: float
    measured: float

    @property
    def met(self) -> bool:
        """Whether it holds; a slowdown that cannot be told (no request finished) does not."""
        return bool(self.measured <= self.limit)

    @property
    def use(self) -> float:
        """Share of the limit that is used up; above 1 it is broken."""
        return self.measured / self.limit if np.isfinite(self.measured) else float("inf")


@dataclass(frozen=True, slots=True)
class Verdict:
    """All objectives of one run."""

    limits: tuple[Limit, ...]
    unfinished: int

    @property
    def met(self) -> bool:
        """Whether every objective holds and every request that counts was finished."""
        return self.unfinished == 0 and all(limit.met for limit in self.limits)

    @property
    def worst(self) -> Limit:
        """The objective that is nearest to breaking, or the most broken."""
        return max(self.limits, key=lambda limit: limit.use)


@compiled
def _reference(
    row: Floats, prompt: NDArray[np.int32], output: NDArray[np.int32], compat: bool, ttft: Floats, tbt: Floats
) -> None:
    for index in range(len(prompt)):
        if compat:
            ttft[index] = compat_prompt_seconds(row, float(prompt[index]))
            # The authors read the token table at the prompt's tokens when they normalize.
            tbt[index] = compat_token_seconds(row, float(prompt[index]))
        else:
            more = max(float(output[index]) - 1.0, 1.0)
            ttft[index] = prompt_seconds(row, float(prompt[index]), 1.0)
            tbt[index] = token_run_seconds(row, 1.0, float(prompt[index]) + 1.0, more) / more


def reference(result: Result, row: Floats) -> dict[str, Floats]:
    """Return TTFT, TBT and E2E of every request alone on the machine of performance model `row`."""
    trace = result.trace
    ttft, tbt = np.empty(len(trace)), np.empty(len(trace))
    _reference(row, trace.prompt_tokens, trace.output_tokens, result.mode == "compat", ttft, tbt)
    return {"ttft": ttft, "tbt": tbt, "e2e": ttft + tbt * (trace.output_tokens - 1)}


def evaluate(
    result: Result,
    row: Floats,
    table: Mapping[str, Mapping[int, float]] = TABLE_VI,
    *,
    warmup: float = 0.0,
) -> Verdict:
    """Compare a run's slowdowns with a table of ``metric -> percentile -> largest slowdown``.

    TBT is a request's mean gap between tokens. Requests that arrive during the warm-up do
    not count.
    """
    alone = reference(result, row)
    chosen = result.counted(warmup)
    measured = {"ttft": result.ttft, "tbt": result.tbt_mean, "e2e": result.e2e}
    limits = []
    for metric, wanted in table.items():
        if metric not in alone:
            raise ConfigError(f"unknown SLO metric {metric!r}: choose from {', '.join(alone)}")
        slowdown = (measured[metric] / alone[metric])[chosen]
        slowdown = slowdown[np.isfinite(slowdown)]
        for percentile, limit in wanted.items():
            value = float(np.percentile(slowdown, percentile)) if len(slowdown) else float("nan")
            limits.append(Limit(metric, percentile, limit, value))
    return Verdict(tuple(limits), int(np.isnan(result.last[chosen]).sum()))
