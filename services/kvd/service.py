"""The daemon's process: sockets open, engines served, drained and closed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.kvd.limits import check_host
from services.kvd.metrics import export
from services.kvd.node import Node
from services.kvd.servicers import OperatorServicer, PeerServicer
from services.kvd.sessions import LocalServer
from services.kvd.ucx import UcxError
from splitwise.errors import ConfigError
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.v1.kvd_pb2_grpc import add_KvdPeerServicer_to_server, add_KvdServicer_to_server

if TYPE_CHECKING:
    from splitwise.config import Settings
    from splitwise.launch.service import Lifecycle

SERVICES = ("splitwise.v1.Kvd", "splitwise.v1.KvdPeer")
STOP_GRACE_S = 1.0


async def serve(settings: Settings, lifecycle: Lifecycle) -> None:
    """Run the daemon until it is told to stop."""
    lifecycle.loading("ucx")
    check_host(settings.kvd.ucx.tls)
    try:
        node = Node(settings.kvd, settings.tls)
    except UcxError as error:
        raise ConfigError(f"kvd.ucx: {error}") from error
    export(node)
    lifecycle.on_reload(lambda changed: node.use(changed.kvd))
    server = RpcServer(settings.kvd.listen, SERVICES, tls=settings.tls)
    add_KvdPeerServicer_to_server(PeerServicer(node), server.grpc)
    add_KvdServicer_to_server(OperatorServicer(node), server.grpc)
    local = LocalServer(node, settings.kvd.socket)
    local.start()
    try:
        address = await server.start()
        advertise = settings.kvd.advertise or address
        node.start(advertise)
        await server.set_serving(True)
        lifecycle.ready(
            advertise, ucx=node.ucx.version, library=node.ucx.library, socket=str(settings.kvd.socket)
        )
        await lifecycle.stop.wait()
        await server.set_serving(False)
        await node.drain(node.settings.drain_s)
    finally:
        local.close()
        await server.stop(STOP_GRACE_S)
        await node.close()
