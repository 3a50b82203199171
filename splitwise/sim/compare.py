"""How far a simulation is from what a cluster really did, by a router's request log.

The log is JSON lines, one object per finished request::

    {"arrived_unix_ns": 1764484245000000000, "prompt_tokens": 812, "output_tokens": 64,
     "ttft_us": 61000, "second_us": 40100, "tbt_mean_us": 31000, "tbt_max_us": 40100,
     "e2e_us": 2014000}

with the fields of the protocol's `Timing`; they may also stand in an object ``timing``. The
same file replays as a trace. The log's times between tokens leave the second token out, the
simulator's (and the paper's) count it: measured ones are compared with it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.sim.results import PERCENTILES
from splitwise.workload.trace import Trace, TraceError

if TYPE_CHECKING:
    from pathlib import Path

    from numpy.typing import NDArray

    from splitwise.sim.results import Result

# Metric of a result -> field of the log, in microseconds.
FIELDS = {
    "ttft": "ttft_us",
    "second_token": "second_us",
    "tbt_mean": "tbt_mean_us",
    "tbt_max": "tbt_max_us",
    "e2e": "e2e_us",
}


@dataclass(frozen=True)
class RequestLog:
    """What really happened: a trace, and measured seconds by metric (NaN where not given)."""

    trace: Trace
    measured: dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Difference:
    """One statistic of one metric, in seconds. `error` is (simulated - measured) / measured."""

    metric: str
    statistic: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative error; NaN when nothing was measured."""
        return (self.simulated - self.measured) / self.measured if self.measured > 0 else float("nan")


def load_log(path: Path) -> RequestLog:
    """Read a router's request log, in order of arrival. Raises TraceError naming the line."""
    rows: list[tuple[int, int, int, list[float]]] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    rows.append(_row(path, number, line))
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    if not rows:
        raise TraceError(f"{path}: no requests in it")
    rows.sort(key=lambda row: row[0])
    base = rows[0][0]
    trace = Trace.of(
        [(row[0] - base) * 1e-9 for row in rows],
        [row[1] for row in rows],
        [row[2] for row in rows],
        name=path.name,
    )
    columns = np.array([row[3] for row in rows]) * 1e-6
    measured = {name: columns[:, index] for index, name in enumerate(FIELDS)}
    return RequestLog(trace, measured | _with_second_token(measured, trace.output_tokens.astype(np.int64)))


def _with_second_token(
    measured: dict[str, NDArray[np.float64]], tokens: NDArray[np.int64]
) -> dict[str, NDArray[np.float64]]:
    """Return mean and longest time between all tokens, from those after the second and the second's own."""
    second, later = measured["second_token"], np.maximum(tokens - 2, 0)
    mean, longest = (np.where(later > 0, measured[name], 0.0) for name in ("tbt_mean", "tbt_max"))
    return {
        "tbt_mean": np.where(tokens > 1, (second + mean * later) / np.maximum(tokens - 1, 1), np.nan),
        "tbt_max": np.where(tokens > 1, np.maximum(second, longest), np.nan),
    }


def _row(path: Path, number: int, line: str) -> tuple[int, int, int, list[float]]:
    try:
        entry: dict[str, Any] = json.loads(line)
        timing: dict[str, Any] = {**entry.get("timing", {}), **entry}
        times = [float(timing[field]) if field in timing else float("nan") for field in FIELDS.values()]
        return int(entry["arrived_unix_ns"]), int(entry["prompt_tokens"]), int(entry["output_tokens"]), times
    except KeyError as error:
        raise TraceError(f"{path}, line {number}: the field {error} is missing") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise TraceError(f"{path}, line {number}: not a request of a router's log: {error}") from None


def compare(log: RequestLog, result: Result) -> list[Difference]:
    """Lay mean and percentiles of every measured metric beside the simulation's."""
    found = []
    for metric, measured in log.measured.items():
        simulated = result.metric(metric)
        there = np.isfinite(measured) & np.isfinite(simulated)
        if not there.any():
            continue
        statistics = {"mean": (measured[there].mean(), simulated[there].mean())}
        for p in PERCENTILES:
            statistics[f"p{p}"] = (np.percentile(measured[there], p), np.percentile(simulated[there], p))
        found += [Difference(metric, name, float(a), float(b)) for name, (a, b) in statistics.items()]
    return found
