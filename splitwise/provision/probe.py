"""Answer one question of a search: does this cluster serve this rate within its SLOs.

Runs stop early in two ways, neither of which changes an answer: the seeds after the first
broken one are not run, and a run is looked at after a quarter of its trace: when so many
requests are already late that a percentile cannot be met whatever follows, it is given up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor
from typing import TYPE_CHECKING

import numpy as np

from splitwise.provision.designs import Design
from splitwise.provision.throughput import Load, cluster_of, scheduler_for
from splitwise.sim.run import Mode, simulate
from splitwise.sim.slo import Verdict, evaluate, reference
from splitwise.sim.workers import LocalWorkers
from splitwise.workload import synthesize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.perf.catalog import Catalog
    from splitwise.provision.designs import Size
    from splitwise.sim.config import SimulationConfig
    from splitwise.sim.results import Result
    from splitwise.sim.setup import Cluster
    from splitwise.sim.workers import Workers
    from splitwise.workload import Trace

FURTHER_SEEDS = 2
LONGER = 2.0
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
    trace = synthesize(
        load.source,
        rate=rate,
        duration=load.duration,
        arrivals=load.arrivals,
        joint=load.joint,
        seed=seed,
    )
    if problem.config.mode is Mode.COMPAT:
        return replace(trace, output_tokens=trace.output_tokens.clip(min=2))
    return trace


def run_probe(problem: Problem, probe: Probe, seed: int) -> Result:
    """Simulate one seed to its end."""
    cluster = cluster_of(probe.design, probe.size, problem.config, problem.catalog)
    return _simulate(problem, trace_of(problem, probe.rate, seed), cluster)


def _simulate(problem: Problem, trace: Trace, cluster: Cluster, until: float = float("inf")) -> Result:
    config = problem.config
    return simulate(trace, cluster, mode=config.mode, scheduler=scheduler_for(config, cluster), until=until)


def meets(problem: Problem, probe: Probe, *, stop_early: bool = True) -> bool:
    """Say whether every seed meets every objective."""
    load = problem.load
    cluster = cluster_of(probe.design, probe.size, problem.config, problem.catalog)
    for seed in load.seeds:
        trace = trace_of(problem, probe.rate, seed)
        if stop_early:
            look = float(trace.arrival[0]) + LOOK_AT * load.duration
            if hopeless(_simulate(problem, trace, cluster, look), load, look):
                return False
        result = _simulate(problem, trace, cluster)
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


def longer(problem: Problem) -> Problem:
    """Return the problem that optima are confirmed on: a longer trace, its own and further seeds."""
    load = problem.load
    seeds = load.seeds + tuple(max(load.seeds) + 1 + n for n in range(FURTHER_SEEDS))
    return replace(problem, load=replace(load, duration=load.duration * LONGER, seeds=seeds))


@dataclass(frozen=True, slots=True)
class _Run:
    """One seed of a probe, to its end."""

    probe: Probe
    seed: int
    confirming: bool


def _judged(problem: Problem, run: _Run) -> Verdict:
    hard = longer(problem) if run.confirming else problem
    load = hard.load
    return evaluate(run_probe(hard, run.probe, run.seed), load.reference, load.slo, warmup=load.warmup)


Watch = Callable[[Design, float, float], None]  # design, clusters simulated so far, estimate of the rest


class Prober:
    """Answers probes on workers, each question once; answers do not depend on the workers.

    `watch` hears how far the search for each design is. Searches of different designs may
    use one prober from threads of their own.
    """

    def __init__(
        self, problem: Problem, workers: Workers | None = None, watch: Watch = lambda *told: None
    ) -> None:
        self.problem = problem
        self.answers: dict[Probe, bool] = {}
        self._workers = workers or LocalWorkers(problem)
        self._watch = watch
        self._simulated: dict[Design, float] = defaultdict(float)
        self._rest: dict[Design, float] = defaultdict(float)

    def ask(self, probes: Sequence[Probe]) -> list[bool]:
        """Answer all probes, in their order."""
        new = [probe for probe in dict.fromkeys(probes) if probe not in self.answers]
        if new:
            found = self._workers.run(meets, new, lambda: self._count(new[0].design, 1.0))
            self.answers.update(zip(new, found, strict=True))
        return [self.answers[probe] for probe in probes]

    def judge(self, probe: Probe, *, confirming: bool = False) -> list[Verdict]:
        """Judge every seed to its end; `confirming` does it on the longer trace with further seeds."""
        seeds = longer(self.problem).load.seeds if confirming else self.problem.load.seeds
        cost = (LONGER if confirming else 1.0) / len(self.problem.load.seeds)
        runs = [_Run(probe, seed, confirming) for seed in seeds]
        return self._workers.run(_judged, runs, lambda: self._count(probe.design, cost))

    def asked(self, design: Design) -> list[tuple[Probe, bool]]:
        """Return the answers about one design."""
        return [(probe, met) for probe, met in list(self.answers.items()) if probe.design == design]

    def expect(self, design: Design, clusters: float) -> None:
        """Say how many clusters are still to be simulated, as far as one can tell."""
        self._rest[design] = max(clusters, 0.0)
        self._watch(design, self._simulated[design], self._rest[design])

    def _count(self, design: Design, cost: float) -> None:
        self._simulated[design] += cost
        self.expect(design, self._rest[design] - cost)
