"""The scheduler's own bounded queues: first come, first served, per model.

Strict order, no overtaking: a large request at the head cannot be starved by small ones
behind it. A restarted request keeps the place that its arrival gave it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.scheduling.requests import Request


class WaitingLine:
    """Requests of one model that wait for a machine, in order of arrival."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._requests: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Request]:
        return iter([self._requests[number] for number in self._numbers])

    def add(self, request: Request) -> int:
        """Put a request in its place and return that place, counted from 1."""
        self._requests[request.number] = request
        if not self._numbers or request.number > self._numbers[-1]:
            self._numbers.append(request.number)
            return len(self._numbers)
        insort(self._numbers, request.number)
        return bisect_left(self._numbers, request.number) + 1

    def head(self) -> Request | None:
        """Return who is served next."""
        return self._requests[self._numbers[0]] if self._numbers else None

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        del self._numbers[bisect_left(self._numbers, request.number)]
        del self._requests[request.number]
