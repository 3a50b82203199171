"""The pruned search against the exhaustive one, early stops, confirmation and advice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.errors import ConfigError
from splitwise.perf.catalog import shipped
from splitwise.provision.designs import PAPER_DESIGNS, Budget, Design, Size, sizes_within
from splitwise.provision.probe import Probe, Prober, Problem, hopeless, meets, trace_of, verdicts
from splitwise.provision.search import Answer, advice, fastest, frontier, longer, smallest, total
from splitwise.provision.throughput import Load, cluster_of
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, reference_row
from splitwise.sim.run import simulate
from splitwise.sim.slo import TABLE_VI
from splitwise.workload import Trace

HH = PAPER_DESIGNS["Splitwise-HH"]
H = PAPER_DESIGNS["Baseline-H100"]
WORKLOADS = [(1500, 20), (600, 250), (3000, 60)]  # largest prompt, largest output


def problem(
    prompt: int = 1500,
    output: int = 60,
    *,
    slo: dict[str, dict[int, float]] = TABLE_VI,
    duration: float = 20.0,
) -> Problem:
    machines = [MachinesPart(home="prompt", hardware="h100-80gb", count=1)]
    config = SimulationConfig(model="llama2-70b", machines=machines, trace=TracePart(file=Path("t.csv")))
    rng = np.random.default_rng(0)
    source = Trace.of(np.arange(400), rng.integers(100, prompt, 400), rng.integers(2, output, 400))
    return Problem(config, shipped(), Load(source, duration, reference_row(config, shipped()), slo=slo))


@given(st.integers(1, 9), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=9, max_size=9))
def test_the_frontier_of_any_monotone_grid_is_found(prompts: int, tokens: int, needed: list[int]) -> None:
    needed = sorted(needed, reverse=True)  # more prompt machines never need more token machines
    asked: list[Size] = []

    def ask(sizes: list[Size]) -> list[bool]:
        asked.extend(sizes)
        return [size.token >= needed[size.prompt - 1] for size in sizes]

    expected = [Size(p, needed[p - 1]) for p in range(1, prompts + 1) if needed[p - 1] <= tokens]
    assert frontier(prompts, tokens, ask) == expected
    assert len(asked) == len(set(asked))
    assert all(size.prompt <= prompts and size.token <= tokens for size in asked)


@pytest.mark.parametrize(("prompt", "output"), WORKLOADS)
@pytest.mark.parametrize("budget", list(Budget))
def test_the_pruned_minimum_is_the_exhaustive_one(prompt: int, output: int, budget: Budget) -> None:
    given_, design = problem(prompt, output), PAPER_DESIGNS["Splitwise-HA"]
    with Prober(given_) as prober:
        answer = smallest(prober, design, 14.0, budget, Size(6, 6), confirm=False)
        asked = len(prober.answers)
    grid = [Size(p, t) for p in range(1, 7) for t in range(1, 7)]
    able = [size for size in grid if meets(given_, Probe(design, size, 14.0), stop_early=False)]
    assert able
    assert answer.size in able
    assert total(design, answer.size, shipped(), budget) == pytest.approx(
        min(total(design, size, shipped(), budget) for size in able)
    )
    assert asked < len(grid)


@pytest.mark.parametrize(("prompt", "output"), WORKLOADS)
def test_more_machines_never_hurt_on_these_workloads(prompt: int, output: int) -> None:
    given_ = problem(prompt, output)
    met = {(p, t): meets(given_, Probe(HH, Size(p, t), 14.0)) for p in range(1, 6) for t in range(1, 6)}
    for (p, t), able in met.items():
        if able:
            assert met.get((p + 1, t), True)
            assert met.get((p, t + 1), True)


@pytest.mark.parametrize(("prompt", "output"), WORKLOADS)
def test_the_pruned_throughput_is_the_exhaustive_one(prompt: int, output: int) -> None:
    given_ = problem(prompt, output)
    with Prober(given_) as prober:
        answer = fastest(prober, HH, Budget.MACHINES, 5, confirm=False)
    sizes = sizes_within(HH, shipped(), Budget.MACHINES, 5)
    rates = range(1, 80)
    first_gap = next(r for r in rates if not any(meets(given_, Probe(HH, s, float(r))) for s in sizes))
    assert answer.rate == first_gap - 1
    assert answer.size is not None
    assert meets(given_, Probe(HH, answer.size, answer.rate), stop_early=False)


def test_one_process_and_two_answer_alike() -> None:
    answers = []
    for workers in (1, 2):
        with Prober(problem(), workers) as prober:
            answers.append(smallest(prober, HH, 14.0, Budget.COST, Size(4, 4)))
    assert answers[0] == answers[1]


@pytest.mark.parametrize("rate", [5.0, 14.0, 25.0, 60.0])
def test_early_stops_change_no_answer(rate: float) -> None:
    given_ = problem()
    for size in (Size(1, 1), Size(2, 1), Size(3, 2)):
        probe = Probe(HH, size, rate)
        assert meets(given_, probe) is meets(given_, probe, stop_early=False)


def test_an_overloaded_run_is_given_up_early() -> None:
    given_ = problem()
    trace, cluster = trace_of(given_, 200.0, 0), cluster_of(HH, Size(1, 1), given_.config, given_.catalog)
    assert hopeless(simulate(trace, cluster, until=5.0), given_.load, 5.0)
    light = trace_of(given_, 2.0, 0)
    assert not hopeless(simulate(light, cluster, until=5.0), given_.load, 5.0)


def test_an_optimum_holds_on_the_longer_trace_and_its_margin_is_served() -> None:
    given_ = problem()
    hard = longer(given_)
    assert hard.load.duration == 2 * given_.load.duration
    assert hard.load.seeds == (0, 1, 2)
    for design, most in ((HH, Size(5, 5)), (H, Size(9))):
        with Prober(given_) as prober:
            answer = smallest(prober, design, 14.0, Budget.COST, most)
        assert answer.size is not None
        assert all(v.met for v in verdicts(hard, Probe(design, answer.size, 14.0 * (1 + answer.margin))))
        assert answer.tightest is not None
        assert answer.tightest.met


def test_slos_that_nothing_meets_get_the_nearest_miss() -> None:
    with Prober(problem(slo={"ttft": {50: 0.01}})) as prober:
        for answer in (
            smallest(prober, HH, 5.0, Budget.POWER, Size(3, 3)),
            smallest(prober, H, 5.0, Budget.POWER, Size(3)),
            fastest(prober, HH, Budget.MACHINES, 3),
        ):
            assert answer.size is None
            assert answer.tightest is not None
            assert answer.tightest.metric == "ttft"
            assert answer.tightest.use > 1
            told = advice([answer], shipped(), Budget.POWER, throughput=False)
            assert "No cluster tried meets the SLOs" in told


def test_advice_says_when_not_to_split() -> None:
    def answer(design: Design, size: Size, rate: float) -> Answer:
        return Answer(design, size, rate, None, 0.0, size, 1)

    plain, split = answer(H, Size(4), 10), answer(HH, Size(4, 1), 12)
    assert advice([plain, split], shipped(), Budget.COST, throughput=False).startswith("Do not split")
    assert "20% more throughput" in advice([plain, split], shipped(), Budget.COST, throughput=True)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with Prober(problem()) as prober, pytest.raises(ConfigError, match="rate"):
        smallest(prober, HH, rate, Budget.COST, Size(2, 2))
