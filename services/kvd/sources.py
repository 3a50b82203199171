"""The source half of all transfers: carries out what `splitwise.kv.source` decides."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from services.kvd import metrics
from services.kvd.convert import FAILURE_OF_END, ref
from services.kvd.traces import trace_push
from services.kvd.ucx import UcxError
from splitwise.kv.identity import TransferKey
from splitwise.kv.integrity import LayerDigests
from splitwise.kv.ledger import Ledger, RejectedError, Rejection
from splitwise.kv.plan import plan_layer
from splitwise.kv.source import (
    Abandon,
    GrantedBlocks,
    Push,
    Release,
    Signal,
    SourceTransfer,
    Stopped,
)
from splitwise.kv.states import End, TransferState
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.rpc.v1.common_pb2 import (
    TRANSFER_MODE_LAYERWISE,
    TRANSFER_MODE_SERIALIZED,
    TransferStats,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.kvd.engines import Engine
    from services.kvd.node import Node
    from services.kvd.peers import Line
    from splitwise.kv.geometry import Geometry
    from splitwise.kv.plan import CopyPlan
    from splitwise.kv.source import SourceAction


@dataclass(frozen=True, slots=True)
class RemoteTarget:
    """Blocks of an engine of another daemon."""

    address: str  # of that daemon
    geometry: Geometry
    base: int
    rkey: bytes
    ucx_address: bytes

    def goes_over(self, address: str, line: Line) -> bool:
        """Whether a connection is the one to this target."""
        return (self.address, self.ucx_address) == (address, line.ucx_address)


@dataclass(frozen=True, slots=True)
class LocalTarget:
    """Blocks of an engine of this daemon."""

    engine: Engine


Target: TypeAlias = RemoteTarget | LocalTarget


@dataclass(eq=False, slots=True)
class SourceSide:
    """One transfer with all that the daemon needs to carry it out."""

    transfer: SourceTransfer
    engine: Engine
    target: Target | None = None
    checksum: bool = False
    epoch: int = 0
    digests: LayerDigests | None = None
    stats: TransferStats = field(default_factory=TransferStats)
    first_put: float | None = None
    last_put: float = 0.0
    token_at: float | None = None
    waiting: list[asyncio.Future[None]] = field(default_factory=list)
    traceparent: str = ""  # of the destination's span
    granted_at: float = 0.0

    @property
    def key(self) -> TransferKey:
        """The transfer's name."""
        return self.transfer.key


