"""Run one simulation: check the input, make the arrays, run the loop, hand back records."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from splitwise.errors import ConfigError
from splitwise.scheduling.arrays import POOL_TOKEN as HOME_TOKEN
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.sim.results import Result
from splitwise.workload.trace import TraceError

if TYPE_CHECKING:
    from splitwise.sim.job import Sim
    from splitwise.sim.setup import Cluster
    from splitwise.sim.world import World
    from splitwise.workload.trace import Trace

FIRST_ROOM = 1024  # places in each list at first; runs that need more begin again with more


class Mode(Enum):
    """Whose rules the simulation follows."""

    FAITHFUL = "faithful"
    COMPAT = "compat"


def simulate(
    trace: Trace,
    cluster: Cluster,
    *,
    mode: Mode = Mode.FAITHFUL,
    scheduler: SchedulerSettings | None = None,
    until: float = float("inf"),
) -> Result:
    """Run `trace` on `cluster` until every request is done, or until `until` seconds.

    Raises TraceError when a request is larger than any machine's KV memory, and ConfigError
    when the cluster cannot be run in this mode.
    """
    trace.check()
    check_fits(trace, cluster)
    scheduler = scheduler or SchedulerSettings()
    if scheduler.policy == "prefix-aware":
        raise ConfigError("prefix-aware scheduling cannot be simulated: traces say nothing about prefixes")
    room = FIRST_ROOM
    while True:
        world = (
            _run_faithful(trace, cluster, scheduler, room, until)
            if mode is Mode.FAITHFUL
            else _run_compat(trace, cluster, room, until)
        )
        if world is not None:
            return Result(
                trace, cluster, mode.value, scheduler.policy, world.times, world.places, world.stats
            )
        room *= 2


def check_fits(trace: Trace, cluster: Cluster) -> None:
    """Raise TraceError naming the first request that no machine can hold."""
    room = cluster.largest_tokens
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    larger = np.flatnonzero(total > room)
    if len(larger):
        row = larger[0]
        raise TraceError(
            f"{trace.name}, row {row + 1}: {trace.prompt_tokens[row]} prompt and {trace.output_tokens[row]} "
            f"output tokens need more KV memory than the {room} tokens of the largest machine "
            f"({len(larger)} such rows); take machines with more memory, or leave these rows out"
        )


def _run_faithful(
    trace: Trace, cluster: Cluster, scheduler: SchedulerSettings, room: int, until: float
) -> World | None:
    from splitwise.sim.faithful import run_faithful
    from splitwise.sim.job import new_sim

    sim = new_sim(trace.prompt_tokens, trace.output_tokens, cluster, scheduler, room)
    _script(sim, cluster)
    return sim.world if run_faithful(sim, trace.arrival, until) >= 0 else None


def _script(sim: Sim, cluster: Cluster) -> None:
    """Put failures, returns and the first reports (spread over one period) into the heap."""
    from splitwise.sim.batches import FAILURE, REPORT, RETURN
    from splitwise.sim.world import push

    for failure in cluster.failures:
        push(sim.world, float(failure.at), FAILURE, failure.machine, 0)
        if failure.back is not None:
            push(sim.world, float(failure.back), RETURN, failure.machine, 0)
    if cluster.report_seconds > 0:
        number = len(cluster.machines)
        for machine in range(number):
            push(sim.world, cluster.report_seconds * (machine + 1) / number, REPORT, machine, 0)


def _run_compat(trace: Trace, cluster: Cluster, room: int, until: float) -> World | None:
    from splitwise.sim.compat import run_compat
    from splitwise.sim.compat_machine import PROMPT_POOL, TOKEN_POOL, compat_world

    if cluster.failures or cluster.report_seconds:
        raise ConfigError("compat mode has neither failures nor load reports: SplitwiseSim has none")
    if np.any(trace.output_tokens < 2):
        row = int(np.flatnonzero(trace.output_tokens < 2)[0])
        raise TraceError(
            f"{trace.name}, row {row + 1}: one output token; SplitwiseSim cannot run requests without a "
            "token phase: use faithful mode"
        )
    first = cluster.machines[0]
    if any(
        (m.memory_bytes, m.weights_bytes) != (first.memory_bytes, first.weights_bytes)
        for m in cluster.machines
    ):
        raise ConfigError("compat mode needs machines of equal memory")
    world = compat_world(
        trace.prompt_tokens,
        trace.output_tokens,
        models=np.array([machine.model_row for machine in cluster.machines]),
        homes=np.array([TOKEN_POOL if m.home == HOME_TOKEN else PROMPT_POOL for m in cluster.machines]),
        memory=first.memory_bytes,
        weights=first.weights_bytes,
        token_bytes=cluster.token_bytes,
        rows=cluster.rows,
        room=room,
    )
    return world if run_compat(world, trace.arrival, until) >= 0 else None
