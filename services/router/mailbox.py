"""What waits to be sent to one client: one message that grows until the client takes it.

A client that reads slowly gets fewer, larger messages; nothing queues per token. What is
unread is bounded, and a client beyond the bound is given up.
"""

from __future__ import annotations

import asyncio
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

    def __init__(self, max_unread: int = MAX_UNREAD) -> None:
        self._pieces: list[Piece] = []
        self._finished: Finished | None = None
        self._error: RemoteError | None = None
        self._wake = asyncio.Event()
        self._max_unread = max_unread
        self._unread = 0
        self.closed = False

    def put(self, piece: Piece) -> bool:
        """Add a piece; False when the client is too far behind. After the end nothing is kept."""
        if self.closed:
            return True
        self._pieces.append(piece)
        self._unread += len(piece.token_ids) + sum(len(entry.top) for entry in piece.logprobs)
        self._wake.set()
        return self._unread <= self._max_unread

    def finish(self, finished: Finished) -> None:
        """End the answer; what was put before is still sent."""
        if not self.closed:
            self.closed = True
            self._finished = finished
            self._wake.set()

    def fail(self, error: RemoteError) -> None:
        """End the call with a status, after what was put before."""
        if not self.closed:
            self.closed = True
            self._error = error
            self._wake.set()

    async def take(self) -> GenerateResponse:
        """Wait for something to send and return all of it as one message; raises the failure."""
        await self._wake.wait()
        pieces, self._pieces, self._unread = self._pieces, [], 0
        if not pieces and self._error is not None:
            raise self._error
        if self._error is None:
            self._wake.clear()
        message = GenerateResponse(text="".join([piece.text for piece in pieces]))
        for piece in pieces:
            message.token_ids.extend(piece.token_ids)
            message.logprobs.extend(piece.logprobs)
        if self._finished is not None:
            message.finished.CopyFrom(self._finished)
        return message
