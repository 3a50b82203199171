"""What this machine knows of its KV transfers, from its node's daemon.

Subscribes to the daemon's `WatchTransfers`. A prompt's KV cache is *leased* from its first
token until the daemon has delivered it, given it up, or gone away itself; a machine that
drains waits for its leases.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio

from services.engine.interface import Transfer
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1.common_pb2 import TransferRef
from splitwise.rpc.v1.kvd_pb2 import RevokeRequest, TransferReport, WatchTransfersRequest
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub, KvdStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

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
        self._task: asyncio.Task[None] | None = None

    @property
    def leases(self) -> int:
        """KV caches of prompts that are kept, or will be, for their delivery."""
        return len(self._leases)

    def start(self, engine_id: str) -> None:
        """Begin to watch, and go on whenever the daemon comes back."""
        self._task = asyncio.create_task(self._watch(engine_id), name="transfer-watch")

    async def close(self) -> None:
        """Stop watching; leases end."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
        self._end_all_leases()
        await self._channel.close(None)

    def listen(self, transfer: Transfer, listener: Callable[[TransferReport], None]) -> None:
        """Call `listener` once with the report on `transfer` (token side)."""
        self._listeners[transfer] = listener

    def forget(self, transfer: Transfer) -> None:
        """Take a listener back."""
        self._listeners.pop(transfer, None)

    def open_lease(self, transfer: Transfer) -> None:
        """Note that a prompt's KV cache will be kept for `transfer`."""
        self._leases[transfer] = asyncio.Event()

    async def lease_end(self, transfer: Transfer, timeout_s: float) -> bool:
        """Wait for the report on `transfer`; False when none came in time."""
        try:
            await asyncio.wait_for(self._leases[transfer].wait(), timeout_s)
        except TimeoutError:
            ended = False
        else:
            ended = True
        del self._leases[transfer]
        return ended

    def close_lease(self, transfer: Transfer) -> bool:
        """Give a lease up; True when it was open, so that the daemon must be told."""
        ended = self._leases.pop(transfer, None)
        return ended is not None and not ended.is_set()

    async def revoke(self, transfer: Transfer, reason: str) -> None:
        """Tell the daemon that nobody waits for `transfer`; a daemon that is away has forgotten it."""
        ref = TransferRef(transfer_id=transfer.transfer_id, generation=transfer.generation)
        try:
            await KvdPeerStub(self._channel).Revoke(
                RevokeRequest(transfer=ref, reason=reason), timeout=REVOKE_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            get_logger().warning("transfer.revoke_failed", kvd=str(self._kvd), error=error.details())

    async def _watch(self, engine_id: str) -> None:
        said = False
        while True:
            try:
                reports = KvdStub(self._channel).WatchTransfers(WatchTransfersRequest(engine_id=engine_id))
                async for report in reports:
                    said = False
                    self._report(report)
            except grpc.aio.AioRpcError as error:
                if not said:
                    get_logger().warning("kvd.away", kvd=str(self._kvd), error=error.details())
                    said = True
            self._end_all_leases()  # a daemon that is gone reads no blocks
            await asyncio.sleep(RETRY_S)

    def _report(self, report: TransferReport) -> None:
        transfer = Transfer(report.transfer.transfer_id, report.transfer.generation)
        listener = self._listeners.pop(transfer, None)
        if listener is not None:
            listener(report)
        lease = self._leases.get(transfer)
        if lease is not None:
            lease.set()

    def _end_all_leases(self) -> None:
        for lease in self._leases.values():
            lease.set()
