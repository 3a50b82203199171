"""The prompt side's half of a transfer: what to put when, and when to let go. Pure.

Inputs are method calls that return actions; the caller carries them out in order. The engine
announces blocks in *entries* (one per forward pass) and then layer by layer that they are
written. A *unit* is one entry's blocks in one layer. Layer-wise, units are pushed as they
come; serialized, when the prompt's last layer is there. Nothing is pushed before the grant.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from splitwise.kv.states import FINAL, SOURCE_TABLE, STATE_OF_END, End, TransferInput, TransferState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.kv.identity import TransferKey


@dataclass(frozen=True, slots=True)
class GrantedBlocks:
    """Where the blocks go: `block_ids[i]` takes the request's block ``first_block + i``."""

    first_block: int
    block_ids: tuple[int, ...]

    @property
    def end(self) -> int:
        """One past the request's last block."""
        return self.first_block + len(self.block_ids)


@dataclass(frozen=True, slots=True)
class Push:
    """Put these blocks of one layer, then call `pushed`. `epoch` grows when a prompt begins again."""

    layer: int
    source_blocks: tuple[int, ...]
    destination_blocks: tuple[int, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Signal:
    """All is flushed: send the completion signal with this token."""

    first_token: int


@dataclass(frozen=True, slots=True)
class Release:
    """Tell the engine that its blocks are not read any more."""

    delivered: bool
    message: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Tell the destination, if it has granted, that nothing more will come or be written."""

    end: End
    message: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Answer a waiting revoke: no put is in flight and none will be posted."""


SourceAction: TypeAlias = Push | Signal | Release | Abandon | Stopped


@dataclass(frozen=True, slots=True)
class _Unit:
    layer: int
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(slots=True)
class SourceTransfer:
    """One transfer at the source. `layers` is the number of layers; times are in seconds."""

    key: TransferKey
    layers: int
    state: TransferState = TransferState.PLANNED
    expected: bool = False  # the engine has announced it and awaits a release
    layerwise: bool = True
    granted: GrantedBlocks | None = None
    deadline: float | None = None
    in_flight: int = 0
    total_blocks: int | None = None  # known with the final entry
    skipped_blocks: int = 0
    _lease: float = 60.0
    _token: int | None = None
    _epoch: int = 0
    _barrier: bool = False  # puts of an earlier epoch are in flight
    _waiting: list[_Unit] = field(default_factory=list)
    _written: list[int] = field(default_factory=list)  # per layer: blocks that the engine has written
    _end: End = End.FAILED
    _message: str = ""
    _tell_peer: bool = False

    def __post_init__(self) -> None:
        self._written = [0] * self.layers

    # ---- inputs

    def expect(self, *, layerwise: bool, lease: float) -> list[SourceAction]:
        """The engine has the request; `lease`: how long its blocks may be kept after the prompt."""
        self.expected = True
        self.layerwise = layerwise
        self._lease = lease
        if self.granted is not None:
            self.deadline = None  # a grant that waited for this; the prompt takes its time
        return []

    def grant(self, now: float, blocks: GrantedBlocks, lease: float) -> list[SourceAction]:
        """The destination gives its blocks; what is ready goes out."""
        if not self._move(TransferInput.GRANT):
            return []
        self.granted = blocks
        self.skipped_blocks = blocks.first_block
        if not self.expected:
            self.deadline = now + lease
        return self._go_on(now)

    def entry(
        self, now: float, first_block: int, count: int, *, final: bool, restart: bool
    ) -> list[SourceAction]:
        """A forward pass begins that will write blocks ``first_block`` to ``first_block + count``."""
        if self.state in FINAL or self.state is TransferState.STOPPING:
            return []
        if restart:
            self._begin_again()
        if final:
            self.total_blocks = first_block + count
            if not count:  # nothing new in the last pass: no layer will tell
                return self._go_on(now)
        return []

    def layer_written(
        self, now: float, layer: int, first_block: int, block_ids: Sequence[int]
    ) -> list[SourceAction]:
        """One layer of an entry is in the engine's memory."""
        if self.state in FINAL or self.state is TransferState.STOPPING:
            return []
        if first_block > self._written[layer]:
            have = self._written[layer]
            return self.stop(
                End.FAILED,
                f"layer {layer}: block {first_block} was announced after {have}",
                tell_peer=True,
            )
        self._written[layer] = max(self._written[layer], first_block + len(block_ids))
        self._waiting.append(_Unit(layer, first_block, tuple(block_ids)))
        return self._go_on(now)

    def first_token(self, now: float, token: int) -> list[SourceAction]:
        """The engine has sampled the first token."""
        if self._token is None:
            self._token = token
        return self._go_on(now)

    def pushed(self, now: float) -> list[SourceAction]:
        """One push has left: its bytes are in the destination's memory, or never will be."""
        self.in_flight -= 1
        if self.state is TransferState.STOPPING:
            return self._settle()
        if self.in_flight == 0:
            self._barrier = False
        return self._go_on(now)

    def acknowledged(self) -> list[SourceAction]:
        """The destination has verified and taken over."""
        if not self._move(TransferInput.ACKNOWLEDGE):
            return []
        return [Release(delivered=True, message="")] if self.expected else []

    def stop(self, end: End, message: str, *, tell_peer: bool) -> list[SourceAction]:
        """End it early; the release follows when nothing is in flight. Idempotent."""
        if not self._move(TransferInput.STOP):
            return [Stopped()] if self.state in FINAL else []
        self._end, self._message, self._tell_peer = end, message, tell_peer
        self._waiting.clear()
        return self._settle()

    def tick(self, now: float) -> list[SourceAction]:
        """Look at the deadline."""
        if self.deadline is None or now < self.deadline or self.state in FINAL:
            return []
        waited_for = {
            TransferState.PLANNED: "the grant",
            TransferState.SIGNALLED: "the acknowledgement",
        }.get(self.state, "the puts or the first token" if self.expected else "the prompt")
        return self.stop(End.EXPIRED, f"the lease ran out while waiting for {waited_for}", tell_peer=True)

    # ---- inside

    def _move(self, happened: TransferInput) -> bool:
        target = SOURCE_TABLE.get((self.state, happened))
        if target is None:
            return False
        self.state = target
        return True

    def _begin_again(self) -> None:
        """Forget what was written: the engine has preempted the prompt and given the blocks away."""
        self._epoch += 1
        self._barrier = self.in_flight > 0
        self._waiting.clear()
        self._written = [0] * self.layers
        self.total_blocks = None
        self.deadline = None

    def _complete(self) -> bool:
        return self.total_blocks is not None and min(self._written) >= self.total_blocks

    def _go_on(self, now: float) -> list[SourceAction]:
        complete = self._complete()
        if complete and self.deadline is None:
            self.deadline = now + self._lease
        if self.granted is None or self.state in FINAL or self.state is TransferState.STOPPING:
            return []
        if complete and self.total_blocks != self.granted.end:
            message = f"the prompt has {self.total_blocks} blocks, the grant ends at {self.granted.end}"
            return self.stop(End.FAILED, message, tell_peer=True)
        actions: list[SourceAction] = []
        if not self._barrier and (self.layerwise or complete):
            actions += self._pushes(self.granted)
        if complete and not self._waiting and not self.in_flight:
            self._move(TransferInput.FLUSH)
            if self.state is TransferState.FLUSHED and self._token is not None:
                self._move(TransferInput.SIGNAL)
                actions.append(Signal(self._token))
        return actions

    def _pushes(self, granted: GrantedBlocks) -> list[SourceAction]:
        actions: list[SourceAction] = []
        for unit in self._waiting:
            skip = max(0, granted.first_block - unit.first_block)
            at = unit.first_block + skip - granted.first_block
            blocks = unit.block_ids[skip:]
            there = granted.block_ids[at : at + len(blocks)]
            if not there:  # cached at the destination, or beyond the grant, which ends in a failure
                continue
            self._move(TransferInput.PUSH)
            self.in_flight += 1
            actions.append(Push(unit.layer, blocks[: len(there)], there, self._epoch))
        self._waiting.clear()
        return actions

    def _settle(self) -> list[SourceAction]:
        if self.in_flight:
            return []
        self.state = STATE_OF_END[self._end]
        actions: list[SourceAction] = [Stopped()]
        if self._tell_peer and self.granted is not None:
            actions.append(Abandon(self._end, self._message))
        if self.expected:
            actions.append(Release(delivered=False, message=self._message))
        return actions
