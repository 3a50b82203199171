"""Find the best cluster of a design: most throughput in a budget, or least budget at a rate.

Two assumptions prune the search: more machines of either kind never hurt, and a cluster
that breaks its SLOs at some rate breaks them at higher ones too. Neither is a law for
simulated queues, so an optimum is reported only after it was confirmed on a longer trace
with further seeds, and its cheaper neighbours were tried as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget, Design, Size, price, sizes_within
from splitwise.provision.probe import Probe, Prober, verdicts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitwise.perf.catalog import Catalog
    from splitwise.provision.probe import Problem
    from splitwise.sim.slo import Limit

FURTHER_SEEDS = 2
LONGER = 2.0
ATTEMPTS = 40  # next best clusters (or lower rates) that are tried when one is not confirmed
FURTHER_MACHINES = 8  # how many more of either kind the next best clusters may have


@dataclass(frozen=True, slots=True)
class Answer:
    """The best cluster of one design.

    `size` is None when none meets the SLOs; `tightest` is then the nearest miss, otherwise
    the objective nearest to breaking in the confirming runs. `margin` is the share of the
    rate by which the confirmed cluster could serve more (minimum searches), or of the
    tightest limit that is left (throughput searches).
    """

    design: Design
    size: Size | None
    rate: float
    tightest: Limit | None
    margin: float
    tried: Size  # the cluster that `tightest` is of
    probes: int
    map: tuple[tuple[Size, float, bool], ...] = ()


def total(design: Design, size: Size, catalog: Catalog, budget: Budget) -> float:
    """Return what a cluster takes of a budget."""
    both = size.prompt * price(catalog.machine(design.prompt), budget)
    if design.token is not None:
        both += size.token * price(catalog.machine(design.token), budget)
    return both


def _ranked(design: Design, sizes: Sequence[Size], catalog: Catalog, budget: Budget) -> list[Size]:
    """Sort by the objective; ties by cost, power, machines, then fewer prompt machines."""
    kinds = (budget, Budget.COST, Budget.POWER, Budget.MACHINES)
    return sorted(
        sizes, key=lambda s: (*(round(total(design, s, catalog, kind), 9) for kind in kinds), s.prompt)
    )


def frontier(prompts: int, tokens: int, ask: Callable[[list[Size]], list[bool]]) -> list[Size]:
    """Return for every prompt count the fewest token machines that do, if any do.

    By monotonicity the fewest token machines never grow with the prompt count, so that the
    middle column bounds both halves. Columns of one level are bisected together.
    """
    fewest: dict[int, int] = {}
    level = [(1, prompts, 1, tokens + 1)]  # tokens + 1: not even all do
    while level:
        bounds = {(first + last) // 2: (low, high) for first, last, low, high in level}
        while open_columns := [p for p, (low, high) in bounds.items() if low < high]:
            middles = [Size(p, sum(bounds[p]) // 2) for p in open_columns]
            for size, met in zip(middles, ask(middles), strict=True):
                low, high = bounds[size.prompt]
                bounds[size.prompt] = (low, size.token) if met else (size.token + 1, high)
        fewest.update({p: low for p, (low, _) in bounds.items()})
        halves = []
        for first, last, low, high in level:
            middle = (first + last) // 2
            halves += [(first, middle - 1, fewest[middle], high), (middle + 1, last, low, fewest[middle])]
        level = [half for half in halves if half[0] <= half[1]]
    return [Size(p, t) for p, t in sorted(fewest.items()) if t <= tokens]


def smallest(
    prober: Prober, design: Design, rate: float, budget: Budget, most: Size, *, confirm: bool = True
) -> Answer:
    """Find the cluster of at most `most` machines that serves `rate` with the least of `budget`."""
    _check_rate(rate)

    def ask(sizes: list[Size]) -> list[bool]:
        return prober.ask([Probe(design, size, rate) for size in sizes])

    catalog, before = prober.problem.catalog, len(prober.answers)
    if design.token is None:
        single = frontier(1, most.prompt, lambda sizes: ask([Size(size.token) for size in sizes]))
        edge, largest = [Size(size.token) for size in single], Size(most.prompt)
    else:
        edge, largest = frontier(most.prompt, most.token, ask), most
    if not edge:
        return _missed(prober, Probe(design, largest, rate), before)
    best = _ranked(design, edge, catalog, budget)[0]
    cheaper = [size for size in _neighbours(design, best) if _less(design, size, best, catalog, budget)]
    kept = [size for size, met in zip(cheaper, ask(cheaper), strict=True) if met]
    best = _ranked(design, [best, *kept], catalog, budget)[0]
    answer = Answer(design, best, rate, None, 0.0, best, len(prober.answers) - before, _seen(prober, design))
    return _confirm_size(prober.problem, answer, edge, budget, largest) if confirm else answer


def fastest(
    prober: Prober, design: Design, budget: Budget, amount: float, *, step: float = 1.0, confirm: bool = True
) -> Answer:
    """Find the largest multiple of `step` requests per second that a cluster within `amount` serves.

    All sizes within the budget are bisected together: those that do not serve a rate that
    another serves are out.
    """
    _check_rate(step)
    catalog, before = prober.problem.catalog, len(prober.answers)
    sizes = sizes_within(design, catalog, budget, amount)
    served, broken, rate, left = 0, 0, 64, sizes
    while broken - served != 1:
        answers = prober.ask([Probe(design, size, rate * step) for size in left])
        able = [size for size, met in zip(left, answers, strict=True) if met]
        if able:
            served, left = rate, able
        else:
            broken = rate
        rate = (served + broken) // 2 if broken else 2 * served
    if not served:
        return _missed(prober, Probe(design, sizes[len(sizes) // 2], step), before)
    best = _ranked(design, left, catalog, Budget.COST)[0]
    probes = len(prober.answers) - before
    answer = Answer(design, best, served * step, None, 0.0, best, probes, _seen(prober, design))
    return _confirm_rate(prober.problem, answer, step) if confirm else answer


def _check_rate(rate: float) -> None:
    if not (rate > 0 and isfinite(rate)):
        raise ConfigError(f"rate: must be a positive number of requests per second, not {rate!r}")


def _neighbours(design: Design, size: Size) -> list[Size]:
    if design.token is None:
        return [Size(size.prompt - 1)] if size.prompt > 1 else []
    around = [
        Size(size.prompt + a, size.token + b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)
    ]
    return [near for near in around if near.prompt >= 1 and near.token >= 1]


def _less(design: Design, size: Size, than: Size, catalog: Catalog, budget: Budget) -> bool:
    return total(design, size, catalog, budget) < total(design, than, catalog, budget) - 1e-9


def _seen(prober: Prober, design: Design) -> tuple[tuple[Size, float, bool], ...]:
    return tuple((p.size, p.rate, met) for p, met in prober.answers.items() if p.design == design)


def _missed(prober: Prober, probe: Probe, before: int) -> Answer:
    judged = verdicts(prober.problem, probe)
    worst = max((verdict.worst for verdict in judged), key=lambda limit: limit.use)
    probes = len(prober.answers) - before
    return Answer(
        probe.design, None, probe.rate, worst, 1 - worst.use, probe.size, probes, _seen(prober, probe.design)
    )


def longer(problem: Problem) -> Problem:
    """Return the problem that optima are confirmed on: a longer trace, its own and further seeds."""
    load = problem.load
    seeds = load.seeds + tuple(max(load.seeds) + 1 + n for n in range(FURTHER_SEEDS))
    return replace(problem, load=replace(load, duration=load.duration * LONGER, seeds=seeds))


def _tightest(problem: Problem, probe: Probe) -> tuple[bool, Limit]:
    judged = verdicts(problem, probe)
    return all(v.met for v in judged), max((v.worst for v in judged), key=lambda limit: limit.use)


def _confirm_size(
    problem: Problem, answer: Answer, edge: Sequence[Size], budget: Budget, most: Size
) -> Answer:
    """Take the best cluster that the longer trace confirms, and measure its room above the rate."""
    hard, design = longer(problem), answer.design
    assert answer.size is not None  # noqa: S101 - callers have an optimum
    more = range(FURTHER_MACHINES + 1)
    room = {
        Size(near.prompt + a, near.token + b)
        for near in edge
        for a in more
        for b in (more if design.token is not None else (0,))
    }
    room = {s for s in room if s.prompt <= most.prompt and s.token <= most.token}
    able = [
        size
        for size in _ranked(design, list(room), problem.catalog, budget)
        if not _less(design, size, answer.size, problem.catalog, budget)
    ]
    tight: Limit | None = None
    for size in [answer.size, *(s for s in able if s != answer.size)][:ATTEMPTS]:
        met, tight = _tightest(hard, Probe(design, size, answer.rate))
        if met:
            higher = 0.0
            for percent in (2, 5, 10, 20, 40):
                if not _tightest(hard, Probe(design, size, answer.rate * (1 + percent / 100)))[0]:
                    break
                higher = percent / 100
            return replace(answer, size=size, tried=size, tightest=tight, margin=higher)
    return replace(answer, size=None, tightest=tight, margin=1 - tight.use if tight else 0.0)


def _confirm_rate(problem: Problem, answer: Answer, step: float) -> Answer:
    """Take the largest rate up to the found one that the longer trace confirms."""
    hard, rate, tight = longer(problem), answer.rate, None
    for _ in range(ATTEMPTS):
        met, tight = _tightest(hard, Probe(answer.design, answer.tried, rate))
        if met:
            return replace(answer, rate=rate, tightest=tight, margin=1 - tight.use)
        if rate <= step:
            break
        rate = max(step, rate - step * max(1, round(0.02 * rate / step)))
    return replace(answer, size=None, rate=rate, tightest=tight, margin=1 - tight.use if tight else 0.0)


def advice(answers: Sequence[Answer], catalog: Catalog, budget: Budget, *, throughput: bool) -> str:
    """Say in one sentence whether to split, and by how much."""
    able = [a for a in answers if a.size is not None]
    if not able:
        return "No cluster tried meets the SLOs; the table shows the nearest miss of each design."

    def value(answer: Answer) -> float:
        size = answer.size
        return -answer.rate if throughput or size is None else total(answer.design, size, catalog, budget)

    plain = min((a for a in able if a.design.token is None), key=value, default=None)
    split = min((a for a in able if a.design.token is not None), key=value, default=None)
    if split is None or plain is None:
        kind = "split" if plain is None else "unsplit"
        best = split or plain
        return (
            f"{best.design.name if best else ''} is best; only {kind} designs met the SLOs or were asked for."
        )
    what = "throughput" if throughput else budget.value
    if value(plain) <= value(split):
        return (
            f"Do not split: {plain.design.name} is as good as or better than the best split design, "
            f"{split.design.name} ({what} {abs(value(plain)):g} against {abs(value(split)):g})."
        )
    gain = abs(value(split) / value(plain) - 1)
    return (
        f"Split: {split.design.name} has {gain:.0%} {'more' if throughput else 'less'} {what} than the best "
        f"unsplit design, {plain.design.name}."
    )
