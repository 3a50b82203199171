"""The daemon's gRPC interfaces: `KvdPeer` for other daemons, `Kvd` for machines and operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from services.kvd.convert import geometry_of
from services.kvd.sources import RemoteTarget
from services.kvd.ucx import UcxError
from splitwise.kv.geometry import GeometryError
from splitwise.kv.identity import BadTransferError, transfer_key
from splitwise.kv.ledger import RejectedError, Rejection
from splitwise.kv.source import GrantedBlocks
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerServicer, KvdServicer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import NoReturn

    from services.kvd.node import Node

    Context = grpc.aio.ServicerContext[Any, Any]


_STATUS = {
    Rejection.UNKNOWN_ENGINE: grpc.StatusCode.NOT_FOUND,
    Rejection.UNKNOWN_TRANSFER: grpc.StatusCode.NOT_FOUND,
    Rejection.STALE_GENERATION: grpc.StatusCode.ABORTED,
    Rejection.BLOCK_OUT_OF_RANGE: grpc.StatusCode.INVALID_ARGUMENT,
    Rejection.TOO_MANY_TRANSFERS: grpc.StatusCode.RESOURCE_EXHAUSTED,
}


class PeerServicer(KvdPeerServicer):
    """What other daemons ask."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Grant(self, request: pb.GrantRequest, context: Context) -> pb.GrantResponse:
        """Take a destination's permission to write its blocks."""
        node = self._node
        try:
            key = transfer_key(request.transfer)
            geometry = geometry_of(request.geometry)
            geometry.check(request.remote_bytes)
            geometry.check_blocks(request.block_ids)
        except (BadTransferError, GeometryError) as error:
            await self._refuse(context, RejectedError(Rejection.BLOCK_OUT_OF_RANGE, str(error)))
        try:
            engine = node.require_source(request.source_engine_id, geometry)
            target = RemoteTarget(
                request.destination_kvd_address,
                geometry,
                request.remote_base,
                request.rkey,
                request.ucx_address,
            )
            node.peers.line(target.address, target.ucx_address).key(target.rkey)
            blocks = GrantedBlocks(request.first_block, tuple(request.block_ids))
            lease = request.lease_ms / 1e3
            node.sources.grant(
                key, engine, blocks, target,
                lease=lease, checksum=request.checksum, traceparent=request.traceparent,
            )  # fmt: skip
        except RejectedError as error:
            await self._refuse(context, error)
        except UcxError as error:
            await context.abort(
                grpc.StatusCode.UNAVAILABLE,
                f"no UCX connection to the KV daemon at {request.destination_kvd_address}: {error}",
            )
        return pb.GrantResponse(source_incarnation=node.incarnation, ucx_address=node.ucx_address)

    async def Revoke(self, request: pb.RevokeRequest, context: Context) -> pb.RevokeResponse:
        """Stop a transfer; the answer means that no put of it is in flight."""
        try:
            key = transfer_key(request.transfer)
        except BadTransferError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        self._node.counters.revokes += 1
        return pb.RevokeResponse(known=await self._node.sources.revoke(key, request.reason))

    async def Abandon(self, request: pb.AbandonRequest, context: Context) -> pb.AbandonResponse:
        """Hear that a source has stopped by itself."""
        del context
        self._node.destinations.abandoned(request)
        return pb.AbandonResponse()

    async def _refuse(self, context: Context, error: RejectedError) -> NoReturn:
        self._node.counters.reject(error.cause.value)
        status = _STATUS.get(error.cause, grpc.StatusCode.FAILED_PRECONDITION)
        await context.abort(status, str(error))
        raise AssertionError("abort raises")


class OperatorServicer(KvdServicer):
    """What machine services and operators ask."""

    def __init__(self, node: Node) -> None:
        self._node = node

    async def Describe(self, request: pb.DescribeKvdRequest, context: Context) -> pb.KvdDescription:
        """Say what the daemon is and holds."""
        del request, context
        node, counters = self._node, self._node.counters
        engines = [
            pb.EngineAttachment(
                engine_id=engine.engine_id,
                incarnation=engine.incarnation,
                memory_bytes=engine.memory.mapping.nbytes,
                fingerprint=engine.memory.geometry.fingerprint(),
                blocks_granted=node.destinations.granted_blocks(engine),
            )
            for engine in node.engines.values()
        ]
        return pb.KvdDescription(
            incarnation=node.incarnation,
            node=node.settings.node,
            ucx_version=node.ucx.version,
            ucx_library=node.ucx.library,
            transports=node.peers.transports(),
            engines=engines,
            counters=pb.KvdCounters(
                transfers_delivered=counters.delivered,
                transfers_failed=counters.failed,
                bytes_pushed=counters.bytes_pushed,
                puts=counters.puts,
                grants=counters.grants,
                revokes=counters.revokes,
                rejected=counters.rejected,
            ),
            transfers_open=node.open_transfers,
        )

    async def WatchTransfers(
        self, request: pb.WatchTransfersRequest, context: Context
    ) -> AsyncIterator[pb.TransferReport]:
        """Stream the reports on one engine's transfers until the caller goes."""
        del context
        queue = self._node.watch(request.engine_id)
        try:
            while True:
                yield await queue.get()
        finally:
            self._node.unwatch(request.engine_id, queue)
