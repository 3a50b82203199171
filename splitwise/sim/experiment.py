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
from splitwise.workload import load_trace, synthesize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitwise.sim.config import SimulationConfig
    from splitwise.workload import Trace

# Two-sided 95 % quantiles of Student's t by degrees of freedom; beyond the table the normal's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145)
_NORMAL95 = 1.960


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


def traces_of(config: SimulationConfig) -> list[Trace]:
    """Return one trace per seed: the file as it is, or made from its sizes."""
    part = config.trace
    source = load_trace(part.file, sort=part.sort, drop_invalid=part.drop_invalid)
    if part.rate is None or part.duration_s is None:
        whole = source if part.duration_s is None else source.slice(0.0, part.duration_s)
        return [whole] * len(config.seeds)
    rate, duration = part.rate, part.duration_s
    return [
        synthesize(
            source,
            rate=rate,
            duration=duration,
            arrivals=part.arrivals,
            joint=part.joint,
            seed=seed,
        )
        for seed in config.seeds
    ]


def run_experiment(
    config: SimulationConfig, progress: Callable[[int, int], None] = lambda done, total: None
) -> Experiment:
    """Run all seeds, telling `progress` how many are done. Raises ConfigError and TraceError."""
    catalog = catalog_of(config)
    cluster = build_cluster(config, catalog)
    scheduler = scheduler_of(config)
    row = reference_row(config, catalog)
    until = float("inf") if config.until_s is None else config.until_s
    results: list[Result] = []
    verdicts: list[Verdict] = []
    spent = 0.0
    for seed, trace in zip(config.seeds, traces_of(config), strict=True):
        began = time.process_time()
        seeded = replace(scheduler, seed=scheduler.seed + seed)
        results.append(simulate(trace, cluster, mode=config.mode, scheduler=seeded, until=until))
        spent += time.process_time() - began
        verdicts.append(evaluate(results[-1], row, config.slo, warmup=config.warmup_s))
        progress(len(results), len(config.seeds))
    return Experiment(config, tuple(results), tuple(verdicts), spent)
