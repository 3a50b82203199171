"""Sum a trace up: sizes, rate, burstiness, in memory that does not grow with its length."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from splitwise.workload.trace import Trace

PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Token counts of one kind: mean and percentiles (nearest rank, so each one occurs)."""

    mean: float
    p50: int
    p90: int
    p99: int
    max: int


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace holds. `cv` is the inter-arrival coefficient of variation (Poisson: 1)."""

    requests: int
    duration_s: float
    rate: float
    cv: float
    peak_rate_1s: int
    prompt: Sizes
    output: Sizes
    correlation: float

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


@dataclass(slots=True)
class _Counts:
    """Exact counts per size; grows with the largest size, not with the number of requests."""

    counts: NDArray[np.int64] = field(default_factory=lambda: np.zeros(1, np.int64))

    def add(self, values: NDArray[np.int32]) -> None:
        found = np.bincount(values)
        if len(found) > len(self.counts):
            self.counts = np.concatenate((self.counts, np.zeros(len(found) - len(self.counts), np.int64)))
        self.counts[: len(found)] += found

    def sizes(self) -> Sizes:
        below = np.cumsum(self.counts)
        total = int(below[-1])
        ranks = [int(np.searchsorted(below, -(-total * p // 100))) for p in PERCENTILES]
        mean = float(np.dot(self.counts, np.arange(len(self.counts))) / total)
        return Sizes(mean, *ranks)


class _Gaps:
    """Mean and variance of the inter-arrival times over chunks, and the busiest second."""

    def __init__(self) -> None:
        self.first = 0.0
        self.last = 0.0
        self.number = 0
        self.squares = 0.0
        self.second = -1
        self.in_second = 0
        self.peak = 0

    def add(self, arrival: NDArray[np.float64]) -> None:
        if not self.number:
            self.first = self.last = float(arrival[0])
        gaps = np.diff(arrival, prepend=self.last)
        self.squares += float(np.dot(gaps, gaps))
        self.number += len(arrival)
        self.last = float(arrival[-1])
        seconds, counts = np.unique(np.floor(arrival - self.first).astype(np.int64), return_counts=True)
        if seconds[0] == self.second:
            counts[0] += self.in_second
        self.peak = max(self.peak, int(counts.max()))
        self.second, self.in_second = int(seconds[-1]), int(counts[-1])

    @property
    def duration(self) -> float:
        return self.last - self.first

    def cv(self) -> float:
        gaps = self.number - 1
        if gaps < 1 or self.duration <= 0:
            return 0.0
        mean = self.duration / gaps
        return float(np.sqrt(max(self.squares / gaps - mean * mean, 0.0)) / mean)


def describe(trace: Trace) -> Summary:
    """Sum up a trace that is in memory."""
    return describe_chunks([trace])


def describe_chunks(chunks: Iterable[Trace]) -> Summary:
    """Sum up a trace that comes in chunks, without keeping them."""
    prompt, output, gaps = _Counts(), _Counts(), _Gaps()
    products = 0.0
    squares = np.zeros(2)
    for chunk in chunks:
        prompt.add(chunk.prompt_tokens)
        output.add(chunk.output_tokens)
        gaps.add(chunk.arrival)
        x, y = chunk.prompt_tokens.astype(np.float64), chunk.output_tokens.astype(np.float64)
        products += float(np.dot(x, y))
        squares += np.array([np.dot(x, x), np.dot(y, y)])
    sizes = prompt.sizes(), output.sizes()
    return Summary(
        requests=gaps.number,
        duration_s=gaps.duration,
        rate=(gaps.number - 1) / gaps.duration if gaps.duration > 0 else 0.0,
        cv=gaps.cv(),
        peak_rate_1s=gaps.peak,
        prompt=sizes[0],
        output=sizes[1],
        correlation=_correlation(gaps.number, products, squares, sizes),
    )


def _correlation(
    number: int, products: float, squares: NDArray[np.float64], sizes: tuple[Sizes, Sizes]
) -> float:
    means = np.array([sizes[0].mean, sizes[1].mean])
    spread = np.maximum(squares / number - means**2, 0.0)
    if spread.min() <= 0:
        return 0.0
    return float((products / number - means[0] * means[1]) / np.sqrt(spread[0] * spread[1]))
