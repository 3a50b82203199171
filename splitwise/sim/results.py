"""What came out of a simulation: latencies per request, loads per machine, percentiles.

All latencies are in seconds and NaN for requests that did not get so far. TBT here is a
gap between two tokens after the first; the second token's gap, which a split lengthens,
is also given by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitwise.errors import SplitwiseError
from splitwise.scheduling import policies, reasons
from splitwise.sim import world as w

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitwise.sim.setup import Cluster, Machine
    from splitwise.workload.trace import Trace

    Floats = NDArray[np.float64]

METRICS = ("ttft", "tbt_mean", "tbt_max", "second_token", "e2e", "queued")
PERCENTILES = (50, 90, 99)


class ResultError(SplitwiseError):
    """A result cannot be summed up, such as when no request is left after the warm-up."""


@dataclass(frozen=True)
class MachineLoad:
    """One machine's run. `occupancy` maps sequences in the batch to the share of busy time."""

    name: str
    kind: str
    home: str
    utilisation: float
    prompt_seconds: float
    mixed_seconds: float
    token_seconds: float
    iterations: int
    prompt_tokens: int
    tokens: int
    memory_peak: float  # share of the KV memory
    mean_batch: float
    occupancy: dict[int, float]
    bytes_sent: float
    link_utilisation: float
    preemptions: int
    energy_joules: float
    lost_at: float | None


