"""The daemon of one node: what its parts share, and how it is started and stopped."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import grpc.aio

from services.kvd.destinations import Destinations
from services.kvd.engines import Counters, Engine
from services.kvd.peers import Peers
from services.kvd.pump import Pump
from services.kvd.sources import Sources
from services.kvd.ucx import Ucx, UcxError
from splitwise.kv.identity import TransferKey
from splitwise.kv.ledger import RejectedError, Rejection
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from services.kvd.peers import Line
    from splitwise.config import Address, KvdSettings, TlsSettings
    from splitwise.kv.geometry import Geometry

TICK_S = 0.2
ABANDON_S = 60.0
"""So long a destination is told that nothing more will come; its own lease ends its half in any case."""
STOPPING_S = 4.0
"""After the drain, so long what was stopped may take to end."""
MAX_UNREAD_REPORTS = 16_384


class Node:
    """Everything of one daemon. Only the thread of the event loop may call it."""

    SIGNAL = 1
    ACKNOWLEDGE = 2

    def __init__(self, settings: KvdSettings, tls: TlsSettings) -> None:
        """Raises `UcxError` when UCX cannot be had as the settings say."""
        self.settings = settings
        self.incarnation = time.time_ns()
        self.address = ""
        self.counters = Counters()
        self.engines: dict[str, Engine] = {}
        self.pump = Pump()
        library = str(settings.ucx.library or "")
        self.ucx = Ucx(library, settings.ucx.tls or "", settings.ucx.net_devices or "")
        self.ucx_address = self.ucx.address()
        self.peers = Peers(self.ucx, tls, self._peer_lost)
        self.sources = Sources(self)
        self.destinations = Destinations(self)
        self.draining = False
        self._watchers: dict[str, list[asyncio.Queue[pb.TransferReport]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.ucx.on_message(self.SIGNAL, self._on_signal)
        self.ucx.on_message(self.ACKNOWLEDGE, self._on_acknowledgement)

    def start(self, address: Address) -> None:
        """Begin to work; `address` is how other daemons reach this one."""
        self.address = str(address)
        self.ucx.start()
        self.pump.start()
        self.spawn(self._ticks())

    def use(self, settings: KvdSettings) -> None:
        """Count by these settings from now on."""
        self.settings = settings
        for half in (self.sources, self.destinations):
            half.use_limit(settings.max_transfers)

    async def drain(self, seconds: float) -> None:
        """Take nothing new up and wait for what is open, at most so long; then stop it."""
        self.draining = True
        await self._until_idle(seconds)
        self.sources.stop_all("the KV daemon stops")
        self.destinations.stop_all("the KV daemon stops")
        await self._until_idle(STOPPING_S)

    async def close(self) -> None:
        """Give everything back."""
        for task in list(self._tasks):
            task.cancel()
        await self.pump.close()
        await self.peers.close()
        for engine in list(self.engines.values()):
            engine.memory.close()
        await self.ucx.close()

    # ---- what the parts ask

    @staticmethod
    def now() -> float:
        """Seconds on the clock that leases are measured by."""
        return time.monotonic()

    @property
    def open_transfers(self) -> int:
        """Halves of transfers that have not ended."""
        return len(self.sources) + len(self.destinations)

    def require_serving(self) -> None:
        """Raise `RejectedError` when this daemon takes no new transfer up."""
        if self.draining:
            raise RejectedError(Rejection.DRAINING, f"the KV daemon at {self.address} is stopping")

    def is_here(self, address: str) -> bool:
        """Whether a daemon's address is this one and copies within the node are wanted."""
        return self.settings.same_node_copy and address == self.address

    def require_source(self, engine_id: str, geometry: Geometry) -> Engine:
        """Return an attached engine whose blocks fit into `geometry`; raises `RejectedError`."""
        engine = self.engines.get(engine_id)
        if engine is None:
            raise RejectedError(
                Rejection.UNKNOWN_ENGINE,
                f"engine {engine_id!r} is not attached to the KV daemon at {self.address}",
            )
        different = engine.memory.geometry.differences(geometry)
        if different:
            raise RejectedError(Rejection.GEOMETRY, f"the KV memories differ in {'; '.join(different)}")
        return engine

    def spawn(self, work: Coroutine[None, None, None]) -> None:
        """Run something beside; errors are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def acknowledge(self, address: str, ucx_address: bytes, message: bytes) -> None:
        """Send an acknowledgement; one that is lost costs the source its lease, nothing else."""
        try:
            self.peers.line(address, ucx_address).endpoint.send(self.ACKNOWLEDGE, message)
        except UcxError as error:
            get_logger().warning("transfer.acknowledgement_lost", peer=address, error=str(error))

    async def send_abandon(self, address: str, request: pb.AbandonRequest) -> None:
        """Tell a destination that nothing more will come, also one that is slow to answer now.

        One that never hears of it holds its blocks until its lease ends.
        """
        end = self.now() + ABANDON_S
        while (left := end - self.now()) > 0:
            try:
                await self.peers.stub(address).Abandon(request, timeout=left, wait_for_ready=True)
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.2)
            else:
                return

    # ---- reports

    def watch(self, engine_id: str) -> asyncio.Queue[pb.TransferReport]:
        """Return a queue of every report on an engine's transfers from now on; see `unwatch`."""
        queue: asyncio.Queue[pb.TransferReport] = asyncio.Queue(MAX_UNREAD_REPORTS)
        self._watchers.setdefault(engine_id, []).append(queue)
        return queue

    def unwatch(self, engine_id: str, queue: asyncio.Queue[pb.TransferReport]) -> None:
        """Take a queue back."""
        queues = self._watchers[engine_id]
        queues.remove(queue)
        if not queues:
            del self._watchers[engine_id]

    def report(self, engine_id: str, report: pb.TransferReport) -> None:
        """Tell who watches; transfer ids only, never content."""
        get_logger().debug(
            "transfer.ended",
            engine=engine_id,
            transfer=report.transfer.transfer_id.hex()[:12],
            generation=report.transfer.generation,
            delivered=report.delivered,
            message=report.message,
            bytes=report.stats.bytes,
        )
        for queue in self._watchers.get(engine_id, []):
            if queue.full():
                queue.get_nowait()  # a watcher that does not read loses the oldest
            queue.put_nowait(report)

    # ---- engines

    def attach(self, engine: Engine) -> None:
        """Take an engine with memory up; one that was attached under the name is let go first."""
        old = self.engines.get(engine.engine_id)
        if old is not None:
            self.detach(old)
        self.engines[engine.engine_id] = engine

    def detach(self, engine: Engine) -> None:
        """An engine is gone: end its transfers and drop its memory at once."""
        if engine.gone:
            return
        engine.gone = True
        if self.engines.get(engine.engine_id) is engine:
            del self.engines[engine.engine_id]
        engine.memory.late_writers = self.destinations.granted_blocks(engine) > 0
        self.sources.engine_gone(engine)
        self.destinations.engine_gone(engine)
        engine.memory.close()
        engine.hang_up(f"engine {engine.engine_id} has detached, or was replaced by a newer incarnation")

    # ---- inside

    async def _until_idle(self, seconds: float) -> None:
        end = self.now() + seconds
        while self.open_transfers and self.now() < end:  # noqa: ASYNC110 - ends in many places
            await asyncio.sleep(0.02)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            get_logger().error("kvd.task_failed", exc_info=task.exception())

    def _peer_lost(self, address: str, line: Line, why: str) -> None:
        self.sources.peer_lost(address, line, why)
        self.destinations.peer_lost(address, line, why)

    def _on_signal(self, header: bytes) -> None:
        self.destinations.signalled(pb.CompletionSignal.FromString(header))

    def _on_acknowledgement(self, header: bytes) -> None:
        transfer = pb.Acknowledgement.FromString(header).transfer
        self.sources.acknowledged(TransferKey(transfer.transfer_id, transfer.generation))

    async def _ticks(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if self.open_transfers:
                self.peers.drop_stalled(self.now())
                self.sources.tick()
                self.destinations.tick()
