"""Several seeds of one simulation, summed up with confidence intervals."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.sim.config import build_cluster, catalog_of, reference_row, scheduler_of
from splitwise.sim.results import METRICS, Result
from splitwise.sim.run import simulate
from splitwise.sim.slo import Verdict, evaluate
from splitwise.sim.workers import LocalWorkers, open_workers
from splitwise.workload import load_trace, synthesize

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from splitwise.perf.model import PerformanceModel
    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.config import SimulationConfig
    from splitwise.sim.setup import Cluster
    from splitwise.workload import Trace

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_NORMAL95 = 1.960
MENTIONED = 0.001  # share of the busy time above which extrapolation is told
START_SECONDS = 4.0  # what starting worker processes costs, about


@dataclass(frozen=True, slots=True)
class Estimate:
    """Mean over the seeds and the half width of its 95 % confidence interval (None: one seed)."""

    mean: float
    half_width: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Estimate from one value per seed, by Student's t."""
        number = len(values)
        if number < 2:
            return cls(float(values[0]), None)
        quantile = _T95[number - 2] if number - 2 < len(_T95) else _NORMAL95
        spread = float(np.std(values, ddof=1))
        return cls(float(np.mean(values)), quantile * spread / number**0.5)


@dataclass(frozen=True)
class Experiment:
    """The runs of one config, one per seed."""

    config: SimulationConfig
    results: tuple[Result, ...]
    verdicts: tuple[Verdict, ...]
    cpu_seconds: float
    models: Mapping[str, PerformanceModel]  # by kind of machine

    @property
    def slo_met(self) -> bool:
        """Whether every seed meets every objective."""
        return all(verdict.met for verdict in self.verdicts)

    def latencies(self) -> dict[str, dict[str, Estimate]]:
        """Return ``metric -> statistic -> estimate over the seeds``."""
        runs = [result.percentiles(self.config.warmup_s) for result in self.results]
        return {
            metric: {name: Estimate.of([run[metric][name] for run in runs]) for name in runs[0][metric]}
            for metric in METRICS
        }

    def extrapolated(self) -> list[str]:
        """Say how much of the machines' work lies outside what their performance models were measured on."""
        result, told = self.results[0], []
        loads = result.machine_loads()
        for kind in dict.fromkeys(load.kind for load in loads):
            group = [load for load in loads if load.kind == kind]
            busy = sum(load.prompt_seconds + load.mixed_seconds + load.token_seconds for load in group)
            model = self.models[kind]
            most = model.measured.get("sequences", (0.0, float("inf")))[1]
            beyond = sum(
                share * (load.prompt_seconds + load.mixed_seconds + load.token_seconds)
                for load in group
                for size, share in load.occupancy.items()
                if size > most
            )
            if beyond > MENTIONED * busy:
                told.append(
                    f"{kind}: {beyond / busy:.0%} of its busy time has more than {most:g} sequences in a "
                    "batch, the most that was measured: token times there are extrapolated"
                )
            longest = model.measured.get("prompt_tokens", (0.0, float("inf")))[1]
            prompts = result.trace.prompt_tokens
            if prompts.max() > longest:
                told.append(
                    f"{kind}: {float((prompts > longest).mean()):.1%} of the prompts are longer than the "
                    f"{longest:g} tokens that were measured: their times are extrapolated"
                )
        return told

    def summary(self) -> dict[str, Any]:
        """Plain data for JSON; NaN becomes None."""
        requests = sum(len(result.trace) for result in self.results)
        machines = self.results[0].cluster.machines
        return {
            "mode": self.config.mode.value,
            "model": self.config.model,
            "seeds": self.config.seeds,
            "requests": requests,
            "unfinished": sum(result.unfinished for result in self.results),
            "requests_per_cpu_second": requests / max(self.cpu_seconds, 1e-9),
            "cost_per_hour": sum(machine.cost_per_hour for machine in machines),
            "latency_s": {
                metric: {name: _plain(value) for name, value in row.items()}
                for metric, row in self.latencies().items()
            },
            "slo": {"met": self.slo_met, "limits": self._limits()},
            "extrapolated": self.extrapolated(),
            "reasons": [result.reason_counts() for result in self.results],
        }

    def _limits(self) -> list[dict[str, Any]]:
        rows = zip(*(verdict.limits for verdict in self.verdicts), strict=True)
        return [
            {
                "metric": row[0].metric,
                "percentile": row[0].percentile,
                "limit": row[0].limit,
                "slowdown": _plain(Estimate.of([limit.measured for limit in row])),
                "met": all(limit.met for limit in row),
            }
            for row in rows
        ]


