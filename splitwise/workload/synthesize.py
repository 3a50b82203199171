"""Make traces that look like given ones: sizes drawn jointly, arrivals at a set rate.

Prompt and output sizes are drawn *together* from the same request of the source, so that
their correlation stays (drawing them apart is one of the weaknesses of published
simulators; it is offered as ``joint=False`` for comparison with those).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from splitwise.workload.trace import Trace, TraceError

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Arrivals(Enum):
    """How requests follow one another."""

    POISSON = "poisson"
    GAMMA = "gamma"  # inter-arrival times with the source's coefficient of variation, independent
    REPLAY = "replay"  # the source's own inter-arrival times in order, scaled to the rate


@dataclass(frozen=True, slots=True)
class Seeds:
    """Two independent streams, so that one rate change leaves every request's size as it was."""

    arrivals: np.random.Generator
    sizes: np.random.Generator

    @classmethod
    def of(cls, seed: int) -> Seeds:
        """Streams of `seed`: equal seeds give common random numbers across designs."""
        first, second = np.random.SeedSequence(seed).spawn(2)
        return cls(np.random.default_rng(first), np.random.default_rng(second))


def synthesize(
    source: Trace,
    *,
    rate: float,
    duration: float,
    arrivals: Arrivals = Arrivals.POISSON,
    joint: bool = True,
    seed: int = 0,
) -> Trace:
    """Draw a trace of `duration` seconds at `rate` requests per second with `source`'s sizes.

    Raises TraceError when rate or duration is not positive, or when the source has too few
    requests to take burstiness from.
    """
    if not (rate > 0 and np.isfinite(rate)):
        raise TraceError(f"rate must be a positive number of requests per second, not {rate!r}")
    if not (duration > 0 and np.isfinite(duration)):
        raise TraceError(f"duration must be a positive number of seconds, not {duration!r}")
    if not len(source):
        raise TraceError(f"{source.name}: no requests to draw sizes from")
    seeds = Seeds.of(seed)
    times = _times(source, rate, duration, arrivals, seeds.arrivals)
    if not len(times):
        raise TraceError(f"no request arrives within {duration:g} s at {rate:g} requests per second")
    prompt = seeds.sizes.integers(0, len(source), len(times))
    output = prompt if joint else seeds.sizes.integers(0, len(source), len(times))
    return Trace(
        times,
        source.prompt_tokens[prompt],
        source.output_tokens[output],
        f"{source.name} at {rate:g}/s ({arrivals.value}, seed {seed})",
    )


def _times(
    source: Trace, rate: float, duration: float, arrivals: Arrivals, rng: np.random.Generator
) -> NDArray[np.float64]:
    if arrivals is Arrivals.REPLAY:
        return _replayed(source, rate, duration, rng)
    shape = 1.0
    if arrivals is Arrivals.GAMMA:
        variation = burstiness(source)
        if variation <= 0:
            raise TraceError(
                f"{source.name}: its requests arrive at equal distances; there is no burstiness to copy"
            )
        shape = 1.0 / variation**2
    parts: list[NDArray[np.float64]] = []
    now = 0.0
    size = int(rate * duration * 1.1) + 64
    while now < duration:
        part = now + np.cumsum(rng.gamma(shape, 1.0 / (rate * shape), size))
        now = float(part[-1])
        parts.append(part)
    times = np.concatenate(parts)
    return times[: np.searchsorted(times, duration, side="left")]


def _replayed(source: Trace, rate: float, duration: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Repeat the source's gaps from a random place on, wrapped around, scaled to the mean rate."""
    gaps = np.diff(source.arrival)
    if not len(gaps) or gaps.sum() <= 0:
        raise TraceError(
            f"{source.name}: needs at least two requests at different times to copy its arrivals"
        )
    gaps = gaps * (len(gaps) / gaps.sum() / rate)
    gaps = np.roll(gaps, -int(rng.integers(0, len(gaps))))
    rounds = int(duration * rate / len(gaps)) + 2
    times = np.cumsum(np.tile(gaps, rounds))
    while times[-1] < duration:
        times = np.concatenate((times, times[-1] + np.cumsum(gaps)))
    return times[: np.searchsorted(times, duration, side="left")]


def burstiness(source: Trace) -> float:
    """Coefficient of variation of the inter-arrival times: 1 for Poisson, more is burstier."""
    gaps = np.diff(source.arrival)
    if not len(gaps) or gaps.mean() <= 0:
        raise TraceError(
            f"{source.name}: needs at least two requests at different times to tell its burstiness"
        )
    return float(gaps.std() / gaps.mean())
