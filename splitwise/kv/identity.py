"""Names of transfers, as everything that handles KV blocks uses them."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol

TRANSFER_ID_BYTES = 16


class TransferLike(Protocol):
    """Anything that names one attempt at one transfer: a protobuf ``TransferRef`` or a class of ours."""

    @property
    def transfer_id(self) -> bytes:
        """16 random bytes, never used twice."""

    @property
    def generation(self) -> int:
        """Number of the attempt, from 1."""


class TransferKey(NamedTuple):
    """A transfer's name in hashable form."""

    transfer_id: bytes
    generation: int

    def __str__(self) -> str:
        return f"{self.transfer_id.hex()[:12]}/{self.generation}"


def part_key(key: TransferKey, rank: int) -> TransferKey:
    """Name the part of a transfer that one tensor-parallel rank moves; rank 0's is the transfer's own name.

    Each rank's part is a transfer of its own to the daemons: its blocks hold other attention heads.
    """
    if rank == 0:
        return key
    digest = hashlib.blake2b(key.transfer_id, digest_size=TRANSFER_ID_BYTES, salt=rank.to_bytes(8, "little"))
    return TransferKey(digest.digest(), key.generation)


def part_engine_id(engine_id: str, rank: int) -> str:
    """Name one rank of an engine at its daemon; rank 0 has the engine's name."""
    return engine_id if rank == 0 else f"{engine_id}#{rank}"


class BadTransferError(ValueError):
    """The name of a transfer is malformed."""


def transfer_key(transfer: TransferLike) -> TransferKey:
    """Return the name in hashable form, or raise `BadTransferError`."""
    key = TransferKey(bytes(transfer.transfer_id), int(transfer.generation))
    if len(key.transfer_id) != TRANSFER_ID_BYTES:
        raise BadTransferError(
            f"transfer_id has {len(key.transfer_id)} bytes, {TRANSFER_ID_BYTES} are needed: "
            "use secrets.token_bytes(16) for each new transfer"
        )
    if key.generation < 1:
        raise BadTransferError(f"generation of transfer {key.transfer_id.hex()} is 0: attempts count from 1")
    return key
