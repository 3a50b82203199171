"""What the KV daemon tells an engine about its transfers, as plain objects.

Engines import this module: it must stay free of gRPC and UCX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.kv.identity import TransferKey
from splitwise.rpc.v1.common_pb2 import TransferStats
from splitwise.rpc.v1.kvd_pb2 import (
    TRANSFER_FAILURE_CORRUPT,
    DaemonMessage,
    TransferFailure,
)

if TYPE_CHECKING:
    from splitwise.kv.identity import TransferLike


@dataclass(frozen=True, slots=True)
class Received:
    """Token side: every byte is in place and verified; the token phase may go on from `first_token`."""

    key: TransferKey
    first_token: int
    stats: TransferStats = field(default_factory=TransferStats)


@dataclass(frozen=True, slots=True)
class Failed:
    """Token side: the blocks will not be written any more and hold nothing of use."""

    key: TransferKey
    cause: TransferFailure.ValueType
    message: str

    @property
    def corrupt(self) -> bool:
        """The bytes arrived and did not verify."""
        return self.cause == TRANSFER_FAILURE_CORRUPT


@dataclass(frozen=True, slots=True)
class Released:
    """Prompt side: the blocks are not read any more; `delivered` says whether all arrived."""

    key: TransferKey
    delivered: bool
    message: str = ""
    stats: TransferStats = field(default_factory=TransferStats)


Notice = Received | Failed | Released


def notice_of(message: DaemonMessage) -> Notice | None:
    """Translate a daemon's message; None when it is about the session, not about a transfer."""
    kind = message.WhichOneof("message")
    if kind == "received":
        received = message.received
        return Received(_key(received.transfer), received.first_token, received.stats)
    if kind == "failed":
        return Failed(_key(message.failed.transfer), message.failed.cause, message.failed.message)
    if kind == "released":
        released = message.released
        return Released(_key(released.transfer), released.delivered, released.message, released.stats)
    return None


def _key(transfer: TransferLike) -> TransferKey:
    return TransferKey(transfer.transfer_id, transfer.generation)
