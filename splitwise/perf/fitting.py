"""Fit a performance model to profile points, and say how wrong it is on points it has not seen.

Prompt curves take the median of the repeats at each measured size; token times are a
fit, least in mean relative error, of one base time per batch size and one common cost
per token of context. Runs that cannot be true (a larger batch in less than half the time
of a smaller one: it did not fit and was cut short) are left out and named.
"""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import log
from statistics import fmean, median
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from splitwise.perf import kernels
from splitwise.perf.model import CompatTable, Curve, PerformanceModel, PerformanceModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from numpy.typing import NDArray

    from splitwise.perf.profiles import ProfilePoint

K = TypeVar("K")
COLLAPSE = 0.5  # a bigger batch in less than this share of a smaller one's time is no measurement
REPEAT_NOISE = 0.01  # relative; repeats of one run differ by about so much
JUMP = 0.05  # token times that differ by more at about the same context are of two minds
GAP = 2.0  # batch sizes further apart than doubling leave a gap that is named
SAME_OUTPUT = 1.25  # runs whose output lengths differ by a smaller factor belong to one sweep


@dataclass(frozen=True, slots=True)
class PhaseError:
    """Mean absolute percentage error on held-out points, over several splits."""

    mean: float
    worst_split: float
    worst_point: float
    repeat_noise: float  # error of the repeats' own median: no model can be better


