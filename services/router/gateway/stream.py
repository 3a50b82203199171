"""One response of server-sent events: written as they come, cut short when it must not look whole."""

from __future__ import annotations

import asyncio

from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would collect the events
}
SMALL = 32_768
"""Below what the transport holds before it makes a writer wait (64 KiB)."""


class EventStream:
    """Events to one client, which must take them within `stall_s` seconds."""

    def __init__(self, http: web.Request, stall_s: float, headers: dict[str, str]) -> None:
        self.response = web.StreamResponse(headers=HEADERS | headers)
        self._http = http
        self._stall_s = stall_s

    async def begin(self) -> None:
        """Send the status line and the headers."""
        await self.response.prepare(self._http)

    async def send(self, data: bytes) -> None:
        """Send events.

        Raises `TimeoutError` for a client that takes nothing, `ConnectionError` when it left.
        """
        transport = self._http.transport
        if transport is not None and len(data) < SMALL and not transport.get_write_buffer_size():
            await self.response.write(data)  # cannot wait; a timer would cost as much as the rest
            return
        async with asyncio.timeout(self._stall_s):
            await self.response.write(data)

    async def end(self) -> None:
        """Mark the body as complete."""
        await self.response.write_eof()

    def cut(self) -> None:
        """Close the connection once what was sent is out, without the body's end mark."""
        if self._http.transport is not None:
            self._http.transport.close()