class Result:
    """Records of one run; columns have one entry per request of the trace, in its order."""

    def __init__(
        self,
        trace: Trace,
        cluster: Cluster,
        mode: str,
        policy: str,
        times: Floats,
        places: NDArray[np.int32],
        stats: Floats,
    ) -> None:
        self.trace, self.cluster, self.mode, self.policy = trace, cluster, mode, policy
        self.start, self.first, self.second = times[:, w.START], times[:, w.FIRST], times[:, w.SECOND]
        self.last, self.gap = times[:, w.LAST], times[:, w.GAP]
        self.prompt_machine, self.token_machine = places[:, w.PROMPT_MACHINE], places[:, w.TOKEN_MACHINE]
        self.how, self.restarts, self.preemptions = (
            places[:, w.HOW],
            places[:, w.RESTARTS],
            places[:, w.TIMES_PREEMPTED],
        )
        self.stats = stats

    @property
    def ttft(self) -> Floats:
        """Arrival to first token."""
        return np.subtract(self.first, self.trace.arrival, dtype=np.float64)

    @property
    def e2e(self) -> Floats:
        """Arrival to last token."""
        return self.last - self.trace.arrival

    @property
    def queued(self) -> Floats:
        """Arrival to the start of the first prompt iteration."""
        return self.start - self.trace.arrival

    @property
    def second_token(self) -> Floats:
        """First to second token; NaN for requests with one token."""
        return np.where(self.trace.output_tokens > 1, self.second - self.first, np.nan)

    @property
    def tbt_mean(self) -> Floats:
        """Mean gap between tokens; NaN for requests with one token.

        In compat mode it is the authors' (E2E - TTFT) / output tokens, which divides by one too
        many.
        """
        tokens = self.trace.output_tokens.astype(np.float64)
        gaps = tokens if self.mode == "compat" else tokens - 1.0
        means: Floats = np.divide(
            self.last - self.first, gaps, out=np.full(len(gaps), np.nan), where=tokens > 1
        )
        return means

    @property
    def tbt_max(self) -> Floats:
        """Longest gap between tokens; NaN for requests with one token."""
        return np.where((self.trace.output_tokens > 1) & np.isfinite(self.last), self.gap, np.nan)

    @property
    def end(self) -> float:
        """When the last token was made (0 when there was none)."""
        finished = self.last[np.isfinite(self.last)]
        return float(finished.max()) if len(finished) else 0.0

    @property
    def unfinished(self) -> int:
        """How many requests never got their last token."""
        return int(np.isnan(self.last).sum())

    def metric(self, name: str) -> Floats:
        """Return one column by its name in `METRICS`."""
        column: Floats = getattr(self, name)
        return column

    def counted(self, warmup: float = 0.0) -> NDArray[np.bool_]:
        """Say which requests count: those that arrive `warmup` seconds or more after the first."""
        chosen: NDArray[np.bool_] = self.trace.arrival >= self.trace.arrival[0] + warmup
        if not chosen.any():
            raise ResultError(
                f"no request is left after a warm-up of {warmup:g} s: the trace lasts only "
                f"{self.trace.duration:g} s"
            )
        return chosen

    def percentiles(self, warmup: float = 0.0) -> dict[str, dict[str, float]]:
        """Mean, P50, P90, P99 and largest of every metric over requests after the warm-up."""
        chosen = self.counted(warmup)
        return {name: spread(self.metric(name)[chosen]) for name in METRICS}

    def reason(self, request: int) -> str:
        """Say why a request ran where it ran, in the words of `Decision.reason`."""
        if self.prompt_machine[request] < 0:
            return reasons.QUEUE_FULL
        code = int(self.how[request])
        prompt, token = code // w.HOW_BASE, code % w.HOW_BASE
        if prompt == policies.HOW_OWN_POOL and not self.cluster.split and self.mode == "compat":
            return "jsq:all-machines"
        return reasons.ASSIGN[self.policy, prompt, token]

    def reason_counts(self) -> dict[str, int]:
        """How many requests ran for which reason."""
        counts: dict[str, int] = {}
        codes, first, number = np.unique(
            np.where(self.prompt_machine < 0, -1, self.how), return_index=True, return_counts=True
        )
        for _, request, count in zip(codes, first, number, strict=True):
            reason = self.reason(int(request))
            counts[reason] = counts.get(reason, 0) + int(count)
        return counts

    def machine_load(self, index: int) -> MachineLoad:
        """Sum one machine up over the whole run."""
        machine, stats = self.cluster.machines[index], self.stats[index]
        busy = float(stats[w.BUSY_PROMPT] + stats[w.BUSY_MIXED] + stats[w.BUSY_TOKEN])
        span = max(self.end - float(self.trace.arrival[0]), 1e-12)
        shares = stats[w.OCCUPANCY :] / max(busy, 1e-12)
        lost = float(stats[w.LOST_AT])
        return MachineLoad(
            name=machine.name,
            kind=machine.kind,
            home="prompt" if machine.home == 0 else "token",
            utilisation=busy / span,
            prompt_seconds=float(stats[w.BUSY_PROMPT]),
            mixed_seconds=float(stats[w.BUSY_MIXED]),
            token_seconds=float(stats[w.BUSY_TOKEN]),
            iterations=int(stats[w.ITERATIONS]),
            prompt_tokens=int(stats[w.PROMPT_TOKENS]),
            tokens=int(stats[w.TOKENS]),
            memory_peak=float(stats[w.MEMORY_PEAK]) / self._memory(machine),
            mean_batch=float(np.dot(shares, np.arange(len(shares)))),
            occupancy={int(size): float(shares[size]) for size in np.flatnonzero(shares)},
            bytes_sent=float(stats[w.BYTES_SENT]),
            link_utilisation=float(stats[w.LINK_BUSY]) / span,
            preemptions=int(stats[w.PREEMPTIONS]),
            energy_joules=self._energy(machine, stats, span - busy),
            lost_at=lost if lost > 0 else None,
        )

    def _memory(self, machine: Machine) -> float:
        """Return what MEMORY_PEAK is to be divided by: blocks, or in compat mode bytes."""
        return float(machine.memory_bytes if self.mode == "compat" else machine.kv_blocks)

    @staticmethod
    def _energy(machine: Machine, stats: Floats, idle: float) -> float:
        """Joules: each kind of iteration at its watts; mixed iterations at the prompt phase's."""
        power = machine.power
        prompt = float(stats[w.BUSY_PROMPT] + stats[w.BUSY_MIXED])
        return power.prompt * prompt + power.token * float(stats[w.BUSY_TOKEN]) + power.idle * max(idle, 0.0)

    def machine_loads(self) -> list[MachineLoad]:
        """Sum all machines up."""
        return [self.machine_load(index) for index in range(len(self.cluster.machines))]


def spread(values: Floats) -> dict[str, float]:
    """Mean, percentiles (linear between ranks) and largest of the values that are there."""
    there = values[np.isfinite(values)]
    if not len(there):
        return {"mean": float("nan"), **{f"p{p}": float("nan") for p in PERCENTILES}, "max": float("nan")}
    low = np.percentile(there, PERCENTILES)
    return {
        "mean": float(there.mean()),
        **{f"p{p}": float(value) for p, value in zip(PERCENTILES, low, strict=True)},
        "max": float(there.max()),
    }