@dataclass(frozen=True, slots=True)
class FitReport:
    """How good a fit is, and what it does not rest on."""

    name: str
    points: int
    splits: int
    prompt: PhaseError
    token: PhaseError | None  # None: no token times were measured
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    extrapolated: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as text."""

        def phase(name: str, error: PhaseError) -> str:
            return (
                f"  {name}: held-out error {error.mean:.2f} % (worst split {error.worst_split:.2f} %, "
                f"worst point {error.worst_point:.1f} %; repeats alone differ by {error.repeat_noise:.2f} %)"
            )

        text = [f"{self.name}: {self.points} points, {self.splits} splits of 80:20"]
        text.append(phase("prompt", self.prompt))
        text.append("  token: not measured" if self.token is None else phase("token", self.token))
        text += [f"  left out: {line}" for line in self.left_out]
        text += [f"  warning: {line}" for line in self.warnings]
        text += [f"  extrapolated: {line}" for line in self.extrapolated]
        return text


@dataclass(slots=True)
class _Prepared:
    points: list[ProfilePoint]
    left_out: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def fit(points: Sequence[ProfilePoint], *, source: str = "") -> PerformanceModel:
    """Fit one model; all points must be of one (model, hardware, tensor parallel size)."""
    prepared = _prepare(points)
    return _fit(prepared.points, source)


def groups(points: Iterable[ProfilePoint]) -> dict[tuple[str, str, int], list[ProfilePoint]]:
    """Return the points by what one model is fitted for."""
    found: dict[tuple[str, str, int], list[ProfilePoint]] = defaultdict(list)
    for point in points:
        found[point.key].append(point)
    return dict(sorted(found.items()))


def report(points: Sequence[ProfilePoint], *, splits: int = 20, seed: int = 0) -> FitReport:
    """Fit on 80 % of the points and compare with the rest, `splits` times."""
    prepared = _prepare(points)
    model = _fit(prepared.points, "")
    prompt: list[list[float]] = []
    token: list[list[float]] = []
    for split in range(splits):
        shuffled = list(prepared.points)
        random.Random(seed * 1_000_003 + split).shuffle(shuffled)  # noqa: S311 - which points, no secret
        cut = max(1, len(shuffled) // 5)
        held, kept = shuffled[:cut], shuffled[cut:]
        trained = _fit(kept, "")
        prompt.append([_prompt_error(trained, p) for p in held])
        errors = [_token_error(trained, p) for p in held if p.token_seconds > 0.0]
        if errors:
            token.append(errors)
    measured = [p for p in prepared.points if p.token_seconds > 0.0]
    return FitReport(
        name=model.name,
        points=len(prepared.points),
        splits=splits,
        prompt=_summary(prompt, _noise(prepared.points, lambda p: p.prompt_seconds)),
        token=_summary(token, _noise(measured, lambda p: p.token_seconds)) if token else None,
        left_out=tuple(prepared.left_out),
        warnings=tuple(prepared.warnings),
        extrapolated=tuple(_beyond(model)),
    )


def compat_table(points: Sequence[ProfilePoint]) -> CompatTable:
    """Return the tables of the authors' simulator: medians by the batch's prompt tokens, as it keeps them."""
    prompt: dict[int, list[float]] = defaultdict(list)
    token: dict[int, list[float]] = defaultdict(list)
    for point in points:
        prompt[point.total_prompt].append(point.prompt_seconds)
        token[point.total_prompt].append(point.token_seconds)
    x = sorted(prompt)
    return CompatTable(
        Curve.of(x, [median(prompt[size]) for size in x]), Curve.of(x, [median(token[size]) for size in x])
    )


# ---- inside


def _prepare(points: Sequence[ProfilePoint]) -> _Prepared:
    """Check that the points can carry a model; leave out what cannot be true."""
    if not points:
        raise PerformanceModelError("the profile is empty: there is nothing to fit")
    keys = {point.key for point in points}
    if len(keys) > 1:
        raise PerformanceModelError(f"points of {len(keys)} models or machines in one fit: {sorted(keys)}")
    name = "{}|{}|tp{}".format(*points[0].key)
    single = {p.prompt_tokens for p in points if p.batch == 1}
    if len(single) < 2:
        raise PerformanceModelError(
            f"{name}: prompt times at batch 1 for {len(single)} prompt sizes; at least 2 are needed "
            "(missing: batch 1 with other prompt sizes)"
        )
    batches = {p.batch for p in points if p.token_seconds > 0.0}
    if batches and 1 not in batches:
        raise PerformanceModelError(f"{name}: no token times at batch 1 (measured: {sorted(batches)})")
    prepared = _Prepared([])
    collapsed = _collapsed(points)
    for point in points:
        if (point.prompt_tokens, point.batch) not in collapsed:
            prepared.points.append(point)
    for tokens, batch in sorted(collapsed):
        prepared.left_out.append(
            f"{batch} x {tokens} prompt tokens took less than half the time of a smaller batch: "
            "it did not fit in memory"
        )
    if len(batches) < 2:
        prepared.warnings.append("token times at one batch size only: taken not to depend on the batch")
    if len({p.batch for p in prepared.points}) < 2:
        prepared.warnings.append(
            "no prompts in batches: many short ones are taken to cost what one long one does"
        )
    _keep_one_sweep(prepared)
    prepared.warnings += [
        f"token times at batch {batch} {told}: measured under two conditions? The fit goes between them"
        for batch, told in _jumps(prepared.points).items()
    ]
    if len(prepared.points) < 10:
        prepared.warnings.append(f"only {len(prepared.points)} points: held-out errors say little")
    return prepared


def _collapsed(points: Sequence[ProfilePoint]) -> set[tuple[int, int]]:
    """Return the (prompt tokens, batch) whose median prompt time fell far below a smaller batch's."""
    medians: dict[int, dict[int, float]] = defaultdict(dict)
    for (tokens, batch), group in _by(points, lambda p: (p.prompt_tokens, p.batch)).items():
        medians[tokens][batch] = median(p.prompt_seconds for p in group)
    found = set()
    for tokens, by_batch in medians.items():
        longest = 0.0
        for batch in sorted(by_batch):
            if by_batch[batch] < COLLAPSE * longest:
                found.add((tokens, batch))
            longest = max(longest, by_batch[batch])
    return found


