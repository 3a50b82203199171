"""The scheduler side's sessions with the KV daemon, one per tensor-parallel rank, as if they were one.

A transfer of an engine with several ranks has a part for each (`part_key`). Its notice is
given when every part has ended: it arrived when all of them did, and when one fails the
others are given up, so that no rank's blocks are used or freed before all are at rest.
"""

from __future__ import annotations

import select
import threading
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from services.kvd.notices import Failed, Received, Released
from splitwise.kv.identity import TransferKey, part_engine_id, part_key, transfer_key
from splitwise.rpc.v1.kvd_pb2 import TRANSFER_FAILURE_CORRUPT

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.kvd.client import KvdClient
    from services.kvd.notices import Notice
    from splitwise.kv.identity import TransferLike
    from splitwise.rpc.v1.common_pb2 import TransferMode

Side = Literal["prompt", "token"]


@dataclass(slots=True)
class _Whole:
    """One side of a transfer, and the notices of its parts so far."""

    key: TransferKey
    notices: list[Notice] = field(default_factory=list)
    given_up: bool = False


class RankClients:
    """What the scheduler side needs of a `KvdClient`, over one per rank, in the order of the ranks.

    `cancel` and `failure` may be called from any thread, all else from one.
    """

    def __init__(self, clients: Sequence[KvdClient]) -> None:
        self._clients = list(clients)
        self._lock = threading.Lock()
        # By the part's name. An engine that runs both phases of a request is both sides.
        self._wholes: dict[tuple[Side, TransferKey], _Whole] = {}
        self._ready = select.epoll()
        for client in self._clients:
            self._ready.register(client.fileno(), select.EPOLLIN)

    def expect(
        self,
        transfer: TransferLike,
        prompt_tokens: int,
        mode: TransferMode.ValueType,
        lease_ms: int = 60_000,
    ) -> None:
        """Announce every part; raises ValueError for a transfer that was opened before."""
        key = transfer_key(transfer)
        self._open("prompt", key)
        for rank, client in enumerate(self._clients):
            client.expect(part_key(key, rank), prompt_tokens, mode, lease_ms)

    def reserve(
        self,
        transfer: TransferLike,
        first_block: int,
        block_ids: Iterable[int],
        *,
        source_kvd_address: str,
        source_engine_id: str,
        lease_ms: int = 60_000,
        traceparent: str = "",
    ) -> None:
        """Give the same blocks of every rank; raises as `expect`."""
        key, ids = transfer_key(transfer), list(block_ids)
        self._open("token", key)
        for rank, client in enumerate(self._clients):
            client.reserve(
                part_key(key, rank),
                first_block,
                ids,
                source_kvd_address=source_kvd_address,
                source_engine_id=part_engine_id(source_engine_id, rank),
                lease_ms=lease_ms,
                traceparent=traceparent,
            )

    def first_token(self, transfer: TransferLike, token_id: int) -> None:
        """Hand over the first token with every part."""
        key = transfer_key(transfer)
        for rank, client in enumerate(self._clients):
            client.first_token(part_key(key, rank), token_id)

    def cancel(self, transfer: TransferLike, reason: str = "") -> None:
        """Ask for an early end of every part."""
        key = transfer_key(transfer)
        for rank, client in enumerate(self._clients):
            client.cancel(part_key(key, rank), reason)

    def poll(self) -> list[Notice]:
        """Take the notices of transfers whose parts have all ended."""
        whole = []
        for client in self._clients:
            for notice in client.poll():
                ended = self._take(notice)
                if ended is not None:
                    whole.append(ended)
        return whole

    def fileno(self) -> int:
        """Return a descriptor that is readable while any part has a notice."""
        return self._ready.fileno()

    def open_transfers(self) -> int:
        """Return how many transfers await their last notice, an engine's two sides counted each."""
        with self._lock:
            return len({(side, whole.key) for (side, _), whole in self._wholes.items()})

    def failure(self) -> str | None:
        """Say why no transfer is possible now, or None."""
        return next((why for client in self._clients if (why := client.failure()) is not None), None)

    def close(self) -> None:
        """End all sessions."""
        self._ready.close()
        for client in self._clients:
            client.close()

    def _open(self, side: Side, key: TransferKey) -> None:
        with self._lock:
            if (side, key) in self._wholes:
                raise ValueError(f"transfer {key} is open: take a new id or the next generation")
            whole = _Whole(key)
            for rank in range(len(self._clients)):
                self._wholes[side, part_key(key, rank)] = whole

    def _take(self, notice: Notice) -> Notice | None:
        side: Side = "prompt" if isinstance(notice, Released) else "token"
        with self._lock:
            whole = self._wholes.get((side, notice.key))
            if whole is None:
                return None
            whole.notices.append(notice)
            complete = len(whole.notices) == len(self._clients)
            if complete:
                for rank in range(len(self._clients)):
                    del self._wholes[side, part_key(whole.key, rank)]
            give_up = not (complete or whole.given_up or _arrived(notice))
            whole.given_up |= give_up
        if give_up:
            self.cancel(whole.key, "another rank's part has failed")
        return _combine(whole) if complete else None


def _arrived(notice: Notice) -> bool:
    return notice.delivered if isinstance(notice, Released) else isinstance(notice, Received)


def _combine(whole: _Whole) -> Notice:
    """Return one notice for all parts: the first failure, if there is one."""
    notice = next((one for one in whole.notices if not _arrived(one)), whole.notices[0])
    tokens = {one.first_token for one in whole.notices if isinstance(one, Received)}
    if len(tokens) > 1:  # cannot be, unless daemons mix transfers up; no token shall come of it
        return Failed(
            whole.key, TRANSFER_FAILURE_CORRUPT, f"the ranks were told first tokens {sorted(tokens)}"
        )
    return replace(notice, key=whole.key)


TransferClient: TypeAlias = "KvdClient | RankClients"
"""The scheduler side's client: an engine of one rank needs no `RankClients`."""
