"""What waits to be sent to one client: one message that grows until the client takes it.

A client that reads slowly gets fewer, larger messages; nothing queues per token. What is
unread is bounded, and a client beyond the bound is given up. Nor does a fast engine cost a
message per token: a message costs the router ten times what its token does, so a client gets
the next one `gap_s` after the last at the earliest, with all that came meanwhile. The first
token, the end, and whatever comes at a slower pace wait for nothing.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from splitwise.rpc.v1.router_pb2 import GenerateResponse

if TYPE_CHECKING:
    from splitwise.errors import RemoteError
    from splitwise.requests import Piece
    from splitwise.rpc.v1.router_pb2 import Finished

MAX_UNREAD = 131_072
"""Unread tokens and log-probability alternatives: some megabytes at most."""


class Mailbox:
    """The outgoing side of one Generate call. Ends with `finish` or `fail`, whichever is first."""

    def __init__(self, max_unread: int = MAX_UNREAD, gap_s: float = 0.0) -> None:
        self._pieces: list[Piece] = []
        self._finished: Finished | None = None
        self._error: RemoteError | None = None
        self._wake = asyncio.Event()
        self._max_unread = max_unread
        self._gap_s = gap_s
        self._next_at = 0.0  # when the next message may go
        self._timer: asyncio.TimerHandle | None = None
        self._unread = 0
        self.closed = False

    def put(self, piece: Piece) -> bool:
        """Add a piece; False when the client is too far behind. After the end nothing is kept."""
        if self.closed:
            return True
        self._pieces.append(piece)
        self._unread += len(piece.token_ids)
        if piece.logprobs:
            self._unread += sum(len(entry.top) for entry in piece.logprobs)
        self._wake_in_time()
        return self._unread <= self._max_unread

    def _wake_in_time(self) -> None:
        """Wake the client's call now, or when the gap since its last message has passed."""
        if self._timer is not None:
            return
        if time.monotonic() >= self._next_at:
            self._wake.set()
        else:
            self._timer = asyncio.get_running_loop().call_at(self._next_at, self._wake.set)

    def finish(self, finished: Finished) -> None:
        """End the answer; what was put before is still sent."""
        if not self.closed:
            self.closed = True
            self._finished = finished
            self._end()

    def fail(self, error: RemoteError) -> None:
        """End the call with a status, after what was put before."""
        if not self.closed:
            self.closed = True
            self._error = error
            self._end()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._wake.set()

    async def take(self) -> GenerateResponse:
        """Wait for something to send and return all of it as one message; raises the failure."""
        await self._wake.wait()
        pieces, self._pieces, self._unread = self._pieces, [], 0
        if not pieces and self._error is not None:
            raise self._error
        if self._error is None:
            self._wake.clear()
        self._timer = None
        self._next_at = time.monotonic() + self._gap_s
        message = GenerateResponse(text="".join([piece.text for piece in pieces]))
        for piece in pieces:
            message.token_ids.extend(piece.token_ids)
            message.logprobs.extend(piece.logprobs)
        if self._finished is not None:
            message.finished.CopyFrom(self._finished)
        return message
