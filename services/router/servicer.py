"""``splitwise.v1.Router`` over gRPC."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from services.router.metrics import REGISTRATIONS_REFUSED
from splitwise.errors import InvalidRequestError, NotFoundError, RemoteError
from splitwise.rpc.status import abort, status_of
from splitwise.rpc.v1 import router_pb2 as pb
from splitwise.rpc.v1.router_pb2_grpc import RouterServicer, add_RouterServicer_to_server
from splitwise.scheduling import events as ev
from splitwise.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.router.frontend import Frontend
    from services.router.registry import Registry
    from splitwise.config import RouterSettings

    Context = grpc.aio.ServicerContext[Any, Any]

WATCH_S = 0.25
SERVICE = "splitwise.v1.Router"


class Servicer(RouterServicer):
    """All methods of the router."""

    def __init__(self, frontend: Frontend, registry: Registry, settings: RouterSettings) -> None:
        self._frontend = frontend
        self._registry = registry
        self.settings = settings

    async def Generate(
        self, request: pb.GenerateRequest | None, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Serve one request. None stands for a message that could not be read."""
        tracing.accept(context.invocation_metadata() or ())
        if request is None:
            problem = "request: not a GenerateRequest (text that is not UTF-8, or a truncated message)"
            await abort(context, InvalidRequestError(problem))
        try:
            prepared = await self._frontend.prepare(request, time_left=context.time_remaining())
            async with aclosing(prepared.run()) as answers:
                async for message in answers:
                    yield message
        except RemoteError as error:
            await abort(context, error)

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        """Return the models that can be asked for."""
        del request, context
        return pb.ListModelsResponse(models=self._frontend.list_models())

    async def Register(self, request: pb.RegisterRequest, context: Context) -> pb.RegisterResponse:
        """Take a machine up or renew its lease."""
        try:
            await self._registry.register(request.machine, request.load)
        except RemoteError as error:
            REGISTRATIONS_REFUSED.labels(status_of(error).name).inc()
            await abort(context, error)
        return pb.RegisterResponse(
            lease_ms=self.settings.machine_lease_ms, heartbeat_ms=self.settings.heartbeat_ms
        )

    async def DescribeCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> pb.ClusterDescription:
        """Return the cluster now."""
        del request, context
        return self._frontend.cluster()

    async def WatchCluster(
        self, request: pb.DescribeClusterRequest, context: Context
    ) -> AsyncIterator[pb.ClusterDescription]:
        """Stream the cluster whenever it has changed, looked at four times a second."""
        del request, context
        last: bytes = b""
        while True:
            cluster = self._frontend.cluster()
            comparable = pb.ClusterDescription()
            comparable.CopyFrom(cluster)
            for machine in comparable.machines:
                machine.report_age_ms = 0
                machine.load.sequence = 0
            now = comparable.SerializeToString(deterministic=True)
            if now != last:
                last = now
                yield cluster
            await asyncio.sleep(WATCH_S)

    async def Explain(self, request: pb.ExplainRequest, context: Context) -> pb.Explanation:
        """Say why a request ran where it ran."""
        try:
            return self._frontend.explain(request.request_id)
        except RemoteError as error:
            await abort(context, error)

    async def DrainMachine(
        self, request: pb.DrainMachineRequest, context: Context
    ) -> pb.DrainMachineResponse:
        """Give a machine no new work, or work again."""
        dispatcher = self._frontend.dispatcher
        if request.machine_id not in dispatcher.scheduler.fleet.machines:
            known = ", ".join(sorted(dispatcher.scheduler.fleet.machines)) or "none"
            message = f"machine_id: {request.machine_id[:80]!r} is not in the cluster (machines: {known})"
            await abort(context, NotFoundError(message))
        now = time.monotonic()
        dispatcher.feed(ev.MachineDrained(now, request.machine_id, "operator", undo=request.undo))
        state = dispatcher.scheduler.fleet.machines[request.machine_id].condition
        return pb.DrainMachineResponse(state=state)


def add_servicer(servicer: Servicer, server: grpc.aio.Server) -> None:
    """Register all methods; Generate with a reader that lets it answer unreadable messages itself.

    grpc answers them with an error of its own that does not say what was wrong with what. Of
    several handlers of one method it calls the one that was registered last.
    """

    def read(message: bytes) -> pb.GenerateRequest | None:
        try:
            return pb.GenerateRequest.FromString(message)
        except DecodeError:
            return None

    add_RouterServicer_to_server(servicer, server)
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=read,
        response_serializer=pb.GenerateResponse.SerializeToString,
    )
    server.add_registered_method_handlers(SERVICE, {"Generate": handler})  # type: ignore[attr-defined]
