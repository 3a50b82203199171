"""``splitwise.v1.PowerAgent`` over gRPC."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from splitwise.config.schema import NAME
from splitwise.errors import InvalidRequestError, RemoteError
from splitwise.power import Role
from splitwise.rpc.status import abort
from splitwise.rpc.v1 import power_pb2 as pb
from splitwise.rpc.v1.common_pb2 import POOL_MIXED, POOL_PROMPT, POOL_TOKEN
from splitwise.rpc.v1.power_pb2_grpc import PowerAgentServicer

if TYPE_CHECKING:
    import grpc.aio

    from services.power.agent import PowerAgent
    from services.power.service import Worker
    from splitwise.rpc.v1.common_pb2 import MachineIdentity

    Context = grpc.aio.ServicerContext[Any, Any]

R = TypeVar("R")
LEASE_MS = (100, 600_000)


class Servicer(PowerAgentServicer):
    """All methods; the agent itself runs in its own thread."""

    def __init__(self, agent: PowerAgent, worker: Worker) -> None:
        self._agent = agent
        self._worker = worker

    async def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        """Take or renew a machine's claim."""
        try:
            role = check_hold(request)
            return await self._worker.run(self._agent.hold, request, role)
        except RemoteError as error:
            await abort(context, error)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        """Take a machine's claim back."""
        identity = request.identity
        try:
            _check_identity(identity)
            await self._worker.run(self._agent.release, identity.machine_id, identity.incarnation)
        except RemoteError as error:
            await abort(context, error)
        return pb.ReleaseResponse()

    async def Describe(self, request: pb.DescribePowerRequest, context: Context) -> pb.PowerDescription:
        """Return every GPU, as last read."""
        del request
        try:
            return await self._worker.run(self._agent.describe)
        except RemoteError as error:
            await abort(context, error)

    async def Suspend(self, request: pb.SuspendRequest, context: Context) -> pb.PowerDescription:
        """Give all limits back, or allow caps again."""
        try:
            return await self._worker.run(lambda: self._agent.suspend(undo=request.undo))
        except RemoteError as error:
            await abort(context, error)


def check_hold(request: pb.HoldRequest) -> Role:
    """Return what the machine does; raises `InvalidRequestError` that names the field at fault."""
    _check_identity(request.identity)
    if request.home_pool not in (POOL_PROMPT, POOL_TOKEN):
        raise InvalidRequestError("home_pool: must be POOL_PROMPT or POOL_TOKEN")
    if not LEASE_MS[0] <= request.lease_ms <= LEASE_MS[1]:
        raise InvalidRequestError(f"lease_ms: {request.lease_ms} is not from {LEASE_MS[0]} to {LEASE_MS[1]}")
    if not 0 <= request.share_watts < float("inf"):
        raise InvalidRequestError(f"share_watts: {request.share_watts} is no number of watts")
    if request.pool == POOL_MIXED:
        return Role.BORROWED if request.home_pool == POOL_TOKEN else Role.MIXED
    if request.pool not in (POOL_PROMPT, POOL_TOKEN):
        raise InvalidRequestError("pool: must be POOL_PROMPT, POOL_TOKEN or POOL_MIXED")
    return Role.PROMPT if request.pool == POOL_PROMPT else Role.TOKEN


def _check_identity(identity: MachineIdentity) -> None:
    if not re.fullmatch(NAME, identity.machine_id):
        raise InvalidRequestError(
            f"identity.machine_id: {identity.machine_id[:80]!r} is not a name (1 to 64 of A-Z a-z 0-9 . _ -)"
        )