def _keep_one_sweep(prepared: _Prepared) -> None:
    """Where two sweeps of a batch size disagree, take token times from the one that spans the sizes.

    A model of batch and context cannot follow both, and going between them bends the cost
    of context, which is fitted over all batch sizes together. Runs over many prompt and
    batch sizes share one output length; those of a sweep over output lengths do not.
    """
    jumps = _jumps(prepared.points)
    outputs = {(p.prompt_tokens, p.batch): p.output_tokens for p in prepared.points if p.token_seconds > 0.0}
    common = median(outputs.values()) if outputs else 0.0
    for batch, told in jumps.items():
        group = [p for p in prepared.points if p.batch == batch and p.token_seconds > 0.0]
        others = [p for p in group if not 1 / SAME_OUTPUT < p.output_tokens / common < SAME_OUTPUT]
        kept = [p for p in group if p not in others]
        if not others or len({p.prompt_tokens for p in kept}) < 2 or _jumps(kept) or _jumps(others):
            continue  # it is not the sweeps that disagree
        out = set(others)
        prepared.points = [replace(p, token_seconds=0.0) if p in out else p for p in prepared.points]
        prepared.left_out.append(
            f"token times of {len(others)} runs at batch {batch} with other than about {common:.0f} output "
            f"tokens, because they {told} against the runs that span the sizes: measured under two conditions"
        )


def _jumps(points: Sequence[ProfilePoint]) -> dict[int, str]:
    """Name batch sizes whose token time jumps between nearly equal contexts: no smooth model fits both."""
    found = {}
    measured = [p for p in points if p.token_seconds > 0.0]
    for batch, group in sorted(_by(measured, lambda p: p.batch).items()):
        by_context = _medians((p.mean_context, p.token_seconds) for p in group)
        worst = JUMP
        for low, high in pairwise(sorted(by_context)):
            gap = abs(by_context[high] - by_context[low]) / by_context[low]
            if high < 1.1 * low and gap > worst:
                worst = gap
                found[batch] = (
                    f"jump by {100 * gap:.0f} % between contexts of {low:.0f} and {high:.0f} tokens"
                )
    return found


def _fit(points: Sequence[ProfilePoint], source: str) -> PerformanceModel:
    model, hardware, tensor_parallel = points[0].key
    unit = _many_unit(points)
    single = _medians((p.prompt_tokens, p.prompt_seconds) for p in points if p.batch == 1)
    many = _medians(
        (p.total_prompt, p.prompt_seconds) for p in points if p.batch > 1 and p.prompt_tokens == unit
    )
    # Up to one unit there is no difference between the curves.
    many = {x: y for x, y in single.items() if x <= unit} | many if many else dict(single)
    token, context_seconds = _fit_token(points)
    contexts = [p.mean_context for p in points if p.token_seconds > 0.0]
    return PerformanceModel(
        model=model,
        hardware=hardware,
        tensor_parallel=tensor_parallel,
        prompt_single=_curve(single),
        prompt_many=_curve(many),
        token=_curve(token),
        context_seconds=context_seconds,
        many_unit=float(unit),
        source=source,
        measured={
            "prompt_tokens": (float(min(single)), float(max(max(single), *many))),
            "sequences": (float(min(token)), float(max(token))),
            "context": (min(contexts, default=0.0), max(contexts, default=0.0)),
        },
    )


def _many_unit(points: Sequence[ProfilePoint]) -> int:
    """Return the prompt size that most batched runs used."""
    sizes = [p.prompt_tokens for p in points if p.batch > 1]
    return max(sorted(set(sizes)), key=sizes.count) if sizes else max(p.prompt_tokens for p in points)


