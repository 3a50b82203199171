"""`faithful` mode equals the naive simulator on random small clusters, to 1e-9 s per request."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitwise.perf.model import Curve, PerformanceModel, stack
from splitwise.scheduling.arrays import POOL_PROMPT, POOL_TOKEN
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.sim.run import simulate
from splitwise.sim.setup import Cluster, Failure, Machine
from splitwise.workload import Trace
from tests.property.sim.naive import Job, Naive


def models(rng: np.random.Generator, number: int) -> list[PerformanceModel]:
    def model(index: int) -> PerformanceModel:
        growing = np.cumsum(rng.uniform(0.01, 0.2, 5))
        return PerformanceModel(
            "m", f"h{index}", 8,
            Curve.of([64, 128, 512, 1024, 4096], growing),
            Curve.of([64, 128, 512, 1024, 4096], growing * rng.uniform(0.7, 1.0)),
            Curve.of([1, 2, 4, 8, 16], np.cumsum(rng.uniform(0.001, 0.02, 5))),
            float(rng.uniform(1e-7, 1e-5)),
        )  # fmt: skip

    return [model(index) for index in range(number)]


def random_case(
    seed: int, *, reports: bool = False, failure: bool = False, tight: bool = False
) -> tuple[Cluster, SchedulerSettings, Trace]:
    rng = np.random.default_rng(seed)
    number = int(rng.integers(2 if failure else 1, 6))
    prompts = int(rng.integers(1, number + 1))
    kinds = int(rng.integers(1, 3))
    blocks = int(rng.integers(60, 120)) if tight else int(rng.integers(150, 2000))
    machines = tuple(
        Machine(
            f"m{index}",
            POOL_PROMPT if index < prompts else POOL_TOKEN,
            blocks,
            int(rng.integers(0, kinds)),
            float(rng.uniform(1e8, 1e10)),
            float(rng.uniform(0, 0.01)),
        )
        for index in range(number)
    )
    length = float(rng.uniform(2, 20))
    failures = ()
    if failure:
        at = float(rng.uniform(0, length))
        back = at + float(rng.uniform(0.1, 5)) if rng.random() < 0.5 else None
        failures = (Failure(int(rng.integers(0, number)), at, back),)
    cluster = Cluster(
        machines,
        stack(models(rng, kinds)),
        token_bytes=int(rng.integers(1000, 400_000)),
        layers=int(rng.integers(1, 80)),
        block_tokens=int(rng.integers(4, 17)) if not tight else 16,
        max_batch_tokens=int(rng.integers(4, 2048)),
        max_running=int(rng.integers(2, 64)),
        max_preemptions=int(rng.integers(1, 6)),
        serialized_below_tokens=int(rng.integers(0, 400)),
        hand_over_seconds=float(rng.uniform(0.0001, 0.01)),
        report_seconds=float(rng.uniform(0.05, 2.0)) if reports else 0.0,
        assumed_max_tokens=int(rng.integers(1, 200)),
        failures=failures,
    )
    policy = str(rng.choice(["jsq", "power-of-two", "round-robin", "random"]))
    hold = float(rng.uniform(0, 2))
    scheduler = SchedulerSettings(
        policy=policy,
        queue_tokens=int(rng.integers(100, 3000)),
        last_resort_tokens=int(rng.integers(3000, 9000)),
        # A report may overtake the one with the first token, and then the scheduler counts a
        # request's tokens one short for a while; the simulator does not. So no growth here.
        reserve_output_tokens=200 if reports else int(rng.integers(1, 64)),
        # How often a router ticks, and in which order it sends machines home, changes what
        # the other policies choose; without a hold there are no ticks.
        borrow_hold=hold if policy == "jsq" else 0.0,
        max_attempts=3,
    )
    count = int(rng.integers(1, 150))
    longest = min(400, cluster.largest_tokens // 3)
    trace = Trace.of(
        np.sort(rng.uniform(0, length, count)),
        rng.integers(1, longest, count),
        rng.integers(1, min(120, longest), count),
    )
    return cluster, scheduler, trace


def compare(cluster: Cluster, scheduler: SchedulerSettings, trace: Trace) -> list[Job]:
    columns = (trace.arrival.tolist(), trace.prompt_tokens.tolist(), trace.output_tokens.tolist())
    jobs = Naive(cluster, scheduler).run(list(zip(*columns, strict=True)))
    result = simulate(trace, cluster, scheduler=scheduler)
    for job in jobs:
        told = f"request {job.number}"
        at = job.tokens_at
        assert bool(np.isfinite(result.last[job.number])) == job.ended, told
        if not at:
            assert np.isnan(result.first[job.number]), told
            continue
        assert result.first[job.number] == pytest.approx(at[0], abs=1e-9), told
        assert result.start[job.number] == pytest.approx(job.start, abs=1e-9), told
        assert result.restarts[job.number] == job.restarts, told
        assert result.preemptions[job.number] == job.preempted, told
        assert job.preempted <= cluster.max_preemptions * max(1, job.attempt), told
        if job.attempt:
            assert result.prompt_machine[job.number] == job.pair[0], told
            assert result.token_machine[job.number] == job.pair[1], told
        if job.ended:
            assert len(at) == job.output, told
            assert result.last[job.number] == pytest.approx(at[-1], abs=1e-9), told
            assert result.second[job.number] == pytest.approx(at[1] if len(at) > 1 else at[0], abs=1e-9), told
            longest = max((b - a for a, b in pairwise(at)), default=0.0)
            assert result.gap[job.number] == pytest.approx(longest, abs=1e-9), told
    assert math.isfinite(result.end)
    return jobs


many = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


@pytest.mark.slow
@many
@given(seeds)
def test_equal_on_random_clusters(seed: int) -> None:
    compare(*random_case(seed))


@many
@given(seeds)
def test_equal_when_memory_is_short(seed: int) -> None:
    compare(*random_case(seed, tight=True))


@many
@given(seeds)
def test_equal_with_stale_reports(seed: int) -> None:
    compare(*random_case(seed, reports=True, tight=seed % 2 == 0))


@many
@given(seeds)
def test_equal_with_a_lost_machine(seed: int) -> None:
    compare(*random_case(seed, failure=True, tight=seed % 2 == 0))


def test_the_cases_reach_what_they_are_for() -> None:
    """Evictions, restarts and both phases on one machine do occur in these cases."""
    jobs = [
        job for seed in range(40) for job in compare(*random_case(seed, failure=seed % 3 == 0, tight=True))
    ]
    assert sum(job.preempted for job in jobs) > 50
    assert sum(job.restarts for job in jobs) > 20
    assert sum(job.pair[0] == job.pair[1] for job in jobs) > 50
    assert sum(job.ended for job in jobs) > 0.9 * len(jobs)
