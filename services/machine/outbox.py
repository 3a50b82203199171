"""Events on their way to one router: what one engine iteration makes leaves as one message."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from splitwise.rpc.v1.machine_pb2 import MachineEvent, MachineEvents

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

MAX_EVENTS = 262_144
"""Events that a router may leave unread (about 100 per request at 2,600 requests); beyond
it the stream is given up, because its events are lost to that router anyway."""


class Outbox:
    """The sending half of one control stream. After `close`, events are dropped."""

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self._events: list[MachineEvent] = []
        self._wake = asyncio.Event()
        self._max_events = max_events
        self.closed = False
        self.overflowed = False

    def add(self, event: MachineEvent) -> None:
        """Queue one event; never waits."""
        if self.closed:
            return
        if len(self._events) >= self._max_events:
            self.overflowed = True
            self.close()
            return
        self._events.append(event)
        self._wake.set()

    def close(self) -> None:
        """End the stream after what is queued."""
        self.closed = True
        self._wake.set()

    async def batches(self) -> AsyncIterator[MachineEvents]:
        """Yield messages with all events that are there, until closed.

        An iteration's outputs wake one task per request, all ready in the same turn of the
        event loop; giving way once lets every one of them add its tokens first.
        """
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)
            events, self._events = self._events, []
            self._wake.clear()
            if events:
                yield MachineEvents(events=events)
            if self.closed and not self._events:
                return
