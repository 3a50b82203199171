"""What this machine knows of its KV transfers, from its node's daemon.

Subscribes to the daemon's `WatchTransfers`, for each rank of its engine: a transfer is over
when all ranks' parts are. A prompt's KV cache is *leased* from its first
token until the daemon has delivered it, given it up, or gone away itself; a machine that
drains waits for its leases.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import grpc.aio

from splitwise.kv.identity import TransferKey, part_engine_id, part_key, transfer_key
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1.common_pb2 import TransferRef
from splitwise.rpc.v1.kvd_pb2 import RevokeRequest, TransferReport, WatchTransfersRequest
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub, KvdStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.engine.interface import Transfer
    from splitwise.config import Address, TlsSettings

RETRY_S = 0.5
REVOKE_TIMEOUT_S = 5.0


class TransferWatch:
    """The daemon's reports on one engine's transfers, given to whoever waits for each."""

    def __init__(self, kvd: Address, tls: TlsSettings | None = None) -> None:
        self._kvd = kvd
        self._channel = open_channel(kvd, tls=tls, role=Role.KVD)
        self._listeners: dict[Transfer, Callable[[TransferReport], None]] = {}
        self._leases: dict[Transfer, asyncio.Event] = {}
        self._ranks = 1
        self._parts: dict[TransferKey, Transfer] = {}  # of what is listened to or leased
        self._reports: dict[Transfer, dict[int, TransferReport]] = {}  # by rank, until all are there
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def leases(self) -> int:
        """KV caches of prompts that are kept, or will be, for their delivery."""
        return len(self._leases)

    def start(self, engine_id: str, ranks: int) -> None:
        """Begin to watch an engine of so many ranks, and go on whenever the daemon comes back."""
        self._ranks = ranks
        self._tasks = [
            asyncio.create_task(
                self._watch(rank, part_engine_id(engine_id, rank)), name=f"transfer-watch-{rank}"
            )
            for rank in range(ranks)
        ]

    async def close(self) -> None:
        """Stop watching; leases end."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._end_all_leases()
        await self._channel.close(None)

    def listen(self, transfer: Transfer, listener: Callable[[TransferReport], None]) -> None:
        """Call `listener` once with the report on `transfer` (token side)."""
        self._listeners[transfer] = listener
        self._follow(transfer)

    def forget(self, transfer: Transfer) -> None:
        """Take a listener back."""
        self._listeners.pop(transfer, None)
        self._unfollow(transfer)

    def open_lease(self, transfer: Transfer) -> None:
        """Note that a prompt's KV cache will be kept for `transfer`."""
        self._leases[transfer] = asyncio.Event()
        self._follow(transfer)

    async def lease_end(self, transfer: Transfer, timeout_s: float) -> bool:
        """Wait for the report on `transfer`; False when none came in time."""
        try:
            await asyncio.wait_for(self._leases[transfer].wait(), timeout_s)
        except TimeoutError:
            ended = False
        else:
            ended = True
        del self._leases[transfer]
        self._unfollow(transfer)
        return ended

    def close_lease(self, transfer: Transfer) -> bool:
        """Give a lease up; True when it was open, so that the daemon must be told."""
        ended = self._leases.pop(transfer, None)
        self._unfollow(transfer)
        return ended is not None and not ended.is_set()

    async def revoke(self, transfer: Transfer, reason: str) -> None:
        """Tell the daemon that nobody waits for `transfer`; a daemon that is away has forgotten it."""
        stub = KvdPeerStub(self._channel)
        try:
            for rank in range(self._ranks):
                part = part_key(transfer_key(transfer), rank)
                ref = TransferRef(transfer_id=part.transfer_id, generation=part.generation)
                await stub.Revoke(RevokeRequest(transfer=ref, reason=reason), timeout=REVOKE_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            get_logger().warning("transfer.revoke_failed", kvd=str(self._kvd), error=error.details())

    def _follow(self, transfer: Transfer) -> None:
        for rank in range(self._ranks):
            self._parts[part_key(transfer_key(transfer), rank)] = transfer

    def _unfollow(self, transfer: Transfer) -> None:
        if transfer not in self._listeners and transfer not in self._leases:
            for rank in range(self._ranks):
                self._parts.pop(part_key(transfer_key(transfer), rank), None)
            self._reports.pop(transfer, None)

    async def _watch(self, rank: int, engine_id: str) -> None:
        said = False
        while True:
            try:
                reports = KvdStub(self._channel).WatchTransfers(WatchTransfersRequest(engine_id=engine_id))
                async for report in reports:
                    said = False
                    self._report(rank, report)
            except grpc.aio.AioRpcError as error:
                if not said:
                    get_logger().warning("kvd.away", kvd=str(self._kvd), error=error.details())
                    said = True
            self._end_all_leases()  # a daemon that is gone reads no blocks
            await asyncio.sleep(RETRY_S)

    def _report(self, rank: int, report: TransferReport) -> None:
        transfer = self._parts.get(TransferKey(report.transfer.transfer_id, report.transfer.generation))
        if transfer is None:
            return
        reports = self._reports.setdefault(transfer, {})
        reports.setdefault(rank, report)
        if len(reports) == self._ranks:
            self._ended(transfer, _combine(self._reports.pop(transfer)))

    def _ended(self, transfer: Transfer, report: TransferReport) -> None:
        listener = self._listeners.pop(transfer, None)
        if listener is not None:
            listener(report)
        lease = self._leases.get(transfer)
        if lease is not None:
            lease.set()

    def _end_all_leases(self) -> None:
        for lease in self._leases.values():
            lease.set()


def _combine(parts: dict[int, TransferReport]) -> TransferReport:
    """Return one report on all parts: it arrived when all did, and took as long as the slowest."""
    reports = [parts[rank] for rank in sorted(parts)]
    whole = TransferReport()
    whole.CopyFrom(next((report for report in reports if not report.delivered), reports[0]))
    stats = [report.stats for report in reports]
    whole.stats.bytes = sum(part.bytes for part in stats)
    whole.stats.puts = sum(part.puts for part in stats)
    whole.stats.push_us = max(part.push_us for part in stats)
    whole.stats.exposed_us = max(part.exposed_us for part in stats)
    return whole
