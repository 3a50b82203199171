"""Between the adapter in the service's process and the connector inside the engine core.

A Unix stream socket, with lines of text, and a small shared file in the engine's folder:

- an empty line from the adapter is a *ring*: a request or an abort is on its way through
  vLLM's queue, so an engine that only waits for KV blocks must look there; a line with a
  transfer's name gives that transfer up;
- a line of JSON from the core says what vLLM's outputs cannot carry: what was attached, and
  the end of every transfer, with its reason;
- the end of the stream is the other process's death: the core then kills itself, whatever
  it is doing, since nobody else would;
- the shared file holds the engine's figures, written by the core at each step.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.engine.vllm.transfer import hotline_key, hotline_name

if TYPE_CHECKING:
    from services.engine.vllm.ranks import TransferClient
    from splitwise.kv.identity import TransferKey

_SOCKET = "hotline.sock"
_FIGURES = "figures"
_COUNTS = struct.Struct("<5Q")
_AWAY = struct.Struct("<Q")
_HEALTH_CHECK_MS = 200


@dataclass(frozen=True, slots=True)
class Figures:
    """What the engine core counts."""

    blocks_used: int = 0
    preemptions: int = 0
    transfers_open: int = 0  # of both phases, until their last notice
    batch_requests: int = 0  # in the pass that is being computed; 0 between two
    batch_tokens: int = 0
    daemon_away: int = 0  # 1 while the KV daemon cannot be reached


@dataclass(slots=True)
class TransferEnd:
    """The last word on one transfer: `failure` is None when it was delivered.

    `opened`: its request was given to the engine core, so that an end will come.
    """

    opened: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str | None = None
    corrupt: bool = False


class AdapterEnd:
    """The service's end. `start` before the engine core is made, `close` after it is gone."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = _map_figures(folder, create=True)
        self._server: asyncio.Server | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._ends: dict[str, TransferEnd] = {}
        self.hello: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self.core_lost = False

    async def start(self) -> None:
        """Listen for the engine core."""
        self._server = await asyncio.start_unix_server(self._serve, self._folder / _SOCKET)

    def ring(self) -> None:
        """Wake an engine core that waits for KV blocks."""
        self._write(b"\n")

    def watch(self, transfer: str) -> TransferEnd:
        """Return what will be told of a transfer; `forget` it when done."""
        end = self._ends[transfer] = TransferEnd()
        if self.core_lost:
            end.ended.set()
        return end

    def forget(self, transfer: str) -> None:
        """Watch a transfer no longer."""
        self._ends.pop(transfer, None)

    def give_up(self, transfer: str) -> None:
        """Ask for the early end of a transfer whose request is over in vLLM."""
        self._write(transfer.encode() + b"\n")

    def figures(self) -> Figures:
        """Return the core's newest figures."""
        return Figures(*_COUNTS.unpack_from(self._file), *_AWAY.unpack_from(self._file, _COUNTS.size))

    async def close(self) -> None:
        """Stop listening; ends the engine core when it still runs."""
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        if self._server is not None:
            self._server.close()
        self._file.close()

    def _write(self, line: bytes) -> None:
        if self._writer is not None and not self.core_lost:
            self._writer.write(line)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                self._take(json.loads(line))
        self.core_lost = True
        writer.close()
        for end in self._ends.values():
            end.ended.set()

    def _take(self, message: dict[str, Any]) -> None:
        if "ended" not in message:
            if not self.hello.done():
                self.hello.set_result(message)
        elif (end := self._ends.get(message["ended"])) is not None:
            end.failure = message["failure"]
            end.corrupt = message["corrupt"]
            end.ended.set()


class CoreEnd:
    """The engine core's end: connects, and kills this process when the service's is gone."""

    def __init__(self, folder: str, client: TransferClient) -> None:
        place = Path(folder)
        self._file = _map_figures(place, create=False)
        self._client = client
        self._rung = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.rung_at = float("-inf")  # monotonic time of the last ring
        self._stopped = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(str(place / _SOCKET))
        self._thread = threading.Thread(target=self._listen, name="splitwise-hotline", daemon=True)
        self._thread.start()

    def fileno(self) -> int:
        """Return a descriptor that is readable after a ring, until `answer`."""
        return self._rung

    def answer(self) -> None:
        """Take the rings that came; `rung_at` still tells of them."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._rung)

    def hello(self, **what: Any) -> None:
        """Tell the adapter, once, what was attached."""
        self._say(what)

    def ended(
        self, phase: str, key: TransferKey, failure: str | None = None, *, corrupt: bool = False
    ) -> None:
        """Tell the adapter that one side of a transfer is over."""
        self._say({"ended": hotline_name(phase, key), "failure": failure, "corrupt": corrupt})

    def publish(
        self, *, blocks_used: int, preemptions: int, transfers_open: int, batch: tuple[int, int]
    ) -> None:
        """Write the figures; costs about a microsecond. `batch`: requests and tokens."""
        _COUNTS.pack_into(self._file, 0, blocks_used, preemptions, transfers_open, *batch)

    def close(self) -> None:
        """End the thread, so that the adapter's going away does no harm any more."""
        os.eventfd_write(self._stopped, 1)
        self._thread.join()
        self._socket.close()

    def _say(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the adapter is dying, and this process with it
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._stopped, select.POLLIN)
        rest = b""
        while True:
            events = dict(poll.poll(_HEALTH_CHECK_MS))
            if self._stopped in events:
                return
            if self._socket.fileno() in events:
                rest = self._hear(rest + self._receive())
            _AWAY.pack_into(self._file, _COUNTS.size, int(self._client.failure() is not None))

    def _receive(self) -> bytes:
        try:
            data = self._socket.recv(65_536)
        except OSError:
            data = b""
        if not data:
            os.kill(os.getpid(), signal.SIGKILL)
        return data

    def _hear(self, text: bytes) -> bytes:
        """Handle whole lines; return the rest."""
        *lines, rest = text.split(b"\n")
        for line in lines:
            if line:
                self._client.cancel(hotline_key(line.decode()), "given up by the machine")
            else:
                self.rung_at = time.monotonic()
                os.eventfd_write(self._rung, 1)
        return rest


def say_problem(folder: str, problem: str) -> None:
    """Tell the adapter why the engine core will end instead of starting."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as hotline:
        hotline.connect(str(Path(folder) / _SOCKET))
        hotline.sendall(json.dumps({"error": problem}).encode() + b"\n")


def _map_figures(folder: Path, *, create: bool) -> mmap.mmap:
    path = folder / _FIGURES
    if create:
        path.write_bytes(bytes(mmap.PAGESIZE))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), mmap.PAGESIZE)
