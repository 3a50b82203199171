"""The pruned search against the exhaustive one, early stops, confirmation and advice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.errors import ConfigError
from splitwise.perf.catalog import shipped
from splitwise.provision import search
from splitwise.provision.designs import PAPER_DESIGNS, Bounds, Budget, Design, Size, sizes_within, total
from splitwise.provision.probe import Probe, Prober, Problem, hopeless, longer, meets, run_probe, trace_of
from splitwise.provision.search import Answer, advice, fastest, frontier, smallest
from splitwise.provision.throughput import Load, cluster_of
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, reference_row
from splitwise.sim.run import simulate
from splitwise.sim.slo import TABLE_VI
from splitwise.sim.workers import LocalWorkers
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
    assert frontier(Size(1, 1), Size(prompts, tokens), ask) == expected
    assert len(asked) == len(set(asked))
    assert all(size.prompt <= prompts and size.token <= tokens for size in asked)


@pytest.mark.parametrize(("prompt", "output"), WORKLOADS)
@pytest.mark.parametrize("budget", list(Budget))
def test_the_pruned_minimum_is_the_exhaustive_one(prompt: int, output: int, budget: Budget) -> None:
    given_, design = problem(prompt, output), PAPER_DESIGNS["Splitwise-HA"]
    prober = Prober(given_)
    answer = smallest(prober, design, 14.0, budget, Bounds(Size(6, 6)), confirm=False)
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
    answer = fastest(Prober(given_), HH, Budget.MACHINES, 5, confirm=False)
    sizes = sizes_within(HH, shipped(), Budget.MACHINES, 5)
    rates = range(1, 80)
    first_gap = next(r for r in rates if not any(meets(given_, Probe(HH, s, float(r))) for s in sizes))
    assert answer.rate == first_gap - 1
    assert answer.size is not None
    assert meets(given_, Probe(HH, answer.size, answer.rate), stop_early=False)


def test_one_process_and_two_answer_alike() -> None:
    answers = []
    for processes in (1, 2):
        with LocalWorkers(problem(), processes) as workers:
            prober = Prober(problem(), workers)
            answers.append(smallest(prober, HH, 14.0, Budget.COST, Bounds(Size(4, 4))))
    assert answers[0] == answers[1]


def test_a_design_without_token_machines_is_not_split() -> None:
    given_ = problem()
    plain = run_probe(given_, Probe(H, Size(4), 14.0), 0)
    split = run_probe(given_, Probe(HH, Size(3, 1), 14.0), 0)
    assert (plain.prompt_machine == plain.token_machine).all()
    assert len(set(plain.prompt_machine.tolist())) == 4
    assert (split.prompt_machine != split.token_machine).mean() > 0.9
    assert plain.unfinished == 0


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
        prober = Prober(given_)
        answer = smallest(prober, design, 14.0, Budget.COST, Bounds(most))
        assert answer.size is not None
        higher = Probe(design, answer.size, 14.0 * (1 + answer.margin))
        assert all(verdict.met for verdict in prober.judge(higher, confirming=True))
        assert answer.tightest is not None
        assert answer.tightest.met


def test_slos_that_nothing_meets_get_the_nearest_miss() -> None:
    prober = Prober(problem(slo={"ttft": {50: 0.01}}))
    for answer in (
        smallest(prober, HH, 5.0, Budget.POWER, Bounds(Size(3, 3))),
        smallest(prober, H, 5.0, Budget.POWER, Bounds(Size(3))),
        fastest(prober, HH, Budget.MACHINES, 3),
    ):
        assert answer.size is None
        assert answer.tightest is not None
        assert answer.tightest.metric == "ttft"
        assert answer.tightest.use > 1
        assert ("of up to 3" in answer.note) is (answer.rate == 5.0)
        told = advice([answer], shipped(), Budget.POWER, throughput=False)
        assert "No cluster tried meets the SLOs" in told


def test_a_limit_excludes_clusters_and_says_so() -> None:
    prober = Prober(problem())
    free = smallest(prober, HH, 14.0, Budget.COST, Bounds(Size(5, 5)), confirm=False)
    assert free.size is not None
    needed = total(HH, free.size, shipped(), Budget.POWER)
    kept = Bounds(Size(5, 5), limits={Budget.POWER: needed})
    assert smallest(prober, HH, 14.0, Budget.COST, kept, confirm=False).size == free.size
    short = Bounds(Size(5, 5), limits={Budget.POWER: needed - 1})
    missed = smallest(prober, HH, 14.0, Budget.POWER, short)
    assert missed.size is None
    assert total(HH, missed.tried, shipped(), Budget.POWER) <= needed - 1
    assert f"takes at least {needed:g} of power against the limit of {needed - 1:g}" in missed.note
    with pytest.raises(ConfigError, match="1 of cost does not pay for the smallest cluster"):
        smallest(prober, HH, 14.0, Budget.COST, Bounds(Size(5, 5), limits={Budget.COST: 1}))


def test_a_range_of_machines_is_kept_to() -> None:
    prober = Prober(problem())
    bounds = Bounds(Size(5, 5), least=Size(2, 3))
    answer = smallest(prober, HH, 14.0, Budget.COST, bounds)
    assert answer.size is not None
    assert all(bounds.ranges(HH, probe.size) for probe in prober.answers)


def test_a_budget_keeps_to_a_second_limit() -> None:
    prober = Prober(problem())
    bounds = Bounds(Size(9, 9), limits={Budget.COST: 38 * 3})
    answer = fastest(prober, HH, Budget.MACHINES, 6, bounds, confirm=False)
    assert answer.size is not None
    assert answer.size.machines == 3
    both = fastest(Prober(problem()), HH, Budget.MACHINES, 3, confirm=False)
    assert (answer.size, answer.rate) == (both.size, both.rate)


def test_slos_that_any_rate_meets_end_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MOST_REQUESTS", 100)  # 50 requests/s for 2 seconds
    with pytest.raises(ConfigError, match="too loose"):
        fastest(Prober(problem(slo={"ttft": {50: 1e12}}, duration=2.0)), HH, Budget.MACHINES, 2)


def test_the_watch_hears_of_every_cluster_and_of_the_end() -> None:
    told: list[tuple[float, float]] = []
    prober = Prober(problem(), watch=lambda design, done, rest: told.append((done, rest)))
    smallest(prober, HH, 14.0, Budget.COST, Bounds(Size(5, 5)))
    done = [clusters for clusters, _ in told]
    assert done == sorted(done)
    assert done[-1] >= len(prober.answers)
    # The estimate is of the right size: half way through, what is left is not far from the half.
    half = min(range(len(told)), key=lambda place: abs(done[place] - done[-1] / 2))
    assert 0.1 * done[-1] < told[half][1] < 2 * done[-1]


def test_advice_says_when_not_to_split() -> None:
    def answer(design: Design, size: Size, rate: float) -> Answer:
        return Answer(design, size, rate, None, 0.0, size, 1)

    plain, split = answer(H, Size(4), 10), answer(HH, Size(4, 1), 12)
    assert advice([plain, split], shipped(), Budget.COST, throughput=False).startswith("Do not split")
    assert "20% more throughput" in advice([plain, split], shipped(), Budget.COST, throughput=True)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(rate: float) -> None:
    with pytest.raises(ConfigError, match="rate"):
        smallest(Prober(problem()), HH, rate, Budget.COST, Bounds(Size(2, 2)))
