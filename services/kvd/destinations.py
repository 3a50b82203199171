"""The destination half of all transfers: carries out what `splitwise.kv.destination` decides."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from services.kvd.convert import FAILURE_OF_CAUSE, cause_of, geometry_message, ref
from services.kvd.sources import LocalTarget
from services.kvd.ucx import UcxError
from splitwise.kv.destination import (
    Acknowledge,
    Cause,
    Deliver,
    DestinationTransfer,
    Fail,
    Fence,
    Revoke,
    SendGrant,
    Verify,
)
from splitwise.kv.geometry import GeometryError
from splitwise.kv.identity import TransferKey
from splitwise.kv.integrity import LayerDigests
from splitwise.kv.ledger import Ledger, RejectedError, Rejection
from splitwise.kv.source import GrantedBlocks
from splitwise.kv.states import FINAL, TransferState
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.telemetry import get_logger
from splitwise.telemetry.tracing import NO_SPAN, start_span

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.kvd.engines import Engine
    from services.kvd.node import Node
    from services.kvd.peers import Line
    from splitwise.kv.destination import DestinationAction
    from splitwise.kv.geometry import Geometry
    from splitwise.telemetry.tracing import Span

GRANT_TIMEOUT_S = 5.0
REVOKE_TIMEOUT_S = 2.0
WITHDRAW_S = 60.0
"""So long a source that does not answer is told again; its own lease ends its half in any case."""
VERIFY_SLICE_BYTES = 4 << 20
"""Hashed without a pause; then the event loop gets its turn."""

# What a source answers to a grant that it will never use.
_REFUSALS = {
    grpc.StatusCode.NOT_FOUND: Cause.REFUSED,
    grpc.StatusCode.INVALID_ARGUMENT: Cause.REFUSED,
    grpc.StatusCode.FAILED_PRECONDITION: Cause.REFUSED,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Cause.REFUSED,
    grpc.StatusCode.PERMISSION_DENIED: Cause.REFUSED,
    grpc.StatusCode.ABORTED: Cause.STALE,
}


@dataclass(eq=False, slots=True)
class DestinationSide:
    """One transfer with all that the daemon needs to carry it out."""

    transfer: DestinationTransfer
    engine: Engine
    request: pb.Reserve
    local: bool
    source_ucx_address: bytes = b""
    signal: pb.CompletionSignal | None = None
    acknowledged: bool = False
    span: Span = NO_SPAN
    grant_sent: bool = False  # the source may have the addresses of the engine's memory

    @property
    def key(self) -> TransferKey:
        """The transfer's name."""
        return self.transfer.key