class Sources:
    """All source halves of this daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ledger: Ledger[SourceSide] = Ledger(limit=node.settings.max_transfers)

    def __len__(self) -> int:
        return len(self._ledger)

    def use_limit(self, limit: int) -> None:
        """Take up so many transfers at once from now on."""
        self._ledger.limit = limit

    # ---- from the engine

    def expect(self, engine: Engine, message: pb.Expect, key: TransferKey) -> None:
        """An engine announces a transfer; raises ValueError for one that does not say how to push."""
        if message.mode not in (TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED):
            raise ValueError(f"expect {key}: mode {message.mode} is neither serialized nor layer-wise")
        side = self._ledger.get(key)
        if side is not None and not side.transfer.expected and side.engine is engine:
            pass  # the grant came first
        else:
            try:
                side = self._open(key, engine)
            except RejectedError as error:
                self._node.counters.reject(error.cause.value)
                engine.tell(_released(key, delivered=False, message=str(error)))
                return
        side.stats.mode = message.mode
        layerwise = message.mode == TRANSFER_MODE_LAYERWISE
        self._do(side, side.transfer.expect(layerwise=layerwise, lease=message.lease_ms / 1e3))

    def plan(self, engine: Engine, plan: pb.PushPlan) -> None:
        """A forward pass begins; raises ValueError or GeometryError for a plan that cannot be."""
        for entry in plan.entries:
            engine.memory.geometry.check_blocks(entry.block_ids)
        engine.read_counter()  # of the passes before
        engine.progress.add_plan(plan)
        self.layers(engine)

    def layers(self, engine: Engine) -> None:
        """The engine's layer counter may have moved, or a pass begun."""
        now = self._node.now()
        for layer, entry in engine.progress.events():
            side = self._of(entry, engine)
            if side is None:
                continue
            first, blocks = entry.first_block, entry.block_ids
            if layer is not None:
                self._do(side, side.transfer.layer_written(now, layer, first, blocks))
            else:
                flags = {"final": entry.final, "restart": entry.restart}
                self._do(side, side.transfer.entry(now, first, len(blocks), **flags))

    def first_token(self, engine: Engine, key: TransferKey, token: int) -> None:
        """The engine has sampled the first token."""
        side = self._ledger.get(key)
        if side is not None and side.engine is engine:
            side.token_at = time.monotonic()
            self._do(side, side.transfer.first_token(self._node.now(), token))

    def cancel(self, key: TransferKey, reason: str) -> None:
        """The engine gives the transfer up."""
        side = self._ledger.get(key)
        if side is not None:
            self._do(side, side.transfer.stop(End.CANCELLED, reason, tell_peer=True))

    def engine_gone(self, engine: Engine) -> None:
        """An engine has detached or died."""
        for side in self._ledger:
            if side.engine is engine:
                message = f"engine {engine.engine_id} is gone"
                self._do(side, side.transfer.stop(End.FAILED, message, tell_peer=True))

    # ---- from the destination

    def grant(
        self, key: TransferKey, engine: Engine, blocks: GrantedBlocks, target: Target, *,
        lease: float, checksum: bool, traceparent: str = "",
    ) -> None:  # fmt: skip
        """A destination gives its blocks; raises `RejectedError`."""
        side = self._ledger.get(key)
        if side is None:
            side = self._open(key, engine)
        elif side.engine is not engine or side.target is not None:
            raise RejectedError(Rejection.REUSED_TRANSFER, f"transfer {key} has a grant already")
        side.target = target
        side.checksum = checksum
        side.traceparent, side.granted_at = traceparent, time.monotonic()
        side.stats.transport = "ucx" if isinstance(target, RemoteTarget) else "local"
        side.stats.blocks_skipped = blocks.first_block
        self._do(side, side.transfer.grant(self._node.now(), blocks, lease))

    async def revoke(self, key: TransferKey, reason: str) -> bool:
        """Stop a transfer and return when no put is in flight; False when it is not known."""
        side = self._ledger.get(key)
        if side is None:
            if self._ledger.how_ended(key) is None:
                self._ledger.end(key, "revoked before it began")
            return False
        stopped: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        side.waiting.append(stopped)
        self._do(side, side.transfer.stop(End.CANCELLED, reason, tell_peer=True))
        await stopped
        return True

    def acknowledged(self, key: TransferKey) -> None:
        """The destination has taken over (or has seen the signal of what it gave up)."""
        side = self._ledger.get(key)
        if side is not None:
            self._do(side, side.transfer.acknowledged())

    def fenced(self, engine: Engine) -> None:
        """An engine's memory is about to be fenced: puts that read from it would send something else."""
        for side in self._ledger:
            if side.engine is engine and side.transfer.in_flight:
                message = "the memory was fenced against another writer"
                self._do(side, side.transfer.stop(End.FAILED, message, tell_peer=True))

    def peer_lost(self, address: str, line: Line, why: str) -> None:
        """The connection to one incarnation of a daemon broke."""
        for side in self._ledger:
            target = side.target
            if isinstance(target, RemoteTarget) and target.goes_over(address, line):
                message = f"the KV daemon at {address} was lost: {why}"
                self._do(side, side.transfer.stop(End.FAILED, message, tell_peer=True))

    # ---- time

    def tick(self) -> None:
        """Look at deadlines."""
        now = self._node.now()
        for side in self._ledger:
            self._do(side, side.transfer.tick(now))

    def stop_all(self, reason: str) -> None:
        """Give everything up."""
        for side in self._ledger:
            self._do(side, side.transfer.stop(End.CANCELLED, reason, tell_peer=True))

    # ---- inside

    def _open(self, key: TransferKey, engine: Engine) -> SourceSide:
        self._node.require_serving()
        side = SourceSide(SourceTransfer(key, engine.memory.geometry.layers), engine)
        self._ledger.add(key, side)
        return side

    def _of(self, entry: pb.PushEntry, engine: Engine) -> SourceSide | None:
        side = self._ledger.get(TransferKey(entry.transfer.transfer_id, entry.transfer.generation))
        return side if side is not None and side.engine is engine else None

    def _do(self, side: SourceSide, actions: Iterable[SourceAction]) -> None:
        for action in actions:
            if isinstance(action, Push):
                self._node.pump.add(side.key, lambda push=action: self._push(side, push))  # type: ignore[misc]
            elif isinstance(action, Signal):
                self._signal(side, action)
            elif isinstance(action, Release):
                self._release(side, action)
            elif isinstance(action, Abandon):
                self._abandon(side, action)
            elif isinstance(action, Stopped):
                for future in side.waiting:
                    if not future.done():
                        future.set_result(None)
                side.waiting.clear()
        if side.transfer.state in (TransferState.DONE, TransferState.CANCELLED, TransferState.FAILED,
                                   TransferState.EXPIRED):  # fmt: skip
            self._ledger.end(side.key, side.transfer.state.value)

    def _push(self, side: SourceSide, push: Push) -> None:
        target = side.target
        if side.transfer.state is TransferState.STOPPING or side.engine.gone or target is None:
            self._do(side, side.transfer.pushed(self._node.now()))
            return
        self._account(side, push)
        if isinstance(target, LocalTarget):
            self._copy(side, push, target)
        else:
            self._put(side, push, target)

    def _account(self, side: SourceSide, push: Push) -> None:
        """Count and, for the checksum, hash what goes out."""
        if side.first_put is None:
            side.first_put = time.monotonic()
        if side.digests is None or side.epoch != push.epoch:
            layers = side.engine.memory.geometry.layers
            side.digests, side.epoch = LayerDigests(layers), push.epoch
            side.stats.bytes = side.stats.blocks = 0
        if side.checksum:
            for block in push.source_blocks:
                side.digests.add(push.layer, side.engine.view(push.layer, block))
        block_bytes = side.engine.memory.geometry.block_bytes_per_layer
        side.stats.bytes += len(push.source_blocks) * block_bytes
        if push.layer == 0:
            side.stats.blocks += len(push.source_blocks)

    def _copy(self, side: SourceSide, push: Push, target: LocalTarget) -> None:
        if target.engine.gone:
            message = f"engine {target.engine.engine_id} is gone"
            self._do(side, side.transfer.pushed(self._node.now()))
            self._do(side, side.transfer.stop(End.FAILED, message, tell_peer=True))
            return
        plan = self._plan(side, push, target.engine.memory.geometry)
        here, there = side.engine.memory.mapping, target.engine.memory.mapping
        for source, destination, size in _rows(plan):
            here.copy_to(source, there, destination, size)
        self._arrived(side)

    def _put(self, side: SourceSide, push: Push, target: RemoteTarget) -> None:
        plan = self._plan(side, push, target.geometry)
        memory = side.engine.memory
        memory.begin_read()
        line: Line | None = None
        try:
            line = self._node.peers.line(target.address, target.ucx_address)
            line.endpoint.put(
                memory.registration,
                line.key(target.rkey),
                (plan.source_offsets + memory.mapping.address).tolist(),
                (plan.destination_offsets + target.base).tolist(),
                plan.sizes.tolist(),
            )
            flushed = line.flush()
        except UcxError as error:
            self._broke(side, target, line, f"the push of layer {push.layer} failed: {error}")
        else:
            flushed.add_done_callback(lambda done: self._flushed(side, target, line, done))

    def _plan(self, side: SourceSide, push: Push, there: Geometry) -> CopyPlan:
        here = side.engine.memory.geometry
        plan = plan_layer(here, there, push.layer, push.source_blocks, push.destination_blocks)
        side.stats.puts += len(plan.sizes)
        self._node.counters.puts += len(plan.sizes)
        self._node.counters.bytes_pushed += plan.nbytes
        return plan

    def _flushed(
        self, side: SourceSide, target: RemoteTarget, line: Line, done: asyncio.Future[None]
    ) -> None:
        error = done.exception()
        if error is None:
            side.engine.memory.end_read()
            self._arrived(side)
        else:
            self._broke(side, target, line, f"the push to {target.address} failed: {error}")

    def _broke(self, side: SourceSide, target: RemoteTarget, line: Line | None, message: str) -> None:
        """A put or its flush failed; others of the same push may be under way until the line is closed."""
        self._do(side, side.transfer.stop(End.FAILED, message, tell_peer=True))
        if line is not None:
            self._node.peers.drop(target.address, message, line)
        self._node.spawn(self._left(side, line))

    async def _left(self, side: SourceSide, line: Line | None) -> None:
        if line is not None:
            await line.close()
        side.engine.memory.end_read()
        self._do(side, side.transfer.pushed(self._node.now()))

    def _arrived(self, side: SourceSide) -> None:
        side.last_put = time.monotonic()
        self._do(side, side.transfer.pushed(self._node.now()))

    def _signal(self, side: SourceSide, signal: Signal) -> None:
        stats = side.stats
        if side.first_put is not None:
            stats.push_us = round((side.last_put - side.first_put) * 1e6)
        if side.token_at is not None:
            stats.exposed_us = max(0, round((side.last_put - side.token_at) * 1e6))
        layers = side.engine.memory.geometry.layers
        digests = side.digests or LayerDigests(layers)
        message = pb.CompletionSignal(
            transfer=ref(side.key),
            bytes=stats.bytes,
            checksummed=side.checksum,
            checksum=digests.value() if side.checksum else 0,
            first_token=signal.first_token,
            stats=stats,
        )
        if isinstance(side.target, LocalTarget):
            self._node.destinations.signalled(message)
        elif side.target is not None:
            try:
                line = self._node.peers.line(side.target.address, side.target.ucx_address)
                line.endpoint.send(self._node.SIGNAL, message.SerializeToString())
            except UcxError as error:
                text = f"the completion signal could not be sent: {error}"
                self._do(side, side.transfer.stop(End.FAILED, text, tell_peer=True))

    def _release(self, side: SourceSide, action: Release) -> None:
        if action.delivered:
            hand_over = None if side.token_at is None else time.monotonic() - side.token_at
            metrics.delivered(side.stats, hand_over)
        if side.traceparent:
            trace_push(side, action)
        side.engine.tell(
            _released(side.key, delivered=action.delivered, message=action.message, stats=side.stats)
        )
        failure = pb.TRANSFER_FAILURE_UNSPECIFIED if action.delivered else _failure(side.transfer.state)
        self._node.report(
            side.engine.engine_id,
            pb.TransferReport(
                transfer=ref(side.key),
                delivered=action.delivered,
                failure=failure,
                message=action.message,
                stats=side.stats,
            ),
        )

    def _abandon(self, side: SourceSide, action: Abandon) -> None:
        request = pb.AbandonRequest(
            transfer=ref(side.key), cause=FAILURE_OF_END[action.end], message=action.message
        )
        if isinstance(side.target, LocalTarget):
            self._node.destinations.abandoned(request)
        elif side.target is not None:
            self._node.spawn(self._node.send_abandon(side.target.address, request))


def _rows(plan: CopyPlan) -> Iterable[tuple[int, int, int]]:
    return zip(
        plan.source_offsets.tolist(), plan.destination_offsets.tolist(), plan.sizes.tolist(), strict=True
    )


def _failure(state: TransferState) -> pb.TransferFailure.ValueType:
    return {
        TransferState.CANCELLED: pb.TRANSFER_FAILURE_CANCELLED,
        TransferState.EXPIRED: pb.TRANSFER_FAILURE_EXPIRED,
    }.get(state, pb.TRANSFER_FAILURE_SOURCE)


def _released(
    key: TransferKey, *, delivered: bool, message: str, stats: TransferStats | None = None
) -> pb.DaemonMessage:
    return pb.DaemonMessage(
        released=pb.Released(transfer=ref(key), delivered=delivered, message=message, stats=stats)
    )
