"""Which transfers were seen, so that none is taken up twice and none comes back stale.

Holds the open transfers and, bounded, the ends of past ones. A newer generation of a
transfer makes all older ones stale.
"""

from __future__ import annotations

from collections import OrderedDict
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.kv.identity import TransferKey

T = TypeVar("T")


class Rejection(Enum):
    """Why something that names a transfer is refused; each is counted under its value."""

    UNKNOWN_TRANSFER = "unknown_transfer"
    STALE_GENERATION = "stale_generation"
    REUSED_TRANSFER = "reused_transfer"
    EXPIRED = "expired"
    UNKNOWN_ENGINE = "unknown_engine"
    STALE_INCARNATION = "stale_incarnation"
    GEOMETRY = "geometry"
    BLOCK_OUT_OF_RANGE = "block_out_of_range"
    TOO_MANY_TRANSFERS = "too_many_transfers"
    OUT_OF_PLACE = "out_of_place"
    DRAINING = "draining"
    CORRUPT = "corrupt"


class RejectedError(Exception):
    """Something was refused; `cause` is counted, the message names what to do."""

    def __init__(self, cause: Rejection, message: str) -> None:
        super().__init__(message)
        self.cause = cause


class Ledger(Generic[T]):
    """Open transfers of one side by key, and the memory of `remembered` past ones."""

    def __init__(self, *, limit: int, remembered: int = 65_536) -> None:
        self.limit = limit
        self._remembered = remembered
        self._open: dict[TransferKey, T] = {}
        self._ended: OrderedDict[TransferKey, str] = OrderedDict()
        self._newest: OrderedDict[bytes, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._open.values()))

    def add(self, key: TransferKey, transfer: T) -> None:
        """Take a new transfer up; raises `RejectedError` for a used or stale key, or when full."""
        self.refuse_used(key)
        if len(self._open) >= self.limit:
            raise RejectedError(
                Rejection.TOO_MANY_TRANSFERS,
                f"transfer {key}: {self.limit} transfers are open already (kvd.max_transfers)",
            )
        self._open[key] = transfer
        self._newest[key.transfer_id] = key.generation
        self._newest.move_to_end(key.transfer_id)
        if len(self._newest) > self._remembered:
            self._newest.popitem(last=False)

    def refuse_used(self, key: TransferKey) -> None:
        """Raise `RejectedError` unless the key is new."""
        self._refuse_stale(key)
        if key in self._ended:
            raise RejectedError(
                Rejection.REUSED_TRANSFER, f"transfer {key} has ended before: {self._ended[key]}"
            )
        if key in self._open:
            raise RejectedError(Rejection.REUSED_TRANSFER, f"transfer {key} is open already")

    def get(self, key: TransferKey) -> T | None:
        """Return an open transfer."""
        return self._open.get(key)

    def require(self, key: TransferKey) -> T:
        """Return an open transfer or raise `RejectedError` with the reason why it is not open."""
        transfer = self._open.get(key)
        if transfer is not None:
            return transfer
        self._refuse_stale(key)
        if key in self._ended:
            raise RejectedError(Rejection.OUT_OF_PLACE, f"transfer {key} is over: {self._ended[key]}")
        raise RejectedError(Rejection.UNKNOWN_TRANSFER, f"transfer {key} is not known here")

    def how_ended(self, key: TransferKey) -> str | None:
        """Say how a transfer has ended, if it has and is remembered."""
        return self._ended.get(key)

    def end(self, key: TransferKey, how: str) -> None:
        """Close a transfer, or keep a key from ever being opened."""
        self._open.pop(key, None)
        self._ended[key] = how
        self._ended.move_to_end(key)
        if len(self._ended) > self._remembered:
            self._ended.popitem(last=False)

    def _refuse_stale(self, key: TransferKey) -> None:
        newest = self._newest.get(key.transfer_id, 0)
        if key.generation < newest:
            raise RejectedError(
                Rejection.STALE_GENERATION, f"transfer {key} is stale: generation {newest} is known"
            )
