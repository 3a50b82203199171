"""When a failed call is tried again: small policies that are put together.

A policy is a function from a `Failure` to the seconds to wait, or None to give up. The
client asks it only where a retry is safe: before anything of the answer was seen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from splitwise.errors import OverloadedError, RemoteError, UnavailableError


@dataclass(frozen=True, slots=True)
class Failure:
    """A call that failed: its error and how many tries there were, this one included."""

    error: RemoteError
    tries: int


RetryPolicy = Callable[[Failure], float | None]


def never(_failure: Failure) -> float | None:
    """Give up at once."""
    return None


def exponential(first_s: float, factor: float, most_s: float) -> RetryPolicy:
    """Wait `first_s`, then `factor` times as long each time, at most `most_s`."""

    def wait(failure: Failure) -> float:
        exponent = min(failure.tries - 1, 64)  # beyond, the float would overflow
        return float(min(most_s, first_s * factor**exponent))

    return wait


def jittered(inner: RetryPolicy, uniform: Callable[[float, float], float] = random.uniform) -> RetryPolicy:
    """Wait between half and all of what `inner` says, so that clients do not come in step."""

    def wait(failure: Failure) -> float | None:
        seconds = inner(failure)
        return None if seconds is None else uniform(seconds / 2, seconds)

    return wait


def no_sooner_than_told(inner: RetryPolicy) -> RetryPolicy:
    """Add to the server's ``retry-after-ms``, where it gave one, what `inner` says."""

    def wait(failure: Failure) -> float | None:
        seconds = inner(failure)
        if seconds is None or failure.error.retry_after is None:
            return seconds
        return failure.error.retry_after + seconds

    return wait


def at_most(tries: int, inner: RetryPolicy) -> RetryPolicy:
    """Give up after `tries` calls."""
    return lambda failure: inner(failure) if failure.tries < tries else None


def only_on(kinds: tuple[type[RemoteError], ...], inner: RetryPolicy) -> RetryPolicy:
    """Give up on all other errors."""
    return lambda failure: inner(failure) if isinstance(failure.error, kinds) else None


class Deadline:
    """The end of a call in time, shared by all its tries."""

    def __init__(self, timeout_s: float | None) -> None:
        self._end = None if timeout_s is None else time.monotonic() + timeout_s

    def remaining(self) -> float | None:
        """Return the seconds left (0 when it passed), or None without a deadline."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    def allows(self, wait_s: float) -> bool:
        """Say whether anything is left after waiting so long."""
        remaining = self.remaining()
        return remaining is None or wait_s < remaining


class Tries:
    """The tries of one call: counts them, and says how long to wait before the next."""

    def __init__(self, policy: RetryPolicy, deadline: Deadline) -> None:
        self._policy = policy
        self._deadline = deadline
        self._made = 0

    def start(self) -> float | None:
        """Count a try; returns the timeout that it gets."""
        self._made += 1
        return self._deadline.remaining()

    def wait_after(self, error: RemoteError) -> float:
        """Return the seconds to wait before the next try; raises `error` when there is none."""
        wait = self._policy(Failure(error, self._made))
        if wait is None or not self._deadline.allows(wait):
            raise error
        return wait


DEFAULT_RETRY: RetryPolicy = at_most(
    4,
    only_on(
        (UnavailableError, OverloadedError),
        no_sooner_than_told(jittered(exponential(first_s=0.1, factor=2, most_s=5))),
    ),
)
