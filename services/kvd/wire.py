"""How messages travel on the local socket between an engine and its node's KV daemon.

The socket is ``SOCK_SEQPACKET``. A message is a 4-byte little-endian length and that many
bytes of protobuf; it is cut into packets of at most `PACKET_BYTES`, since the kernel
refuses one packet above the socket's send buffer. Only the packets of one message at a
time are on the way in one direction. Descriptors travel with a message's first packet.

Engines import this module: it must stay free of gRPC and UCX.
"""

from __future__ import annotations

import array
import contextlib
import socket
import struct
from collections import deque
from dataclasses import dataclass, field

# A PushPlan or Reserve needs at most 5 bytes per block id: room for 800,000 blocks.
MAX_MESSAGE_BYTES = 4 << 20
PACKET_BYTES = 64 << 10
MAX_DESCRIPTORS = 4
_LENGTH = struct.Struct("<I")


class WireError(Exception):
    """The peer does not keep to the framing, or a message is too large."""


def packets(message: bytes) -> list[bytes]:
    """Cut one message into packets."""
    if len(message) > MAX_MESSAGE_BYTES:
        raise WireError(
            f"message of {len(message)} bytes is above the local socket's limit of {MAX_MESSAGE_BYTES}: "
            "send fewer block ids in one message"
        )
    framed = _LENGTH.pack(len(message)) + message
    return [framed[at : at + PACKET_BYTES] for at in range(0, len(framed), PACKET_BYTES)]


class Assembler:
    """Puts packets together to messages."""

    def __init__(self) -> None:
        self._parts = bytearray()

    def feed(self, packet: bytes) -> bytes | None:
        """Take one packet; return the message that it completes, if any."""
        self._parts += packet
        if len(self._parts) < _LENGTH.size:
            raise WireError(f"packet of {len(packet)} bytes is shorter than a message's length field")
        (length,) = _LENGTH.unpack_from(self._parts)
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"announced message of {length} bytes is above the limit of {MAX_MESSAGE_BYTES}")
        have = len(self._parts) - _LENGTH.size
        if have < length:
            return None
        if have > length:
            raise WireError(f"{have - length} bytes follow a message of {length} bytes in its last packet")
        message = bytes(self._parts[_LENGTH.size :])
        self._parts.clear()
        return message


@dataclass(slots=True)
class Outbox:
    """Packets waiting to be sent on a non-blocking socket."""

    queued_bytes: int = 0
    _packets: deque[tuple[bytes, list[int]]] = field(default_factory=deque)

    def add(self, message: bytes, descriptors: list[int] | None = None) -> None:
        """Queue one message; descriptors must stay open until it is sent."""
        for number, packet in enumerate(packets(message)):
            self._packets.append((packet, descriptors or [] if number == 0 else []))
            self.queued_bytes += len(packet)

    def flush(self, sock: socket.socket) -> bool:
        """Send what the socket takes now; True when nothing is left. Raises OSError when it is broken."""
        while self._packets:
            packet, descriptors = self._packets[0]
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))]
            try:
                sock.sendmsg(
                    [packet], ancillary if descriptors else [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
                )
            except (BlockingIOError, InterruptedError):
                return False
            self._packets.popleft()
            self.queued_bytes -= len(packet)
        return True


def receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    """Take one packet with its descriptors from a non-blocking socket.

    None: nothing there now. An empty packet: the other side closed. Raises `WireError` when
    the kernel had to cut something off, after closing the descriptors that came.
    """
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * array.array("i").itemsize)
    try:
        packet, ancillary, flags, _ = sock.recvmsg(
            PACKET_BYTES, space, socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
        )
    except (BlockingIOError, InterruptedError):
        return None
    descriptors = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        close_all(list(descriptors))
        raise WireError(f"packet above {PACKET_BYTES} bytes or with more than {MAX_DESCRIPTORS} descriptors")
    return packet, list(descriptors)


def close_all(descriptors: list[int]) -> None:
    """Close descriptors that nobody will use."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            socket.close(descriptor)