def _fit_token(points: Sequence[ProfilePoint]) -> tuple[dict[float, float], float]:
    """Return base seconds by batch size and the seconds per token of context."""
    measured = [p for p in points if p.token_seconds > 0.0]
    if not measured:
        # One token costs at least one pass over the weights, which the shortest prompt costs too.
        return {1.0: min(p.prompt_seconds for p in points if p.batch == 1)}, 0.0
    batches = sorted({p.batch for p in measured})
    column = {batch: index for index, batch in enumerate(batches)}
    rows = np.zeros((len(measured), len(batches) + 1))
    for row, point in enumerate(measured):
        rows[row, column[point.batch]] = 1.0 / point.token_seconds
        rows[row, -1] = point.mean_context / point.token_seconds
    solution = _least_error(rows)
    context_seconds = float(solution[-1])
    if context_seconds < 0.0 or any(value <= 0.0 for value in solution[:-1]):
        # Noise outweighs the context's cost: leave it out.
        by_batch = _by(measured, lambda p: p.batch)
        return {float(b): median(p.token_seconds for p in by_batch[b]) for b in batches}, 0.0
    return {float(batch): float(solution[column[batch]]) for batch in batches}, context_seconds


def _least_error(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return x that brings ``rows @ x`` closest to 1: errors above the repeats' noise count linearly."""
    scale = np.abs(rows).max(axis=0)
    scaled, weights = rows / scale, np.ones(len(rows))
    solution = np.zeros(rows.shape[1])
    for _ in range(30):
        root = np.sqrt(weights)
        solution = np.linalg.lstsq(scaled * root[:, None], root, rcond=None)[0]
        weights = 1.0 / np.maximum(np.abs(scaled @ solution - 1.0), REPEAT_NOISE)
    return np.asarray(solution / scale)


def _curve(values: Mapping[float, float]) -> Curve:
    """Build a curve; of more than `kernels.KNOTS` sizes keep the ends and the most even spread between."""
    x = sorted(values)
    while len(x) > kernels.KNOTS:
        gaps = [log(x[i + 1] / x[i - 1]) for i in range(1, len(x) - 1)]
        del x[1 + gaps.index(min(gaps))]
    return Curve.of(x, [values[size] for size in x])


def _medians(pairs: Iterable[tuple[float, float]]) -> dict[float, float]:
    found: dict[float, list[float]] = defaultdict(list)
    for x, y in pairs:
        found[x].append(y)
    return {x: median(ys) for x, ys in found.items()}


def _by(points: Iterable[ProfilePoint], key: Callable[[ProfilePoint], K]) -> dict[K, list[ProfilePoint]]:
    found: dict[K, list[ProfilePoint]] = defaultdict(list)
    for point in points:
        found[key(point)].append(point)
    return found


def _prompt_error(model: PerformanceModel, point: ProfilePoint) -> float:
    predicted = model.prompt_seconds(point.total_prompt, point.batch)
    return 100.0 * abs(predicted - point.prompt_seconds) / point.prompt_seconds


def _token_error(model: PerformanceModel, point: ProfilePoint) -> float:
    predicted = model.token_seconds(point.batch, point.mean_context)
    return 100.0 * abs(predicted - point.token_seconds) / point.token_seconds


def _summary(splits: list[list[float]], noise: float) -> PhaseError:
    means = [fmean(errors) for errors in splits]
    return PhaseError(fmean(means), max(means), max(map(max, splits)), noise)


def _noise(points: Sequence[ProfilePoint], value: Callable[[ProfilePoint], float]) -> float:
    errors = []
    for group in _by(points, lambda p: (p.prompt_tokens, p.batch, round(p.output_tokens))).values():
        middle = median(map(value, group))
        errors += [100.0 * abs(value(p) - middle) / value(p) for p in group]
    return fmean(errors)


def _beyond(model: PerformanceModel) -> list[str]:
    names = {"prompt_tokens": "prompt tokens", "sequences": "sequences in the token phase"}
    names["context"] = "tokens of context in the batch"
    outside = [
        f"everything outside {low:g} to {high:g} {names[name]}"
        for name, (low, high) in model.measured.items()
    ]
    gaps = [
        f"batches between {low:g} and {high:g} sequences: a straight line, none of them was measured"
        for low, high in pairwise(model.token.x)
        if high > GAP * low
    ]
    return outside + gaps


def with_compat(model: PerformanceModel, points: Sequence[ProfilePoint]) -> PerformanceModel:
    """Return the model with the authors' tables added, built from all points as published."""
    return replace(model, compat=compat_table(points))