def _plain(estimate: Estimate) -> dict[str, float | None]:
    mean = estimate.mean if np.isfinite(estimate.mean) else None
    width = estimate.half_width
    return {"mean": mean, "ci95": width if width is not None and np.isfinite(width) else None}


@dataclass(frozen=True)
class _Shared:
    """What the runs of all seeds have in common; holds the trace, so that workers need no file."""

    config: SimulationConfig
    cluster: Cluster
    scheduler: SchedulerSettings
    reference: NDArray[np.float64]
    source: Trace


@dataclass(frozen=True)
class _SeedRun:
    result: Result
    verdict: Verdict
    cpu_seconds: float


def trace_of(config: SimulationConfig, source: Trace, seed: int) -> Trace:
    """Return one seed's requests: those of the file as they are, or made from their sizes."""
    part = config.trace
    if part.rate is None or part.duration_s is None:
        return source if part.duration_s is None else source.slice(0.0, part.duration_s)
    return synthesize(
        source,
        rate=part.rate,
        duration=part.duration_s,
        arrivals=part.arrivals,
        joint=part.joint,
        seed=seed,
    )


def _run_seed(shared: _Shared, seed: int) -> _SeedRun:
    config, trace = shared.config, trace_of(shared.config, shared.source, seed)
    began = time.process_time()
    seeded = replace(shared.scheduler, seed=shared.scheduler.seed + seed)
    until = float("inf") if config.until_s is None else config.until_s
    result = simulate(trace, shared.cluster, mode=config.mode, scheduler=seeded, until=until)
    spent = time.process_time() - began
    return _SeedRun(result, evaluate(result, shared.reference, config.slo, warmup=config.warmup_s), spent)


def run_experiment(
    config: SimulationConfig,
    progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    processes: int = 1,
    ray: str | None = None,
) -> Experiment:
    """Run all seeds, telling `progress` how many are done. Raises ConfigError and TraceError.

    With several processes the first seed runs here, and the others only start processes
    when that would be over sooner. `ray` is the address of a Ray cluster to use instead.
    Results are equal in all cases.
    """
    catalog, part, seeds = catalog_of(config), config.trace, config.seeds
    shared = _Shared(
        config,
        build_cluster(config, catalog),
        scheduler_of(config),
        reference_row(config, catalog),
        load_trace(part.file, sort=part.sort, drop_invalid=part.drop_invalid),
    )
    finished = 0

    def done() -> None:
        nonlocal finished
        finished += 1
        progress(finished, len(seeds))

    progress(0, len(seeds))
    runs: list[_SeedRun] = []
    if ray is None:
        began = time.perf_counter()
        runs = LocalWorkers(shared).run(_run_seed, seeds[:1], done)
        if (time.perf_counter() - began) * (len(seeds) - 1) < START_SECONDS:
            processes = 1
    left = seeds[len(runs) :]
    if left:
        with open_workers(shared, min(processes, len(left)), ray) as workers:
            runs += workers.run(_run_seed, left, done)
    results, verdicts = tuple(run.result for run in runs), tuple(run.verdict for run in runs)
    models = {
        part.hardware: catalog.performance(config.model, part.hardware, config.tensor_parallel)
        for part in config.machines
    }
    return Experiment(config, results, verdicts, sum(run.cpu_seconds for run in runs), models)
