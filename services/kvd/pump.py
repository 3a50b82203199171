"""Carrying pushes out, fairly: transfers take turns, one layer's blocks at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable


class Pump:
    """Runs queued jobs in the event loop, round-robin over their owners."""

    def __init__(self) -> None:
        self._jobs: dict[Hashable, deque[Callable[[], None]]] = {}
        self._turns: deque[Hashable] = deque()
        self._there = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run jobs."""
        self._task = asyncio.create_task(self._run(), name="pump")

    def add(self, owner: Hashable, job: Callable[[], None]) -> None:
        """Queue a job; those of one owner run in order. A job must not raise."""
        jobs = self._jobs.get(owner)
        if jobs is None:
            jobs = self._jobs[owner] = deque()
            self._turns.append(owner)
        jobs.append(job)
        self._there.set()

    async def close(self) -> None:
        """Stop; queued jobs are dropped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            await self._there.wait()
            if not self._turns:
                self._there.clear()
                continue
            owner = self._turns.popleft()
            jobs = self._jobs[owner]
            jobs.popleft()()
            if jobs:
                self._turns.append(owner)
            else:
                del self._jobs[owner]
            await asyncio.sleep(0)
