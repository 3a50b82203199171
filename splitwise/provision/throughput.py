"""The largest request rate that a cluster serves within its SLOs.

The search assumes that a cluster which breaks its SLOs at some rate breaks them at higher
rates too; seeds give common random numbers, so that rates and clusters are compared on
the same requests.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.sim.config import MachinesPart, build_cluster, scheduler_of
from splitwise.sim.run import simulate
from splitwise.sim.slo import TABLE_VI, Verdict, evaluate
from splitwise.workload import synthesize
from splitwise.workload.synthesize import Arrivals

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from numpy.typing import NDArray

    from splitwise.perf.catalog import Catalog
    from splitwise.provision.designs import Design, Size
    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.config import SimulationConfig
    from splitwise.sim.setup import Cluster
    from splitwise.workload import Trace


@dataclass(frozen=True)
class Load:
    """What the cluster has to serve, and how it is judged."""

    source: Trace
    duration: float
    reference: NDArray[np.float64]  # performance model of the SLO's reference machine
    slo: Mapping[str, Mapping[int, float]] = field(default_factory=lambda: TABLE_VI)
    seeds: tuple[int, ...] = (0,)
    warmup: float = 0.0
    joint: bool = True
    arrivals: Arrivals = Arrivals.POISSON


@dataclass(frozen=True)
class Throughput:
    """`rate` is the largest that was served in every seed; `broken` the verdict one step above."""

    rate: float
    broken: Verdict | None
    simulations: int


def cluster_of(design: Design, size: Size, config: SimulationConfig, catalog: Catalog) -> Cluster:
    """Return the simulated cluster of a design, with everything else as in `config`."""
    machines = [MachinesPart(home="prompt", hardware=design.prompt, count=size.prompt)]
    if design.token is not None:
        machines.append(MachinesPart(home="token", hardware=design.token, count=size.token))
    return build_cluster(config.model_copy(update={"machines": machines}), catalog)


def scheduler_for(config: SimulationConfig, cluster: Cluster) -> SchedulerSettings:
    """Return a config's scheduler; for a design that is not split, one that does not split."""
    scheduler = scheduler_of(config)
    # By any other policy machines would be borrowed for token phases: a split cluster after all.
    return scheduler if cluster.split else replace(scheduler, policy="together")


def judge(cluster: Cluster, config: SimulationConfig, load: Load, rate: float) -> Verdict:
    """Simulate one rate and return the first seed's verdict that is not met, or the last one's."""
    verdict: Verdict | None = None
    for seed in load.seeds:
        trace = synthesize(load.source, rate=rate, duration=load.duration, joint=load.joint, seed=seed)
        if config.mode.value == "compat":
            trace = replace(trace, output_tokens=trace.output_tokens.clip(min=2))
        result = simulate(trace, cluster, mode=config.mode, scheduler=scheduler_for(config, cluster))
        verdict = evaluate(result, load.reference, load.slo, warmup=load.warmup)
        if not verdict.met:
            return verdict
    if verdict is None:
        raise ConfigError("at least one seed is needed")
    return verdict


def largest_rate(
    cluster: Cluster, config: SimulationConfig, load: Load, *, guess: float = 64.0, step: float = 1.0
) -> Throughput:
    """Find the largest multiple of `step` requests per second that meets every SLO.

    Doubles or halves from `guess` until the rate is bracketed, then bisects. A rate of 0
    means that not even `step` is served.
    """
    served, broken, verdict, runs = 0, 0, None, 0
    rate = max(1, round(guess / step))
    while broken - served != 1:
        runs += 1
        found = judge(cluster, config, load, rate * step)
        if found.met:
            served = rate
        else:
            broken, verdict = rate, found
        rate = (served + broken) // 2 if broken else 2 * served
    return Throughput(served * step, verdict, runs)
