"""The token side's half of a transfer: the grant, the check, and getting the blocks back. Pure.

Inputs are method calls that return actions; the caller carries them out in order. The rule
that everything here serves: the engine hears `Deliver` only for bytes that were verified, and
`Fail` only when nobody can write the blocks any more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

from splitwise.kv.states import (
    DESTINATION_TABLE,
    FINAL,
    STATE_OF_END,
    End,
    TransferInput,
    TransferState,
)

if TYPE_CHECKING:
    from splitwise.kv.identity import TransferKey


class Cause(Enum):
    """Why a transfer did not arrive."""

    CANCELLED = "cancelled"
    EXPIRED = "expired"
    PEER_LOST = "peer_lost"
    REFUSED = "refused"
    CORRUPT = "corrupt"
    STALE = "stale"
    SOURCE = "source"


END_OF_CAUSE = {Cause.CANCELLED: End.CANCELLED, Cause.EXPIRED: End.EXPIRED}


@dataclass(frozen=True, slots=True)
class SendGrant:
    """Tell the source where it may write; answer with `granted` or `grant_refused` or `stop`."""


@dataclass(frozen=True, slots=True)
class Verify:
    """Compare what arrived with the signal; answer with `verified`."""


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tell the engine that its KV cache is complete."""

    first_token: int


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the source that its blocks are needed no more."""


@dataclass(frozen=True, slots=True)
class Revoke:
    """Ask the source to stop; answer with `revoked` or `revoke_unanswered`."""

    reason: str


@dataclass(frozen=True, slots=True)
class Fence:
    """Make late writes land nowhere (replace the memory under the writer); answer with `fenced`."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the engine that the blocks are its own again and hold nothing of use."""

    cause: Cause
    message: str


DestinationAction: TypeAlias = SendGrant | Verify | Deliver | Acknowledge | Revoke | Fence | Fail


@dataclass(slots=True)
class DestinationTransfer:
    """One transfer at the destination; `deadline` in seconds on the caller's clock."""

    key: TransferKey
    expected_bytes: int
    deadline: float
    state: TransferState = TransferState.PLANNED
    first_token: int | None = None
    _cause: Cause = Cause.CANCELLED
    _message: str = ""
    _verifying: bool = False

    def reserve(self) -> list[DestinationAction]:
        """Begin: the engine holds the blocks."""
        return [SendGrant()]

    def granted(self) -> list[DestinationAction]:
        """The source has the grant."""
        self._move(TransferInput.GRANT)
        return []

    def grant_refused(self, cause: Cause, message: str) -> list[DestinationAction]:
        """The source has said no: it will never write."""
        return self._no_more_writes(cause, message)

    def signalled(self, first_token: int) -> list[DestinationAction]:
        """The source has flushed everything and sent the first token."""
        if not self._move(TransferInput.SIGNAL):
            return []
        self.first_token = first_token
        self._verifying = True
        return [Verify()]

    def verified(self, problem: str | None) -> list[DestinationAction]:
        """The check is done; `problem` says what differs, None that nothing does."""
        if not self._verifying:
            return []
        self._verifying = False
        if self.state is TransferState.REVOKING:  # stopped while it was checked; the source is through
            return [Acknowledge(), *self._settle()]
        if problem is not None:
            self._move(TransferInput.STOP)
            self._cause, self._message = Cause.CORRUPT, problem
            return [Acknowledge(), *self._settle()]
        if self.first_token is None or not self._move(TransferInput.ACKNOWLEDGE):
            return []
        return [Deliver(self.first_token), Acknowledge()]

    def stop(self, cause: Cause, message: str) -> list[DestinationAction]:
        """End it early (cancelled, expired, source lost): first make sure that nobody writes."""
        if not self._move(TransferInput.STOP):
            return []
        self._cause, self._message = cause, message
        return [] if self._verifying else [Revoke(message)]

    def abandoned(self, cause: Cause, message: str) -> list[DestinationAction]:
        """The source has stopped by itself: it will not write any more."""
        return self._no_more_writes(cause, message)

    def revoked(self) -> list[DestinationAction]:
        """The source has confirmed that it stopped."""
        return self._settle() if self.state is TransferState.REVOKING else []

    def revoke_unanswered(self) -> list[DestinationAction]:
        """The source does not answer: it may still write."""
        return [Fence()] if self.state is TransferState.REVOKING else []

    def fenced(self) -> list[DestinationAction]:
        """Late writes land nowhere now."""
        if self._verifying or self.state in FINAL:
            return []
        if self._move(TransferInput.STOP):
            self._cause, self._message = Cause.PEER_LOST, "the memory was fenced against another writer"
        return self._settle()

    def tick(self, now: float) -> list[DestinationAction]:
        """Look at the deadline."""
        if now < self.deadline or self.state in FINAL or self.state is TransferState.REVOKING:
            return []
        return self.stop(Cause.EXPIRED, "the lease ran out before the KV cache arrived")

    def _move(self, happened: TransferInput) -> bool:
        target = DESTINATION_TABLE.get((self.state, happened))
        if target is None:
            return False
        self.state = target
        return True

    def _no_more_writes(self, cause: Cause, message: str) -> list[DestinationAction]:
        if self._verifying:  # the source contradicts its own signal; the check goes first
            return self.stop(cause, message)
        if self._move(TransferInput.STOP):
            self._cause, self._message = cause, message
        elif self.state is not TransferState.REVOKING:
            return []
        return self._settle()

    def _settle(self) -> list[DestinationAction]:
        self.state = STATE_OF_END[END_OF_CAUSE.get(self._cause, End.FAILED)]
        return [Fail(self._cause, self._message)]
