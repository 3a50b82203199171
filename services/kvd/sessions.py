"""The local socket: engines attach here and talk about their transfers."""

from __future__ import annotations

import asyncio
import os
import socket
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

from google.protobuf.message import DecodeError

from services.kvd.convert import geometry_of
from services.kvd.engines import Engine, EngineMemory, LayerProgress
from services.kvd.mapping import MappingError, open_mapping
from services.kvd.ucx import UcxError
from services.kvd.wire import Assembler, Outbox, WireError, close_all, receive
from splitwise.errors import ListenError
from splitwise.kv.geometry import GeometryError
from splitwise.kv.identity import BadTransferError, transfer_key
from splitwise.kv.ledger import Rejection
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from pathlib import Path

    from services.kvd.node import Node

MAX_QUEUED_BYTES = 16 << 20
"""Notices for an engine that does not read; then its session is closed."""
DESCRIPTORS = 2  # KV memory, layer counter


class RefusedError(Exception):
    """An engine's attach is refused; the message says why."""


class Session:
    """One connection of an engine."""

    def __init__(self, node: Node, connection: socket.socket) -> None:
        self._node = node
        self._socket = connection
        self._loop = asyncio.get_running_loop()
        self._assembler = Assembler()
        self._outbox = Outbox()
        self._descriptors: list[int] = []
        self._engine: Engine | None = None
        self._owner = False  # this session brought the memory
        self.closed = False
        self._loop.add_reader(connection, self.read)

    def send(self, message: pb.DaemonMessage) -> None:
        """Send now or when the engine reads again."""
        if self.closed:
            return
        self._outbox.add(message.SerializeToString())
        if self._outbox.queued_bytes > MAX_QUEUED_BYTES:
            self.close(f"the engine has not read {self._outbox.queued_bytes} bytes of notices")
            return
        self._flush()

    def close(self, why: str) -> None:
        """End the session; with it, if it brought the memory, the engine."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        close_all(self._descriptors)
        engine = self._engine
        if engine is not None and self._owner:
            self._loop.remove_reader(engine.layers_fd)
            self._node.detach(engine)
            os.close(engine.layers_fd)
            get_logger().info("engine.detached", engine=engine.engine_id, reason=why)
        elif engine is not None and self in engine.sessions:
            engine.sessions.remove(self)
        # Last: for the engine this is the sign that its memory is not touched any more.
        self._socket.close()

    def _flush(self) -> None:
        try:
            done = self._outbox.flush(self._socket)
        except OSError as error:
            self._loop.call_soon(self.close, f"connection lost ({error.strerror})")
            return
        if done:
            self._loop.remove_writer(self._socket)
        else:
            self._loop.add_writer(self._socket, self._flush)

    def read(self) -> None:
        """Take what the engine has sent."""
        try:
            while not self.closed and (packet := receive(self._socket)) is not None:
                data, descriptors = packet
                self._descriptors += descriptors
                if not data:
                    self.close("closed by the engine")
                    return
                complete = self._assembler.feed(data)
                if complete is not None:
                    self._catch_up()
                    self._take(pb.EngineMessage.FromString(complete))
        except (WireError, DecodeError, BadTransferError, GeometryError, ValueError) as error:
            get_logger().warning("engine.bad_message", engine=self._name(), error=str(error))
            self._refuse(str(error))
        except OSError as error:
            self.close(f"connection lost ({error.strerror})")

    def _catch_up(self) -> None:
        """Before a word of the session with the memory, take what the engine's others have said.

        A rank of an engine learns of a transfer from the engine's scheduler, which has announced
        it here before, on its own session: the announcement is there, but this may be read first.
        """
        if self._owner and self._engine is not None:
            for session in list(self._engine.sessions):
                if session is not self:
                    session.read()

    def _name(self) -> str:
        return self._engine.engine_id if self._engine is not None else "(not attached)"

    def _refuse(self, reason: str) -> None:
        self.send(pb.DaemonMessage(refused=pb.Refused(reason=reason)))
        self.close(reason)

    def _take(self, message: pb.EngineMessage) -> None:
        kind = message.WhichOneof("message")
        if kind == "attach":
            try:
                self._attach(message.attach)
            except (RefusedError, MappingError, GeometryError, UcxError) as error:
                get_logger().warning("engine.refused", engine=message.attach.engine_id, error=str(error))
                self._refuse(str(error))
            return
        engine = self._engine
        if engine is None:
            raise ValueError("the first message must be attach")
        if engine.gone:
            raise ValueError(f"engine {engine.engine_id} was replaced by a newer incarnation")
        self._dispatch(engine, kind or "", message)

    def _dispatch(self, engine: Engine, kind: str, message: pb.EngineMessage) -> None:
        node = self._node
        if kind == "push_plan":
            node.sources.plan(engine, message.push_plan)
        elif kind == "first_token":
            first = message.first_token
            node.sources.first_token(engine, transfer_key(first.transfer), first.token_id)
        elif kind == "expect":
            node.sources.expect(engine, message.expect, transfer_key(message.expect.transfer))
        elif kind == "reserve":
            node.destinations.reserve(engine, message.reserve, transfer_key(message.reserve.transfer))
        elif kind == "cancel":
            key, reason = transfer_key(message.cancel.transfer), message.cancel.reason
            node.sources.cancel(key, reason)
            node.destinations.cancel(key, reason)
        else:
            raise ValueError("a message without content")

    # ---- attach

    def _attach(self, message: pb.Attach) -> None:
        if self._engine is not None:
            raise RefusedError("this session is attached already")
        if not message.engine_id:
            raise RefusedError("engine_id is empty")
        if self._node.draining:
            raise RefusedError("the KV daemon is stopping")
        known = self._node.engines.get(message.engine_id)
        if known is not None and message.incarnation < known.incarnation:
            self._node.counters.reject(Rejection.STALE_INCARNATION.value)
            raise RefusedError(
                f"engine {message.engine_id} has a newer incarnation attached ({known.incarnation})"
            )
        engine = self._with_memory(message) if message.memory else self._without_memory(message, known)
        self._engine = engine
        engine.sessions.append(self)
        attached = pb.Attached(
            daemon_incarnation=self._node.incarnation, fingerprint=engine.memory.geometry.fingerprint()
        )
        self.send(pb.DaemonMessage(attached=attached))

    @staticmethod
    def _without_memory(message: pb.Attach, known: Engine | None) -> Engine:
        if known is None or known.incarnation != message.incarnation:
            raise RefusedError(f"engine {message.engine_id} has no memory attached: attach that first")
        return known

    def _with_memory(self, message: pb.Attach) -> Engine:
        geometry = geometry_of(message.geometry)
        geometry.check(message.memory_bytes)
        if len(self._descriptors) != DESCRIPTORS:
            count = len(self._descriptors)
            raise RefusedError(f"{count} file descriptors came with attach, {DESCRIPTORS} are needed")
        memory_fd, layers_fd = self._descriptors
        self._descriptors = [layers_fd]
        mapping = open_mapping(message.memory_kind, memory_fd, message.memory_bytes)
        try:
            registration = self._node.ucx.register(mapping.address, mapping.nbytes, mapping.kind)
        except UcxError:
            mapping.close(late_writers=False)
            raise
        self._descriptors = []
        memory = EngineMemory(geometry, mapping, registration)
        engine = Engine(
            message.engine_id, message.incarnation, memory, layers_fd, LayerProgress(geometry.layers)
        )
        os.set_blocking(layers_fd, False)
        self._node.attach(engine)
        self._owner = True
        self._loop.add_reader(layers_fd, self._layers, engine)
        get_logger().info(
            "engine.attached",
            engine=engine.engine_id,
            megabytes=message.memory_bytes >> 20,
            fingerprint=geometry.fingerprint()[:12],
        )
        return engine

    def _layers(self, engine: Engine) -> None:
        engine.read_counter()
        self._node.sources.layers(engine)


class LocalServer:
    """Listens on the node's socket."""

    def __init__(self, node: Node, path: Path) -> None:
        self._node = node
        self._path = path
        self._socket: socket.socket | None = None
        self._sessions: list[Session] = []

    def start(self) -> None:
        """Listen; raises `ListenError`. A socket file that nobody listens on is replaced."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.setblocking(False)
        try:
            self._remove_dead_socket()
            listener.bind(str(self._path))
            self._path.chmod(stat.S_IRUSR | stat.S_IWUSR | stat.S_IRGRP | stat.S_IWGRP)
            listener.listen(64)
        except OSError as error:
            listener.close()
            raise ListenError(
                f"kvd.socket: cannot listen on {self._path}: {error.strerror or error}"
            ) from None
        self._socket = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def close(self) -> None:
        """Stop listening and end every session."""
        for session in self._sessions:
            session.close("the KV daemon stops")
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            with suppress(OSError):
                self._path.unlink()

    def _remove_dead_socket(self) -> None:
        if not self._path.is_socket():
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            try:
                probe.connect(str(self._path))
            except ConnectionRefusedError:
                self._path.unlink()
            else:
                raise OSError("another KV daemon listens there")

    def _accept(self) -> None:
        if self._socket is None:
            return
        with suppress(BlockingIOError):
            connection, _ = self._socket.accept()
            connection.setblocking(False)
            self._sessions = [session for session in self._sessions if not session.closed]
            self._sessions.append(Session(self._node, connection))
