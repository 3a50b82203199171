"""One connection of an engine to its KV daemon: a socket, its outgoing queue, a layer counter.

Engines import this module: it must stay free of gRPC and UCX.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from services.kvd.wire import Assembler, Outbox, WireError, close_all, receive
from splitwise.rpc.v1.kvd_pb2 import DaemonMessage

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator

    from splitwise.rpc.v1.kvd_pb2 import EngineMessage

# What may wait for a daemon that does not read. Above this nothing more is sent on the connection.
MAX_QUEUED_BYTES = 64 << 20


class LinkLostError(Exception):
    """The daemon is gone, or this connection to it is of no more use."""


class Link:
    """A connected socket. `send`, `count_layer` and `close` need `lock`; `messages` runs in one thread.

    A connection that is of no more use is only half closed: the engine's memory may be
    written until the daemon has closed its end, so that nothing ends before.

    The layer counter is an eventfd, new with each connection, so that what was counted for a
    dead daemon is never taken for a later pass's layers. `progress` is the sum of all
    increments.
    """

    def __init__(self, path: str, stop_fd: int, lock: threading.RLock) -> None:
        self.progress = 0
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.setblocking(False)
            self._socket.connect(path)
            self._layers_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError:
            self._socket.close()
            raise
        self._stop_fd = stop_fd
        self._lock = lock
        self._outbox = Outbox()
        self._broken: str | None = None
        self._closed = False

    def send(self, message: EngineMessage, memory_fd: int | None = None) -> None:
        """Send now or, when the daemon is slow, later. Never blocks and never raises for a dead daemon."""
        if self._closed or self._broken is not None:
            return
        descriptors = [] if memory_fd is None else [memory_fd, self._layers_fd]
        self._outbox.add(message.SerializeToString(), descriptors)
        try:
            done = self._outbox.flush(self._socket)
        except OSError:
            return  # the receiving thread sees the end of the connection and reports it
        if self._outbox.queued_bytes > MAX_QUEUED_BYTES:
            self._give_up(f"it has not read {self._outbox.queued_bytes} bytes")
        elif not done:
            os.eventfd_write(self._wake_fd, 1)

    def count_layer(self) -> None:
        """Add one to the layer counter."""
        if not self._closed:
            self.progress += 1
            os.eventfd_write(self._layers_fd, 1)

    def messages(self) -> Iterator[DaemonMessage]:
        """Yield the daemon's messages until it is lost (`LinkLostError`) or the client is stopped."""
        assembler = Assembler()
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        while True:
            events = dict(poll.poll())
            if self._stop_fd in events:
                return
            if self._wake_fd in events:
                os.eventfd_read(self._wake_fd)
            try:
                yield from self._received(assembler)
                with self._lock:
                    idle = self._broken is not None or self._outbox.flush(self._socket)
            except OSError as error:
                raise LinkLostError(f"connection lost ({error.strerror or error})") from error
            poll.modify(self._socket, select.POLLIN if idle else select.POLLIN | select.POLLOUT)

    def _received(self, assembler: Assembler) -> Iterator[DaemonMessage]:
        while True:
            try:
                packet = receive(self._socket)
                if packet is None:
                    return
                data, descriptors = packet
                close_all(descriptors)
                if not data:
                    raise LinkLostError(self._broken or "it closed the connection")
                complete = assembler.feed(data) if self._broken is None else None
                message = None if complete is None else DaemonMessage.FromString(complete)
            except (WireError, DecodeError) as error:
                with self._lock:
                    self._give_up(f"it broke the framing: {error}")
                continue
            if message is not None:
                yield message

    def _give_up(self, why: str) -> None:
        self._broken = why
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close every descriptor; idempotent."""
        if not self._closed:
            self._closed = True
            self._socket.close()
            os.close(self._layers_fd)
            os.close(self._wake_fd)
