"""Other daemons: a gRPC channel for the control messages, a UCX endpoint for the bytes."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from services.kvd.ucx import PeerLostError
from splitwise.config import Address
from splitwise.rpc.channels import MAX_REDIAL_MS, open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.kvd.ucx import Endpoint, Ucx
    from splitwise.config import TlsSettings
    from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerAsyncStub

CLOSE_TIMEOUT_S = 2.0
STALL_S = 5.0
"""Flushes are waited for, and none has ended for so long: the peer is stopped, and given up."""
REDIAL_S = 2 * MAX_REDIAL_MS / 1e3
"""To a daemon that did not answer, the next attempt is made, and over, within this time."""


@dataclass(eq=False, slots=True)
class Line:
    """A UCX connection to one incarnation of a peer, with the remote keys unpacked on it."""

    endpoint: Endpoint
    ucx_address: bytes
    keys: dict[bytes, int] = field(default_factory=dict)
    flushing: int = 0
    moved_at: float = 0.0  # when the first of these flushes was posted, or the last one ended

    def flush(self) -> asyncio.Future[None]:
        """Return a future that is done when all puts so far are in the peer's memory."""
        flushed = self.endpoint.flush()
        if self.flushing == 0:
            self.moved_at = time.monotonic()
        self.flushing += 1
        flushed.add_done_callback(self._moved)
        return flushed

    def _moved(self, _: asyncio.Future[None]) -> None:
        self.flushing -= 1
        self.moved_at = time.monotonic()

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


def tell_transports(peer: str, transports: list[str]) -> None:
    """Log what a new connection uses, such as ``rc_mlx5/mlx5_0:1``, and warn when UCX fell back to TCP.

    It does so without a word, for example when two daemons do not see each other's processes.
    """
    log = get_logger().bind(peer=peer, transports=transports)
    if transports and all(name.startswith("tcp/") for name in transports):
        log.warning("peer.connected_by_tcp", remedy="splitwise doctor says what is missing for RDMA")
    else:
        log.info("peer.connected")


class Peers:
    """All daemons that this one talks to, by their gRPC address."""

    def __init__(self, ucx: Ucx, tls: TlsSettings, on_lost: Callable[[str, Line, str], None]) -> None:
        """`on_lost(address, line, why)` is called when a peer's UCX connection breaks."""
        self._ucx = ucx
        self._tls = tls
        self._on_lost = on_lost
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._lines: dict[str, Line] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._lines)

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
        endpoint.on_error = lambda why: self.drop(address, why, line)
        tell_transports(address, endpoint.transports())
        return line

    def drop_stalled(self, now: float) -> None:
        """Give up each connection on which puts hang: a peer that was stopped never reports an error."""
        for address, line in list(self._lines.items()):
            if line.flushing and now - line.moved_at > STALL_S:
                self.drop(address, f"no put has ended for {STALL_S:g} s", line)

    def drop(self, address: str, why: str, only: Line | None = None) -> None:
        """Give the UCX connection up (if `only` is still the one) and tell the owner of its transfers."""
        line = self._lines.get(address)
        if line is None or only not in (None, line):
            return
        del self._lines[address]
        get_logger().warning("peer.lost", peer=address, reason=why)
        task = asyncio.get_running_loop().create_task(line.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        self._on_lost(address, line, why)

    async def reachable(self, address: str, seconds: float) -> str | None:
        """Connect to a daemon's control interface; None, or why it cannot be reached now.

        What was not connected has sent nothing: only after this may a call have arrived
        whose answer is missing. The verdict is of an attempt made now: that earlier ones
        failed says nothing of a daemon that was started again, so the next one is awaited.
        """
        self.stub(address)
        channel = self._channels[address]
        state = channel.get_state(try_to_connect=True)
        failed_before = state is grpc.ChannelConnectivity.TRANSIENT_FAILURE
        try:
            async with asyncio.timeout(min(seconds, REDIAL_S) if failed_before else seconds):
                while state is not grpc.ChannelConnectivity.READY:
                    if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE and not failed_before:
                        return "nobody answers there"
                    await channel.wait_for_state_change(state)
                    state = channel.get_state(try_to_connect=True)
        except TimeoutError:
            return "nobody answers there" if failed_before else f"no connection within {seconds:g} s"
        return None

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
