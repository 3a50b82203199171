"""The engine's side of the local socket to its node's KV daemon.

    client = KvdClient("/run/splitwise/kvd.sock", "machine-1")
    client.attach(geometry, memory)                   # KvGeometry, MemfdMemory

    # prompt side                                     # token side
    client.expect(transfer, prompt_tokens, mode)      client.reserve(transfer, first, ids, ...)
    client.push_plan([PushEntry(...)])
    client.layer_done()      # once per layer
    client.first_token(transfer, token)
    # -> Released                                     # -> Received or Failed

Every transfer that was opened with `expect` or `reserve` ends with exactly one notice:
`Released` on the prompt side, `Received` or `Failed` on the token side. Blocks belong to
the transfer until then. This holds when the daemon dies too: a thread of the client
notices that, reports what was open as failed, and attaches again as soon as a daemon
listens. Calls made while the daemon is away do not raise: the transfer fails at once.

Notices are taken with `poll` (never blocks), `wait` (blocks at most so long) or `stream`
(asyncio). All methods may be called from any thread.

Engines import this module: it must stay free of gRPC and UCX.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, Literal

from services.kvd.link import Link, LinkLostError
from services.kvd.notices import Failed, Notice, Received, Released, notice_of
from splitwise.kv.identity import TransferKey, transfer_key
from splitwise.rpc.v1.common_pb2 import TransferMode, TransferRef
from splitwise.rpc.v1.kvd_pb2 import (
    TRANSFER_FAILURE_PEER_LOST,
    Attach,
    Attached,
    CancelTransfer,
    DaemonMessage,
    EngineMessage,
    Expect,
    FirstToken,
    KvGeometry,
    PushEntry,
    PushPlan,
    Reserve,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence

    from services.kvd.memfd import KvMemory
    from splitwise.kv.identity import TransferLike

__all__ = ["AttachError", "Failed", "KvdClient", "Notice", "Received", "Released", "push_entry"]

# A peer's copy into our memory that was inside the kernel when our daemon died may still end.
SETTLE_S = 0.1
FIRST_REDIAL_S, LAST_REDIAL_S = 0.05, 0.2  # between attempts to find the next daemon
_REMEMBERED_ENDS = 8192
Side = Literal["prompt", "token"]


class AttachError(Exception):
    """The daemon refused this engine, or none answers."""


def push_entry(
    transfer: TransferLike,
    first_block: int,
    block_ids: Iterable[int],
    *,
    final: bool = False,
    restart: bool = False,
) -> PushEntry:
    """Build one request's part of a push plan; `first_block` is the index in the request of the first id."""
    return PushEntry(
        transfer=_ref(transfer_key(transfer)),
        first_block=first_block,
        block_ids=block_ids,
        final=final,
        restart=restart,
    )


