"""Answer one question of a search: does this cluster serve this rate within its SLOs.

Runs stop early in two ways, neither of which changes an answer: the seeds after the first
broken one are not run, and a run is looked at after a quarter of its trace: when so many
requests are already late that a percentile cannot be met whatever follows, it is given up.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from math import floor
from multiprocessing import get_context
from typing import TYPE_CHECKING

import numpy as np

from splitwise.provision.throughput import Load, cluster_of
from splitwise.sim.run import Mode, simulate
from splitwise.sim.slo import Verdict, evaluate, reference
from splitwise.workload import synthesize

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from splitwise.perf.catalog import Catalog
    from splitwise.provision.designs import Design, Size
    from splitwise.sim.config import SimulationConfig
    from splitwise.sim.results import Result
    from splitwise.workload import Trace

LOOK_AT = 0.25  # share of the trace after which a run is looked at


@dataclass(frozen=True)
class Problem:
    """What stays the same over a search; `config.machines` is replaced by each cluster's."""

    config: SimulationConfig
    catalog: Catalog
    load: Load


@dataclass(frozen=True, slots=True)
class Probe:
    """One cluster at one rate."""

    design: Design
    size: Size
    rate: float


def trace_of(problem: Problem, rate: float, seed: int) -> Trace:
    """Return the requests of one seed: the same for every cluster."""
    load = problem.load
    trace = synthesize(load.source, rate=rate, duration=load.duration, joint=load.joint, seed=seed)
    if problem.config.mode is Mode.COMPAT:
        return replace(trace, output_tokens=trace.output_tokens.clip(min=2))
    return trace


def run_probe(problem: Problem, probe: Probe, seed: int) -> Result:
    """Simulate one seed to its end."""
    cluster = cluster_of(probe.design, probe.size, problem.config, problem.catalog)
    return simulate(trace_of(problem, probe.rate, seed), cluster, mode=problem.config.mode)


def verdicts(problem: Problem, probe: Probe) -> list[Verdict]:
    """Judge every seed, to its end."""
    load = problem.load
    return [
        evaluate(run_probe(problem, probe, seed), load.reference, load.slo, warmup=load.warmup)
        for seed in load.seeds
    ]


def meets(problem: Problem, probe: Probe, *, stop_early: bool = True) -> bool:
    """Say whether every seed meets every objective."""
    load = problem.load
    cluster = cluster_of(probe.design, probe.size, problem.config, problem.catalog)
    for seed in load.seeds:
        trace = trace_of(problem, probe.rate, seed)
        if stop_early:
            look = float(trace.arrival[0]) + LOOK_AT * load.duration
            early = simulate(trace, cluster, mode=problem.config.mode, until=look)
            if hopeless(early, load, look):
                return False
        result = simulate(trace, cluster, mode=problem.config.mode)
        if not evaluate(result, load.reference, load.slo, warmup=load.warmup).met:
            return False
    return True


def hopeless(result: Result, load: Load, now: float) -> bool:
    """Say whether a run cut at `now` has broken an objective for certain.

    A percentile is above its limit once more requests are late than it leaves out. A
    request without its first (last) token has waited for it since it arrived.
    """
    alone = reference(result, load.reference)
    chosen = result.counted(load.warmup)
    waited = now - result.trace.arrival
    known = {
        "ttft": np.where(result.first <= now, result.ttft, waited),
        "tbt": np.where(result.last <= now, result.tbt_mean, -np.inf),
        "e2e": np.where(result.last <= now, result.e2e, waited),
    }
    several = chosen & (result.trace.output_tokens > 1)
    for metric, wanted in load.slo.items():
        if metric not in known:
            continue  # `evaluate` names it
        counted = several if metric == "tbt" else chosen
        slowdown = (known[metric] / alone[metric])[counted]
        for percentile, limit in wanted.items():
            left_out = len(slowdown) - floor(percentile / 100 * (len(slowdown) - 1))
            if len(slowdown) and np.count_nonzero(slowdown > limit) >= left_out:
                return True
    return False


_problem: list[Problem] = []  # of a worker process, set once when it starts


def _start(problem: Problem) -> None:
    _problem[:] = [problem]


def _answer(probe: Probe) -> bool:
    return meets(_problem[0], probe)


class Prober:
    """Answers probes on `workers` processes, each question once; answers do not depend on `workers`."""

    def __init__(self, problem: Problem, workers: int = 1) -> None:
        self.problem = problem
        self.answers: dict[Probe, bool] = {}
        self._pool = (
            ProcessPoolExecutor(
                workers, mp_context=get_context("spawn"), initializer=_start, initargs=(problem,)
            )
            if workers > 1
            else None
        )

    def __enter__(self) -> Prober:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def ask(self, probes: Sequence[Probe]) -> list[bool]:
        """Answer all probes, in their order."""
        new = [probe for probe in dict.fromkeys(probes) if probe not in self.answers]
        if self._pool is None:
            found = [meets(self.problem, probe) for probe in new]
        else:
            found = list(self._pool.map(_answer, new))
        self.answers.update(zip(new, found, strict=True))
        return [self.answers[probe] for probe in probes]
