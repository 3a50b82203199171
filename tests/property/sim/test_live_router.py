"""The simulator and the live router's dispatcher assign the same arrivals to the same machines."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.router import dispatcher
from splitwise.sim.run import simulate
from tests.property.sim.live import Clock, ThroughDispatcher
from tests.property.sim.test_faithful_against_naive import random_case


def compare(seed: int, **options: bool) -> tuple[int, int]:
    """Run one random case both ways; returns how many requests restarted and how many shared a machine."""
    cluster, scheduler, trace = random_case(seed, **options)
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "time", clock)
        live = ThroughDispatcher(cluster, scheduler, clock)
        columns = (trace.arrival.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
        jobs = live.run(list(zip(*columns, strict=True)))
    result = simulate(trace, cluster, scheduler=scheduler)
    for job in jobs:
        told = f"request {job.number}"
        assert bool(np.isfinite(result.last[job.number])) == job.ended, told
        assert result.restarts[job.number] == job.restarts, told
        if job.attempt:
            assert result.prompt_machine[job.number] == job.pair[0], told
            assert result.token_machine[job.number] == job.pair[1], told
        if job.ended:
            assert result.last[job.number] == pytest.approx(job.tokens_at[-1], abs=1e-9), told
    assert not live.dispatcher.sessions
    return sum(job.restarts for job in jobs), sum(job.pair[0] == job.pair[1] for job in jobs)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32 - 1))
def test_equal_assignments(seed: int) -> None:
    compare(seed, tight=seed % 2 == 0)


def test_equal_assignments_when_machines_are_lost() -> None:
    told = [compare(seed, failure=True, tight=seed % 2 == 0) for seed in range(20)]
    assert sum(restarts for restarts, _ in told) > 10
    assert sum(shared for _, shared in told) > 20
