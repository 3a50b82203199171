"""A KV daemon in a few lines, so that tests choose the order in which things happen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.kvd.notices import Failed, Notice, Received, Released
from splitwise.kv.identity import TransferKey, transfer_key
from splitwise.rpc.v1.kvd_pb2 import TRANSFER_FAILURE_CANCELLED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.engine.emulated.machine import EmulatedMachine
    from splitwise.rpc.v1.kvd_pb2 import PushEntry


@dataclass
class Push:
    """What the daemon knows of one transfer."""

    source: Client | None = None
    target: Client | None = None
    source_blocks: list[int] = field(default_factory=list)
    target_blocks: list[int] = field(default_factory=list)
    first_block: int = 0  # of the target's
    complete: bool = False
    first_token: int | None = None

    @property
    def deliverable(self) -> bool:
        return None not in (self.source, self.target, self.first_token) and self.complete


class Daemon:
    """All transfers; nothing is delivered or ended before the test says so."""

    def __init__(self) -> None:
        self.pushes: dict[TransferKey, Push] = {}
        self.over: set[TransferKey] = set()

    def open(self, key: TransferKey) -> Push:
        return self.pushes.setdefault(key, Push())

    def deliver(self, key: TransferKey) -> None:
        push = self._close(key)
        assert push.source is not None
        assert push.target is not None
        assert push.first_token is not None
        sent = push.source_blocks[push.first_block :]
        assert len(sent) == len(push.target_blocks)
        source, target = push.source.machine.store, push.target.machine.store
        target._words[:, push.target_blocks] = source._words[:, sent]
        push.source.notices.append(Released(key, delivered=True))
        push.target.notices.append(Received(key, push.first_token))

    def _close(self, key: TransferKey) -> Push:
        self.over.add(key)
        return self.pushes.pop(key)

    def end(self, key: TransferKey) -> None:
        push = self._close(key)
        if push.source is not None:
            push.source.notices.append(Released(key, delivered=False))
        if push.target is not None:
            push.target.notices.append(Failed(key, TRANSFER_FAILURE_CANCELLED, "ended"))


class Client:
    """What a machine calls; the same methods as `services.kvd.client.KvdClient`."""

    machine: EmulatedMachine

    def __init__(self, daemon: Daemon, layers: int) -> None:
        self.daemon = daemon
        self.layers = layers
        self.notices: list[Notice] = []
        self.cancelled: set[TransferKey] = set()
        self._plan: list[PushEntry] = []
        self._done = 0

    def expect(self, transfer: Any, *_rest: Any) -> None:
        self.daemon.open(transfer_key(transfer)).source = self
        self._end_late(transfer_key(transfer))

    def reserve(self, transfer: Any, first_block: int, block_ids: Iterable[int], **_rest: Any) -> None:
        key = transfer_key(transfer)
        push = self.daemon.open(key)
        push.target, push.target_blocks, push.first_block = self, list(block_ids), first_block
        self._end_late(key)

    def _end_late(self, key: TransferKey) -> None:
        """End at once what the other side has ended already."""
        if key in self.daemon.over:
            self.daemon.end(key)

    def push_plan(self, entries: Sequence[PushEntry]) -> None:
        assert self._done == 0, "a plan inside a pass"
        self._plan = list(entries)

    def layer_done(self) -> None:
        self._done += 1
        if self._done < self.layers:
            return
        self._done = 0
        for entry in self._plan:
            push = self.daemon.pushes.get(transfer_key(entry.transfer))
            if push is None:
                continue
            if entry.restart:
                push.source_blocks.clear()
            assert entry.first_block == len(push.source_blocks), "blocks left out or announced twice"
            push.source_blocks.extend(entry.block_ids)
            push.complete = entry.final
        self._plan = []

    def first_token(self, transfer: Any, token_id: int) -> None:
        push = self.daemon.pushes.get(transfer_key(transfer))
        if push is not None:
            assert push.complete
            push.first_token = token_id

    def cancel(self, transfer: Any, _reason: str = "") -> None:
        self.cancelled.add(transfer_key(transfer))
        if transfer_key(transfer) in self.daemon.pushes:
            self.daemon.end(transfer_key(transfer))