class Destinations:
    """All destination halves of this daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._ledger: Ledger[DestinationSide] = Ledger(limit=node.settings.max_transfers)

    def __len__(self) -> int:
        return len(self._ledger)

    def use_limit(self, limit: int) -> None:
        """Take up so many transfers at once from now on."""
        self._ledger.limit = limit

    def granted_blocks(self, engine: Engine) -> int:
        """Count the blocks of an engine that somebody may write."""
        return sum(len(side.request.block_ids) for side in self._ledger if side.engine is engine)

    # ---- from the engine

    def reserve(self, engine: Engine, request: pb.Reserve, key: TransferKey) -> None:
        """An engine holds blocks for a transfer: grant them to the source."""
        geometry = engine.memory.geometry
        per_block = geometry.layers * geometry.block_bytes_per_layer
        deadline = self._node.now() + request.lease_ms / 1e3
        transfer = DestinationTransfer(key, len(request.block_ids) * per_block, deadline)
        local = self._node.is_here(request.source_kvd_address)
        side = DestinationSide(transfer, engine, request, local)
        side.span = start_span(
            "KV receive", request.traceparent, transfer=str(key), blocks=len(request.block_ids)
        )
        try:
            self._node.require_serving()
            self._check_blocks(geometry, request)
            self._ledger.add(key, side)
        except RejectedError as error:
            self._node.counters.reject(error.cause.value)
            stale = error.cause is Rejection.STALE_GENERATION
            failure = pb.TRANSFER_FAILURE_STALE if stale else pb.TRANSFER_FAILURE_REFUSED
            engine.tell(_failed(key, failure, str(error)))
            side.span.end(error=error.cause.value)
            return
        self._do(side, transfer.reserve())

    def cancel(self, key: TransferKey, reason: str) -> None:
        """The engine gives the transfer up."""
        side = self._ledger.get(key)
        if side is not None:
            self._do(side, side.transfer.stop(Cause.CANCELLED, reason))

    def engine_gone(self, engine: Engine) -> None:
        """An engine has detached or died: its blocks have no owner, but a source may write yet."""
        for side in self._ledger:
            if side.engine is engine:
                message = f"engine {engine.engine_id} is gone"
                self._do(side, side.transfer.stop(Cause.CANCELLED, message))

    # ---- from the source

    def signalled(self, signal: pb.CompletionSignal) -> None:
        """The source says that everything is in place."""
        key = TransferKey(signal.transfer.transfer_id, signal.transfer.generation)
        try:
            side = self._ledger.require(key)
        except RejectedError as error:
            self._node.counters.reject(error.cause.value)
            return
        if side.signal is None:
            side.signal = signal
            self._do(side, side.transfer.signalled(signal.first_token))

    def abandoned(self, request: pb.AbandonRequest) -> None:
        """The source has stopped by itself."""
        key = TransferKey(request.transfer.transfer_id, request.transfer.generation)
        side = self._ledger.get(key)
        if side is not None:
            self._do(side, side.transfer.abandoned(cause_of(request.cause), request.message))

    def peer_lost(self, address: str, line: Line, why: str) -> None:
        """The connection to one incarnation of a daemon broke.

        It may live and write yet, so this begins with a revoke.
        """
        for side in self._ledger:
            known = (side.request.source_kvd_address, side.source_ucx_address)
            if not side.local and known == (address, line.ucx_address):
                message = f"the KV daemon at {address} was lost: {why}"
                self._do(side, side.transfer.stop(Cause.PEER_LOST, message))

    # ---- time

    def tick(self) -> None:
        """Look at deadlines."""
        now = self._node.now()
        for side in self._ledger:
            actions = side.transfer.tick(now)
            if actions:
                self._node.counters.reject(Rejection.EXPIRED.value)
            self._do(side, actions)

    def stop_all(self, reason: str) -> None:
        """Give everything up."""
        for side in self._ledger:
            self._do(side, side.transfer.stop(Cause.CANCELLED, reason))

    # ---- inside

    @staticmethod
    def _check_blocks(geometry: Geometry, request: pb.Reserve) -> None:
        try:
            geometry.check_blocks(request.block_ids)
        except GeometryError as error:
            raise RejectedError(Rejection.BLOCK_OUT_OF_RANGE, str(error)) from None

    def _do(self, side: DestinationSide, actions: Iterable[DestinationAction]) -> None:
        for action in actions:
            if isinstance(action, SendGrant):
                self._grant(side)
            elif isinstance(action, Verify):
                self._node.spawn(self._verify(side))
            elif isinstance(action, Deliver):
                self._deliver(side, action)
            elif isinstance(action, Acknowledge):
                self._acknowledge(side)
            elif isinstance(action, Revoke):
                self._node.counters.revokes += 1
                self._node.spawn(self._revoke(side, action.reason))
            elif isinstance(action, Fence):
                self._fence(side.engine)
            elif isinstance(action, Fail):
                self._fail(side, action)
        if side.transfer.state in FINAL:
            self._ledger.end(side.key, side.transfer.state.value)

    def _grant(self, side: DestinationSide) -> None:
        self._node.counters.grants += 1
        if side.local:
            self._grant_here(side)
        else:
            self._node.spawn(self._grant_there(side))

    def _grant_here(self, side: DestinationSide) -> None:
        request = side.request
        blocks = GrantedBlocks(request.first_block, tuple(request.block_ids))
        try:
            source = self._node.require_source(request.source_engine_id, side.engine.memory.geometry)
            self._node.sources.grant(
                side.key, source, blocks, LocalTarget(side.engine),
                lease=request.lease_ms / 1e3, checksum=self._node.settings.checksum,
                traceparent=side.span.traceparent,
            )  # fmt: skip
        except RejectedError as error:
            self._node.counters.reject(error.cause.value)
            self._do(side, side.transfer.grant_refused(_refusal(error), str(error)))
            return
        self._do(side, side.transfer.granted())

    async def _grant_there(self, side: DestinationSide) -> None:
        address = side.request.source_kvd_address
        try:
            problem = await self._node.peers.reachable(address, GRANT_TIMEOUT_S)
        except ValueError as error:
            self._do(side, side.transfer.grant_refused(Cause.REFUSED, f"source_kvd_address: {error}"))
            return
        if problem is not None:  # nothing was sent, so nobody can write
            text = f"the KV daemon at {address} cannot be reached: {problem}"
            self._do(side, side.transfer.grant_refused(Cause.PEER_LOST, text))
            return
        if side.transfer.state is not TransferState.PLANNED:
            return  # given up meanwhile
        try:
            answer = await self._node.peers.stub(address).Grant(
                self._grant_message(side), timeout=GRANT_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            self._grant_failed(side, error)
        else:
            side.source_ucx_address = answer.ucx_address
            self._watch(side)
            self._do(side, side.transfer.granted())
            if side.acknowledged:
                self._acknowledge(side)

    def _grant_message(self, side: DestinationSide) -> pb.GrantRequest:
        request, memory = side.request, side.engine.memory
        side.grant_sent = True
        return pb.GrantRequest(
            transfer=ref(side.key),
            source_engine_id=request.source_engine_id,
            destination_kvd_address=self._node.address,
            destination_incarnation=self._node.incarnation,
            destination_engine_id=side.engine.engine_id,
            geometry=geometry_message(memory.geometry),
            first_block=request.first_block,
            block_ids=request.block_ids,
            remote_base=memory.mapping.address,
            remote_bytes=memory.mapping.nbytes,
            rkey=memory.registration.rkey(),
            ucx_address=self._node.ucx_address,
            lease_ms=request.lease_ms,
            checksum=self._node.settings.checksum,
            node_id=self._node.settings.node,
            traceparent=side.span.traceparent,
        )

    def _watch(self, side: DestinationSide) -> None:
        """Connect to the source, so that its death is noticed and the acknowledgement has a way."""
        try:
            self._node.peers.line(side.request.source_kvd_address, side.source_ucx_address)
        except UcxError as error:
            self._do(side, side.transfer.stop(Cause.PEER_LOST, str(error)))

    def _grant_failed(self, side: DestinationSide, error: grpc.aio.AioRpcError) -> None:
        address, code = side.request.source_kvd_address, error.code()
        refusal = _REFUSALS.get(code)
        text = f"the KV daemon at {address} refused the grant: {error.details()}"
        if refusal is not None:
            self._do(side, side.transfer.grant_refused(refusal, text))
            return
        # It may have the grant all the same: the answer was lost, not necessarily the question.
        text = f"the KV daemon at {address} cannot be reached ({code.name}): {error.details()}"
        self._do(side, side.transfer.stop(Cause.PEER_LOST, text))

    async def _verify(self, side: DestinationSide) -> None:
        problem = await self._problem(side)
        if problem is not None:
            self._node.counters.reject(Rejection.CORRUPT.value)
        self._do(side, side.transfer.verified(problem))

    async def _problem(self, side: DestinationSide) -> str | None:
        signal, expected = side.signal, side.transfer.expected_bytes
        if signal is None:
            return "there was no signal"
        if signal.bytes != expected:
            return f"{signal.bytes} bytes were pushed, {expected} are needed"
        if not signal.checksummed:
            return "the source sent no checksum" if self._node.settings.checksum else None
        digests = LayerDigests(side.engine.memory.geometry.layers)
        hashed = 0
        for layer in range(side.engine.memory.geometry.layers):
            for block in side.request.block_ids:
                view = side.engine.view(layer, block)
                digests.add(layer, view)
                hashed += len(view)
            if hashed >= VERIFY_SLICE_BYTES:
                hashed = 0
                await asyncio.sleep(0)
        if side.engine.gone:
            return f"engine {side.engine.engine_id} is gone"
        if digests.value() != signal.checksum:
            return "the checksum over all blocks differs: bytes were lost, changed or misplaced"
        return None

    def _deliver(self, side: DestinationSide, action: Deliver) -> None:
        stats = side.signal.stats if side.signal is not None else None
        self._node.counters.delivered += 1
        side.span.end()
        received = pb.Received(transfer=ref(side.key), first_token=action.first_token, stats=stats)
        side.engine.tell(pb.DaemonMessage(received=received))
        self._node.report(
            side.engine.engine_id, pb.TransferReport(transfer=ref(side.key), delivered=True, stats=stats)
        )

    def _acknowledge(self, side: DestinationSide) -> None:
        side.acknowledged = True
        if side.local:
            self._node.sources.acknowledged(side.key)
        elif side.source_ucx_address:
            message = pb.Acknowledgement(transfer=ref(side.key)).SerializeToString()
            self._node.acknowledge(side.request.source_kvd_address, side.source_ucx_address, message)

    async def _revoke(self, side: DestinationSide, reason: str) -> None:
        if side.local:
            await self._node.sources.revoke(side.key, reason)
            self._do(side, side.transfer.revoked())
            return
        if not side.grant_sent:
            self._do(side, side.transfer.revoked())
            await self._ask_to_stop(side, reason)  # its prompt would wait for the grant
        elif await self._ask_to_stop(side, reason):
            self._do(side, side.transfer.revoked())
        else:
            self._do(side, side.transfer.revoke_unanswered())

    async def _ask_to_stop(self, side: DestinationSide, reason: str) -> bool:
        """Revoke at the source's daemon; whether it has confirmed."""
        request = pb.RevokeRequest(transfer=ref(side.key), reason=reason)
        try:
            stub = self._node.peers.stub(side.request.source_kvd_address)
            await stub.Revoke(request, timeout=REVOKE_TIMEOUT_S)
        except (grpc.aio.AioRpcError, ValueError):
            return False
        return True

    async def _withdraw(self, side: DestinationSide, reason: str) -> None:
        """Tell a source that its grant is worth nothing any more, also one that wakes up later."""
        end = self._node.now() + WITHDRAW_S
        while self._node.now() < end:
            if await self._ask_to_stop(side, reason):
                return
            await asyncio.sleep(1.0)

    def _fence(self, engine: Engine) -> None:
        """Fence the engine's memory; that ends every transfer whose source had the old addresses."""
        get_logger().warning("engine.fenced", engine=engine.engine_id)
        self._node.counters.fences += 1
        if not engine.gone:
            self._node.sources.fenced(engine)
            engine.memory.fence(self._node.ucx)
        engine.memory.late_writers = True
        for side in self._ledger:
            if side.engine is engine and side.grant_sent:
                actions = side.transfer.fenced()
                if actions:  # also when its revoke had no answer: it may have slept
                    self._node.spawn(self._withdraw(side, "the memory was fenced against another writer"))
                self._do(side, actions)

    def _fail(self, side: DestinationSide, action: Fail) -> None:
        self._node.counters.failed += 1
        failure = FAILURE_OF_CAUSE[action.cause]
        side.span.end(error=action.cause.value)
        side.engine.tell(_failed(side.key, failure, action.message))
        self._node.report(
            side.engine.engine_id,
            pb.TransferReport(transfer=ref(side.key), failure=failure, message=action.message),
        )


def _refusal(error: RejectedError) -> Cause:
    return Cause.STALE if error.cause is Rejection.STALE_GENERATION else Cause.REFUSED


def _failed(key: TransferKey, failure: pb.TransferFailure.ValueType, message: str) -> pb.DaemonMessage:
    return pb.DaemonMessage(failed=pb.TransferFailed(transfer=ref(key), cause=failure, message=message))
