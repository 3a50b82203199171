"""Find the best cluster of a design: most throughput in a budget, or least budget at a rate.

Two assumptions prune the search: more machines of either kind never hurt, and a cluster
that breaks its SLOs at some rate breaks them at higher ones too. Neither is a law for
simulated queues, so an optimum is reported only after it was confirmed on a longer trace
with further seeds, and its cheaper neighbours were tried as well.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import isfinite, log2
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.provision.designs import Bounds, Budget, Design, Size, sizes_within, total
from splitwise.provision.probe import LONGER, Probe, Prober, longer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitwise.perf.catalog import Catalog
    from splitwise.sim.slo import Limit

ATTEMPTS = 40  # next best clusters (or lower rates) that are tried when one is not confirmed
FURTHER_MACHINES = 8  # how many more of either kind the next best clusters may have
MARGINS = (2, 5, 10, 20, 40)  # per cent of the rate that a confirmed cluster is tried above it
NEAREST = 12  # clusters among which the nearest miss is looked for
RIVALS = 5  # sizes of one budget that are tried at a rate before a lower one is
MOST_REQUESTS = 4_000_000  # of one trace; a rate that needs more is no bound of a search
CONFIRMING = 4  # confirming runs that a search expects, for the estimate of its time


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
    note: str = ""  # why there is no answer when the SLOs are not the reason


def _ranked(design: Design, sizes: Sequence[Size], catalog: Catalog, budget: Budget) -> list[Size]:
    """Sort by the objective; ties by cost, power, machines, then fewer prompt machines."""
    kinds = (budget, Budget.COST, Budget.POWER, Budget.MACHINES)
    return sorted(
        sizes, key=lambda s: (*(round(total(design, s, catalog, kind), 9) for kind in kinds), s.prompt)
    )


def frontier(
    least: Size,
    most: Size,
    ask: Callable[[list[Size]], list[bool]],
    expect: Callable[[float], None] = lambda rest: None,
) -> list[Size]:
    """Return for every prompt count of a range the fewest token machines that do, if any do.

    By monotonicity the fewest token machines never grow with the prompt count, so that the
    middle column bounds both halves. Columns of one level are bisected together. `expect`
    hears how many sizes will still be asked about, if the answers lie in the middle.
    """
    fewest: dict[int, int] = {}
    level = [(least.prompt, most.prompt, least.token, most.token + 1)]  # + 1: not even all do
    while level:
        bounds = {(first + last) // 2: (low, high) for first, last, low, high in level}
        while open_columns := [p for p, (low, high) in bounds.items() if low < high]:
            halves = sum(
                2 * _questions((last - first) / 2, (bounds[middle][1] - bounds[middle][0]) / 2)
                + log2(bounds[middle][1] - bounds[middle][0] + 1)
                for first, last, *_ in level
                for middle in ((first + last) // 2,)
            )
            expect(halves)
            middles = [Size(p, sum(bounds[p]) // 2) for p in open_columns]
            for size, met in zip(middles, ask(middles), strict=True):
                low, high = bounds[size.prompt]
                bounds[size.prompt] = (low, size.token) if met else (size.token + 1, high)
        fewest.update({p: low for p, (low, _) in bounds.items()})
        level = [half for part in level for half in _halves(part, fewest) if half[0] <= half[1]]
    return [Size(p, t) for p, t in sorted(fewest.items()) if t <= most.token]


def _halves(part: tuple[int, int, int, int], fewest: dict[int, int]) -> list[tuple[int, int, int, int]]:
    first, last, low, high = part
    middle = (first + last) // 2
    return [(first, middle - 1, fewest[middle], high), (middle + 1, last, low, fewest[middle])]


def _questions(columns: float, span: float) -> float:
    """Estimate the questions that `columns` columns with `span` open answers take."""
    if columns < 1 or span < 1:
        return 0.0
    return log2(span + 1) + 2 * _questions((columns - 1) / 2, span / 2)


def smallest(
    prober: Prober, design: Design, rate: float, budget: Budget, bounds: Bounds, *, confirm: bool = True
) -> Answer:
    """Find the cluster within `bounds` that serves `rate` with the least of `budget`."""
    _check_rate(rate)
    catalog = prober.problem.catalog
    largest = bounds.largest(design, catalog)
    after = CONFIRMING * _confirming_cost(prober) if confirm else 0.0

    def ask(sizes: list[Size]) -> list[bool]:
        return prober.ask([Probe(design, size, rate) for size in sizes])

    def expect(rest: float) -> None:
        prober.expect(design, rest + after)

    served = _edge(design, bounds, ask, expect)
    edge = [size for size in served if bounds.allow(design, size, catalog)]
    if not edge:
        return _over_limits(_missed(prober, design, rate, largest), served, bounds, catalog)
    best = _ranked(design, edge, catalog, budget)[0]
    cheaper = [
        size
        for size in _neighbours(design, best)
        if bounds.ranges(design, size) and _less(design, size, best, catalog, budget)
    ]
    kept = [size for size, met in zip(cheaper, ask(cheaper), strict=True) if met]
    best = _ranked(design, [best, *kept], catalog, budget)[0]
    answer = _answer(prober, design, best, rate)
    return _confirm_size(prober, answer, edge, budget, bounds) if confirm else answer


def _edge(
    design: Design,
    bounds: Bounds,
    ask: Callable[[list[Size]], list[bool]],
    expect: Callable[[float], None],
) -> list[Size]:
    """Return the smallest clusters that serve the rate, one for each number of prompt machines."""
    if design.token is not None:
        return frontier(bounds.least, bounds.most, ask, expect)
    # One pool is one column of the same search.
    low, high = Size(1, bounds.least.prompt), Size(1, bounds.most.prompt)
    single = frontier(low, high, lambda sizes: ask([Size(size.token) for size in sizes]), expect)
    return [Size(size.token) for size in single]


def fastest(
    prober: Prober,
    design: Design,
    budget: Budget,
    amount: float,
    bounds: Bounds | None = None,
    *,
    step: float = 1.0,
    confirm: bool = True,
) -> Answer:
    """Find the largest multiple of `step` requests per second that a cluster within `amount` serves.

    All sizes within the budget are bisected together: those that do not serve a rate that
    another serves are out.
    """
    _check_rate(step)
    sizes = _sizes(design, prober.problem.catalog, budget, amount, bounds)
    served, broken, rate, left = 0, 0, 64, sizes
    while broken - served != 1:
        rounds = log2(broken - served) if broken else 7.0
        after = CONFIRMING * _confirming_cost(prober) if confirm else 0.0
        prober.expect(design, rounds * (1 + len(left)) / 2 + after)
        _check_requests(prober, design, rate * step)
        answers = prober.ask([Probe(design, size, rate * step) for size in left])
        able = [size for size, met in zip(left, answers, strict=True) if met]
        if able:
            served, left = rate, able
        else:
            broken = rate
        rate = (served + broken) // 2 if broken else 2 * served
    if not served:
        return _missed(prober, design, step, sizes)
    left = _ranked(design, left, prober.problem.catalog, Budget.COST)
    answer = _answer(prober, design, left[0], served * step)
    return _confirm_rate(prober, answer, left, step) if confirm else answer


def _sizes(
    design: Design, catalog: Catalog, budget: Budget, amount: float, bounds: Bounds | None
) -> list[Size]:
    """Return the largest clusters within a budget and, if given, within bounds."""
    if bounds is None:
        return sizes_within(design, catalog, budget, amount)
    paid = {kind: limit for kind, limit in bounds.limits.items() if kind is not budget}
    amount = min(amount, bounds.limits.get(budget, amount))
    return replace(bounds, limits={budget: amount, **paid}).largest(design, catalog)


def _check_rate(rate: float) -> None:
    if not (rate > 0 and isfinite(rate)):
        raise ConfigError(f"rate: must be a positive number of requests per second, not {rate!r}")


def _check_requests(prober: Prober, design: Design, rate: float) -> None:
    if rate * prober.problem.load.duration > MOST_REQUESTS:
        raise ConfigError(
            f"{design.name} meets these SLOs at every rate tried, up to {rate / 2:g} requests/s: they are "
            "too loose for a largest rate; tighten them or ask for a smaller budget"
        )


def _neighbours(design: Design, size: Size) -> list[Size]:
    if design.token is None:
        return [Size(size.prompt - 1)] if size.prompt > 1 else []
    around = [
        Size(size.prompt + a, size.token + b) for a in (-1, 0, 1) for b in (-1, 0, 1) if (a, b) != (0, 0)
    ]
    return [near for near in around if near.prompt >= 1 and near.token >= 1]


def _less(design: Design, size: Size, than: Size, catalog: Catalog, budget: Budget) -> bool:
    return total(design, size, catalog, budget) < total(design, than, catalog, budget) - 1e-9


def _answer(prober: Prober, design: Design, size: Size, rate: float) -> Answer:
    asked = prober.asked(design)
    seen = tuple((probe.size, probe.rate, met) for probe, met in asked)
    return Answer(design, size, rate, None, 0.0, size, len(asked), seen)


def _missed(prober: Prober, design: Design, rate: float, sizes: Sequence[Size]) -> Answer:
    """Return the nearest miss among the largest clusters, some of them if there are many."""
    sizes = [size for size in sizes if not any(_within(size, other) for other in sizes)]
    every = max(1, -(-len(sizes) // NEAREST))
    tried = sizes[every // 2 :: every]
    prober.expect(design, float(len(tried)))
    misses = []
    for size in tried:
        judged = prober.judge(Probe(design, size, rate))
        misses.append((max((v.worst for v in judged), key=lambda limit: limit.use), size))
    worst, size = min(misses, key=lambda miss: miss[0].use)
    found = _answer(prober, design, size, rate)
    return replace(found, size=None, tightest=worst, margin=1 - worst.use)


def _within(size: Size, other: Size) -> bool:
    """Whether another cluster has all that this one has, and more."""
    return size != other and size.prompt <= other.prompt and size.token <= other.token


def _over_limits(missed: Answer, served: Sequence[Size], bounds: Bounds, catalog: Catalog) -> Answer:
    """Say which limit, or which range, leaves no cluster that serves the rate."""
    design = missed.design
    if not served:
        tokens = "" if design.token is None else f"+{bounds.most.token}"
        return replace(
            missed,
            note=f"{design.name}: no cluster of up to {bounds.most.prompt}{tokens} machines serves it "
            "within the SLOs; more may (--largest)",
        )
    told = []
    for kind, amount in bounds.limits.items():
        needed = min(total(design, size, catalog, kind) for size in served)
        if needed > amount:
            told.append(f"{needed:g} of {kind.value} against the limit of {amount:g}")
    what = " and ".join(told) or "more of one limit wherever another is kept"
    return replace(missed, note=f"{design.name} serves it, but takes at least {what}")


def _confirming_cost(prober: Prober) -> float:
    """Return what one confirming run costs, in clusters simulated."""
    return LONGER * len(longer(prober.problem).load.seeds) / len(prober.problem.load.seeds)


def _confirmed(prober: Prober, probe: Probe) -> tuple[bool, Limit]:
    judged = prober.judge(probe, confirming=True)
    return all(v.met for v in judged), max((v.worst for v in judged), key=lambda limit: limit.use)


def _confirm_size(
    prober: Prober, answer: Answer, edge: Sequence[Size], budget: Budget, bounds: Bounds
) -> Answer:
    """Take the best cluster that the longer trace confirms, and measure its room above the rate."""
    design, catalog, first = answer.design, prober.problem.catalog, answer.tried
    tight: Limit | None = None
    prober.expect(design, CONFIRMING * _confirming_cost(prober))
    for size in [first, *_next_best(answer, edge, catalog, budget, bounds)][:ATTEMPTS]:
        met, tight = _confirmed(prober, Probe(design, size, answer.rate))
        if not met:
            continue
        higher = 0.0
        for percent in MARGINS:
            if not _confirmed(prober, Probe(design, size, answer.rate * (1 + percent / 100)))[0]:
                break
            higher = percent / 100
        return replace(answer, size=size, tried=size, tightest=tight, margin=higher)
    return replace(answer, size=None, tightest=tight, margin=1 - tight.use if tight else 0.0)


def _next_best(
    answer: Answer, edge: Sequence[Size], catalog: Catalog, budget: Budget, bounds: Bounds
) -> list[Size]:
    """Return what is tried, best first, when the optimum is not confirmed: a little larger clusters."""
    design = answer.design
    more = range(FURTHER_MACHINES + 1)
    room = {
        Size(near.prompt + a, near.token + b)
        for near in edge
        for a in more
        for b in (more if design.token is not None else (0,))
    }
    able = [
        size
        for size in room - {answer.tried}
        if bounds.allow(design, size, catalog) and not _less(design, size, answer.tried, catalog, budget)
    ]
    return _ranked(design, able, catalog, budget)


def _confirm_rate(prober: Prober, answer: Answer, rivals: Sequence[Size], step: float) -> Answer:
    """Take the largest rate up to the found one that the longer trace confirms for one of `rivals`."""
    design, rate = answer.design, answer.rate
    for _ in range(ATTEMPTS):
        prober.expect(design, CONFIRMING * _confirming_cost(prober))
        misses = []
        for size in rivals[:RIVALS]:
            met, tight = _confirmed(prober, Probe(design, size, rate))
            if met:
                return replace(answer, size=size, tried=size, rate=rate, tightest=tight, margin=1 - tight.use)
            misses.append((tight, size))
        nearest, tried = min(misses, key=lambda miss: miss[0].use)
        if rate <= step:
            break
        rate = max(step, rate - step * max(1, round(0.02 * rate / step)))
    return replace(answer, size=None, tried=tried, rate=rate, tightest=nearest, margin=1 - nearest.use)


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
