"""A request's times as the client sees them: queueing counts, gaps are between deliveries.

Definitions as in the Splitwise paper (section II): TTFT from arrival to first token, TBT
between tokens, E2E from arrival to last. The second token has a figure of its own because
the hand-over shows there and an average would hide it.
"""

from __future__ import annotations

from splitwise.rpc.v1.router_pb2 import Timing


class RequestTiming:
    """Moments of one request, all in seconds of one monotonic clock."""

    def __init__(self, arrived: float) -> None:
        self.arrived = arrived
        self._assigned: float | None = None
        self._first: float | None = None
        self._second: float | None = None
        self._last: float | None = None
        self._later_gap_max = 0.0
        self._count = 0

    def assigned(self, now: float) -> None:
        """Note the first assignment; later ones are restarts."""
        if self._assigned is None:
            self._assigned = now

    def tokens(self, count: int, now: float) -> None:
        """Note `count` tokens that arrived together."""
        if count < 1:
            return
        if self._last is not None and self._second is not None:
            self._later_gap_max = max(self._later_gap_max, now - self._last)
        if self._first is None:
            self._first = now
            count -= 1
            self._count += 1
        if count and self._second is None:
            self._second = now
        self._count += count
        self._last = now

    @property
    def ttft(self) -> float | None:
        """Arrival to first token in seconds."""
        return None if self._first is None else self._first - self.arrived

    @property
    def second(self) -> float | None:
        """First to second token in seconds."""
        return None if self._first is None or self._second is None else self._second - self._first

    @property
    def queued(self) -> float | None:
        """Arrival to assignment in seconds."""
        return None if self._assigned is None else self._assigned - self.arrived

    @property
    def tbt_mean(self) -> float | None:
        """Mean gap between tokens after the second in seconds."""
        if self._second is None or self._last is None or self._count < 3:
            return None
        return (self._last - self._second) / (self._count - 2)

    def report(self, now: float) -> Timing:
        """Return all figures in microseconds, 0 where there is none."""
        return Timing(
            queued_us=_us(self.queued),
            ttft_us=_us(self.ttft),
            second_us=_us(self.second),
            tbt_mean_us=_us(self.tbt_mean),
            tbt_max_us=_us(self._later_gap_max),
            e2e_us=_us(now - self.arrived),
        )


def _us(seconds: float | None) -> int:
    return 0 if seconds is None else max(0, round(seconds * 1e6))
