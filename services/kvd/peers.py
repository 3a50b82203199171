"""Other daemons: a gRPC channel for the control messages, a UCX endpoint for the bytes."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.kvd.ucx import PeerLostError
from splitwise.config import Address
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc.aio

    from services.kvd.ucx import Endpoint, Ucx
    from splitwise.config import TlsSettings
    from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerAsyncStub

CLOSE_TIMEOUT_S = 2.0


@dataclass(eq=False, slots=True)
class Line:
    """A UCX connection to one incarnation of a peer, with the remote keys unpacked on it."""

    endpoint: Endpoint
    ucx_address: bytes
    keys: dict[bytes, int] = field(default_factory=dict)

    def key(self, packed: bytes) -> int:
        """Return a remote key, unpacked once."""
        if packed not in self.keys:
            self.keys[packed] = self.endpoint.unpack_rkey(packed)
        return self.keys[packed]

    async def close(self) -> None:
        """Close by force; when this returns, no put of the line is in flight."""
        for key in self.keys.values():
            self.endpoint.destroy_rkey(key)
        self.keys.clear()
        try:
            await asyncio.wait_for(asyncio.shield(self.endpoint.close()), CLOSE_TIMEOUT_S)
        except (TimeoutError, PeerLostError) as error:
            get_logger().warning("peer.close_failed", error=str(error))


class Peers:
    """All daemons that this one talks to, by their gRPC address."""

    def __init__(self, ucx: Ucx, tls: TlsSettings, on_lost: Callable[[str, str], None]) -> None:
        """`on_lost(address, why)` is called when a peer's UCX connection breaks."""
        self._ucx = ucx
        self._tls = tls
        self._on_lost = on_lost
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._lines: dict[str, Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def stub(self, address: str) -> KvdPeerAsyncStub:
        """Return the control interface of the daemon at `address`; raises ValueError for a bad one."""
        channel = self._channels.get(address)
        if channel is None:
            parsed = Address.parse(address)
            channel = self._channels[address] = open_channel(parsed, tls=self._tls, role=Role.KVD)
        return KvdPeerStub(channel)

    def line(self, address: str, ucx_address: bytes) -> Line:
        """Return the connection to this incarnation of a peer; an older one's is closed."""
        line = self._lines.get(address)
        if line is not None and line.ucx_address == ucx_address and line.endpoint.error is None:
            return line
        if line is not None:
            self.drop(address, "it was restarted")
        endpoint = self._ucx.connect(ucx_address)
        line = self._lines[address] = Line(endpoint, ucx_address)
        endpoint.on_error = lambda why: self.drop(address, why)
        return line

    def drop(self, address: str, why: str) -> None:
        """Give the UCX connection up and tell the owner of its transfers."""
        line = self._lines.pop(address, None)
        if line is None:
            return
        get_logger().warning("peer.lost", peer=address, why=why)
        task = asyncio.get_running_loop().create_task(line.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._on_lost(address, why)

    def transports(self) -> list[str]:
        """Name the transports in use towards any peer."""
        return sorted({name for line in self._lines.values() for name in line.endpoint.transports()})

    async def close(self) -> None:
        """Close every connection."""
        for address in list(self._lines):
            line = self._lines.pop(address)
            await line.close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=CLOSE_TIMEOUT_S)
        for channel in self._channels.values():
            await channel.close(None)