class KvdClient:
    """One engine's session with the daemon at `socket_path`.

    `incarnation` is new at each start of the engine (a random one by default): the daemon
    lets a newer incarnation replace an older session of the same `engine_id`.
    """

    def __init__(
        self, socket_path: str, engine_id: str, *, incarnation: int | None = None, settle_s: float = SETTLE_S
    ) -> None:
        self.socket_path = socket_path
        self.engine_id = engine_id
        self.incarnation = time.time_ns() if incarnation is None else incarnation
        self._settle_s = settle_s
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._link: Link | None = None
        self._attached: Attached | None = None
        self._failure: str | None = "not attached yet"
        self._attach = Attach(engine_id=engine_id, incarnation=self.incarnation)
        self._memory: KvMemory | None = None
        # An engine that runs both phases of a request is both sides of its transfer.
        self._open: set[tuple[TransferKey, Side]] = set()
        self._ended: OrderedDict[tuple[TransferKey, Side], None] = OrderedDict()
        self._notices: deque[Notice] = deque()
        self._notice_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._streams: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._thread: threading.Thread | None = None

    # ---- session

    def attach(
        self, geometry: KvGeometry | None = None, memory: KvMemory | None = None, *, timeout: float = 30.0
    ) -> Attached:
        """Hand the KV memory over and wait for the daemon's answer; call once.

        Without memory this is a session that can only send (an engine's scheduler side). The
        daemon's notices go to every session of the engine. Raises `AttachError`.
        """
        if self._thread is not None:
            raise AttachError(f"engine {self.engine_id} is attached already: one client, one attach")
        if (geometry is None) != (memory is None):
            raise AttachError("geometry and memory come together: give both or neither")
        if geometry is not None and memory is not None:
            self._memory = memory
            self._attach.memory = True
            self._attach.geometry.CopyFrom(geometry)
            self._attach.memory_bytes = memory.nbytes
            self._attach.memory_kind = memory.kind
        self._thread = threading.Thread(target=self._run, name=f"kvd-client-{self.engine_id}", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._attached is None and not self._closing:
                left = deadline - time.monotonic()
                if left <= 0 or (self._failure or "").startswith("refused"):
                    break
                self._changed.wait(left)
            if self._attached is not None:
                return self._attached
            failure = self._failure
        self.close()
        raise AttachError(
            f"engine {self.engine_id} is not attached to the KV daemon at {self.socket_path}: {failure}"
        )

    def failure(self) -> str | None:
        """Say why no transfer is possible now (the daemon is away), or None."""
        with self._lock:
            return None if self._attached is not None else f"KV daemon at {self.socket_path}: {self._failure}"

    @property
    def daemon_incarnation(self) -> int | None:
        """The incarnation of the daemon that is attached now; None while there is none."""
        with self._lock:
            return self._attached.daemon_incarnation if self._attached is not None else None

    def open_transfers(self) -> int:
        """Return how many transfers of this session await their last notice."""
        with self._lock:
            return len(self._open)

    def close(self) -> None:
        """Detach and stop the thread; nothing is reported any more."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            for loop, there in self._streams:
                with contextlib.suppress(RuntimeError):  # that loop is closed
                    loop.call_soon_threadsafe(there.set)
        os.eventfd_write(self._stop_fd, 1)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._lock:
            if self._link is not None:
                self._link.close()
                self._link = None
            self._attached = None
            os.close(self._notice_fd)
            os.close(self._stop_fd)
            self._notice_fd = -1

    # ---- prompt side

    def expect(
        self,
        transfer: TransferLike,
        prompt_tokens: int,
        mode: TransferMode.ValueType,
        lease_ms: int = 60_000,
    ) -> None:
        """Announce a transfer whose request is in the engine; must precede its first push plan.

        `lease_ms`: how long after the prompt's last pass the blocks may be kept.
        """
        key = transfer_key(transfer)
        message = EngineMessage(
            expect=Expect(transfer=_ref(key), prompt_tokens=prompt_tokens, mode=mode, lease_ms=lease_ms)
        )
        self._open_transfer(key, "prompt", message)

    def push_plan(self, entries: Sequence[PushEntry]) -> None:
        """Announce, before a forward pass, which blocks it completes.

        Then call `layer_done` after each layer of the pass, in order. Entries of transfers
        that have ended are left out; a plan without entries is not sent and its layers need
        not be announced.
        """
        with self._lock:
            live = [e for e in entries if (_key(e.transfer), "prompt") not in self._ended]
            if live and self._link is not None:
                self._send(EngineMessage(push_plan=PushPlan(progress_base=self._link.progress, entries=live)))

    def layer_done(self) -> None:
        """Announce that the running pass has written its next layer's KV: one eventfd write."""
        with self._lock:
            if self._link is not None:
                self._link.count_layer()

    def first_token(self, transfer: TransferLike, token_id: int) -> None:
        """Hand over the sampled first token, which travels with the completion signal."""
        key = transfer_key(transfer)
        message = EngineMessage(first_token=FirstToken(transfer=_ref(key), token_id=token_id))
        self._send_if_open(key, message, "prompt")

    # ---- token side

    def reserve(
        self,
        transfer: TransferLike,
        first_block: int,
        block_ids: Iterable[int],
        *,
        source_kvd_address: str,
        source_engine_id: str,
        lease_ms: int = 60_000,
        traceparent: str = "",
    ) -> None:
        """Give blocks to a transfer: the daemon lets the source write them.

        `first_block`: index in the request of ``block_ids[0]``; earlier blocks are cached here.
        `lease_ms`: the KV must have arrived within this time.
        """
        key = transfer_key(transfer)
        message = EngineMessage(
            reserve=Reserve(
                transfer=_ref(key),
                first_block=first_block,
                block_ids=block_ids,
                source_kvd_address=source_kvd_address,
                source_engine_id=source_engine_id,
                lease_ms=lease_ms,
                traceparent=traceparent,
            )
        )
        self._open_transfer(key, "token", message)

    # ---- either side

    def cancel(self, transfer: TransferLike, reason: str = "") -> None:
        """Ask for an early end. The answer is the transfer's notice; until then the blocks stay in use."""
        key = transfer_key(transfer)
        message = EngineMessage(cancel=CancelTransfer(transfer=_ref(key), reason=reason))
        self._send_if_open(key, message, "prompt", "token")

    # ---- notices

    def poll(self) -> list[Notice]:
        """Take the notices that are there."""
        with self._lock:
            taken = list(self._notices)
            self._notices.clear()
            if self._notice_fd >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._notice_fd)
            return taken

    def wait(self, timeout: float) -> list[Notice]:
        """Take the notices; when there is none, wait for one at most `timeout` seconds."""
        with self._changed:
            if not self._notices:
                self._changed.wait_for(lambda: self._notices or self._closing, timeout)
            return self.poll()

    def fileno(self) -> int:
        """Return a descriptor that is readable while notices are there; for select and event loops."""
        return self._notice_fd

    async def stream(self) -> AsyncIterator[Notice]:
        """Yield notices for ever, without a thread of the caller's."""
        loop = asyncio.get_running_loop()
        there = asyncio.Event()
        descriptor = self._notice_fd
        loop.add_reader(descriptor, there.set)
        self._streams.add((loop, there))
        try:
            while not self._closing:
                there.clear()
                for notice in self.poll():
                    yield notice
                await there.wait()
        finally:
            self._streams.discard((loop, there))
            loop.remove_reader(descriptor)

    # ---- inside; all below hold the lock or run in the thread

    def _open_transfer(self, key: TransferKey, side: Side, message: EngineMessage) -> None:
        with self._lock:
            if (key, side) in self._open or (key, side) in self._ended:
                raise ValueError(f"transfer {key} was opened before: take a new id or the next generation")
            self._open.add((key, side))
            if self._attached is None:
                self._end_locally(key, side, f"KV daemon at {self.socket_path} is away: {self._failure}")
                return
            self._send(message)

    def _send_if_open(self, key: TransferKey, message: EngineMessage, *sides: Side) -> None:
        with self._lock:
            is_open = any((key, side) in self._open for side in sides)
            is_over = any((key, side) in self._ended for side in sides)
            if self._attached is not None and (is_open or not is_over):
                self._send(message)

    def _send(self, message: EngineMessage) -> None:
        if self._link is not None:
            self._link.send(message)

    def _deliver(self, notice: Notice) -> None:
        end: tuple[TransferKey, Side] = (notice.key, "prompt" if isinstance(notice, Released) else "token")
        if end in self._ended:
            return
        self._open.discard(end)
        self._ended[end] = None
        if len(self._ended) > _REMEMBERED_ENDS:
            self._ended.popitem(last=False)
        self._notices.append(notice)
        os.eventfd_write(self._notice_fd, 1)
        self._changed.notify_all()

    def _end_locally(self, key: TransferKey, side: Side, why: str) -> None:
        if side == "token":
            self._deliver(Failed(key, TRANSFER_FAILURE_PEER_LOST, why))
        else:
            self._deliver(Released(key, delivered=False, message=why))

    def _run(self) -> None:
        """Connect, attach, receive; again after a loss, until closed."""
        pause = FIRST_REDIAL_S
        while not self._closing:
            try:
                link = Link(self.socket_path, self._stop_fd, self._lock)
            except OSError as error:
                self._lost(f"no daemon listens there ({error.strerror or error})")
            else:
                if self._serve(link):
                    pause = FIRST_REDIAL_S
            self._pause(pause)
            pause = min(pause * 2, LAST_REDIAL_S)

    def _serve(self, link: Link) -> bool:
        """Run one session; True when it was attached."""
        with self._lock:
            self._link = link
            link.send(
                EngineMessage(attach=self._attach), self._memory.fd if self._memory is not None else None
            )
        why = "closed by this engine"
        try:
            for message in link.messages():
                self._take(message)
        except LinkLostError as error:
            why = str(error)
        with self._lock:
            was_attached = self._attached is not None
            self._attached = None
            self._link = None
            if not (self._failure or "").startswith("refused"):
                self._failure = why
            link.close()
        if was_attached and not self._closing:
            self._pause(self._settle_s)
            self._lost(why)
        return was_attached

    def _take(self, message: DaemonMessage) -> None:
        with self._changed:
            kind = message.WhichOneof("message")
            if kind == "attached":
                self._attached = message.attached
                self._failure = None
            elif kind == "refused":
                self._failure = f"refused: {message.refused.reason}"
            else:
                notice = notice_of(message)
                if notice is not None:
                    self._deliver(notice)
            self._changed.notify_all()

    def _lost(self, why: str) -> None:
        with self._changed:
            self._failure = why
            for key, side in list(self._open):
                self._end_locally(key, side, f"KV daemon at {self.socket_path} was lost: {why}")
            self._changed.notify_all()

    def _pause(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing, seconds)


def _key(transfer: TransferRef) -> TransferKey:
    return TransferKey(transfer.transfer_id, transfer.generation)


def _ref(key: TransferKey) -> TransferRef:
    return TransferRef(transfer_id=key.transfer_id, generation=key.generation)
