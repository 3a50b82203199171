"""Both halves of a transfer, coupled by a model of the network that may do anything in any order.

The model keeps bytes as version numbers: the engine writes a new version into a block of a
layer, a push copies what the source holds when it is carried out, and `Deliver` is right
only when every granted block holds the current version of every layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from splitwise.kv import destination as dst
from splitwise.kv import source as src
from splitwise.kv.destination import Cause, DestinationTransfer
from splitwise.kv.identity import TransferKey
from splitwise.kv.source import GrantedBlocks, SourceTransfer
from splitwise.kv.states import FINAL, End, TransferState

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS = 2
KEY = TransferKey(bytes(16), 1)
LEASE = 5.0


class World:
    """One transfer of `blocks` blocks, of which the destination has `cached`."""

    def __init__(self, blocks: int, cached: int, *, layerwise: bool) -> None:
        self.blocks, self.cached, self.layerwise = blocks, cached, layerwise
        self.now = 0.0
        self.source = SourceTransfer(KEY, LAYERS)
        self.target = DestinationTransfer(KEY, (blocks - cached) * LAYERS, LEASE)
        self.written: dict[tuple[int, int], int] = {}  # (layer, block of the request): version
        self.memory: dict[tuple[int, int], int] = {}  # the destination's
        self.version = 0
        self.restarts = 0
        self.next_block = 0
        self.pass_blocks: tuple[int, int] | None = None
        self.pass_layer = 0
        self.fenced = False
        self.source_known = False  # the source's daemon has heard of the transfer
        self.refuses = False  # and will refuse its grant: revoked before it began
        self.pushes: list[src.Push] = []
        self.wire: list[Callable[[], None]] = []  # messages under way; any may arrive next, or be lost
        self.signalled_bytes = -1
        self.token_known = False
        self.notices: list[object] = []
        self.stopped = False
        self.revokes_waiting = 0
        self.pushed_bytes = 0
        self.epoch = 0
        self.do_target(self.target.reserve())

    # ---- carrying out

    def do_source(self, actions: list[src.SourceAction]) -> None:
        for action in actions:
            if isinstance(action, src.Push):
                assert self.source.granted is not None
                assert not self.stopped, "a push after Stopped"
                assert set(action.destination_blocks) <= set(self.source.granted.block_ids)
                assert len(action.source_blocks) == len(action.destination_blocks) > 0
                self.pushes.append(action)
            elif isinstance(action, src.Signal):
                assert not self.pushes, "a signal before the flush"
                count = self.pushed_bytes
                self.wire.append(partial(self.signal_arrives, action, count))
            elif isinstance(action, src.Release):
                assert not self.pushes, "blocks given back while they are read"
                self.stopped = True
                self.notices.append(action)
            elif isinstance(action, src.Abandon):
                assert not self.pushes
                self.wire.append(partial(self.abandon_arrives, action.message))
            elif isinstance(action, src.Stopped):
                assert not self.pushes
                self.stopped = True
                while self.revokes_waiting:
                    self.revokes_waiting -= 1
                    self.wire.append(lambda: self.do_target(self.target.revoked()))
        assert self.source.in_flight == len(self.pushes)

    def do_target(self, actions: list[dst.DestinationAction]) -> None:
        for action in actions:
            if isinstance(action, dst.SendGrant):
                self.wire.append(self.grant_arrives)
            elif isinstance(action, dst.Verify):
                self.wire.append(lambda: self.do_target(self.target.verified(self.problem())))
            elif isinstance(action, dst.Acknowledge):
                self.wire.append(lambda: self.do_source(self.source.acknowledged()))
            elif isinstance(action, dst.Revoke):
                self.wire.append(self.revoke_arrives)
            elif isinstance(action, dst.Fence):
                self.fenced = True
                self.wire.append(lambda: self.do_target(self.target.fenced()))
            elif isinstance(action, dst.Deliver):
                for layer in range(LAYERS):
                    for block in range(self.cached, self.blocks):
                        assert self.memory.get((layer, block)) == self.written[layer, self.place(block)]
                self.notices.append(action)
            elif isinstance(action, dst.Fail):
                assert self.fenced or not self.pushes, "blocks given back with a writer left"
                self.notices.append(action)

    # ---- the network

    def grant_arrives(self) -> None:
        if self.refuses or self.source.state is not TransferState.PLANNED:
            self.wire.append(lambda: self.do_target(self.target.grant_refused(Cause.REFUSED, "no")))
            return
        self.source_known = True
        self.wire.append(lambda: self.do_target(self.target.granted()))
        granted = GrantedBlocks(self.cached, tuple(range(100 + self.cached, 100 + self.blocks)))
        self.do_source(self.source.grant(self.now, granted, LEASE))

    def revoke_arrives(self) -> None:
        if not self.source_known:
            self.refuses = self.stopped = True
            self.wire.append(lambda: self.do_target(self.target.revoked()))
            return
        self.revokes_waiting += 1
        self.do_source(self.source.stop(End.CANCELLED, "revoked", tell_peer=True))
        if self.source.state is TransferState.DONE and self.revokes_waiting:
            self.revokes_waiting = 0
            self.wire.append(lambda: self.do_target(self.target.revoked()))

    def signal_arrives(self, signal: src.Signal, count: int) -> None:
        self.signalled_bytes = count
        self.do_target(self.target.signalled(signal.first_token))

    def abandon_arrives(self, message: str) -> None:
        self.do_target(self.target.abandoned(Cause.SOURCE, message))

    def problem(self) -> str | None:
        return None if self.signalled_bytes == self.target.expected_bytes else "bytes"

    def place(self, block: int) -> int:
        """The source's id of a block of the request: other ones after each preemption."""
        return block + 1000 * self.restarts

    # ---- what may happen

    def deliver(self, which: int) -> None:
        if self.wire:
            self.wire.pop(which % len(self.wire))()

    def lose_revoke(self, _: int) -> None:
        """The source does not answer in time; its answer may yet come."""
        self.do_target(self.target.revoke_unanswered())

    def push(self, which: int) -> None:
        if not self.pushes:
            return
        push = self.pushes.pop(which % len(self.pushes))
        if self.source.state is not TransferState.STOPPING:
            if push.epoch != self.epoch:
                self.epoch, self.pushed_bytes = push.epoch, 0
            self.pushed_bytes += len(push.source_blocks)
            for block, there in zip(push.source_blocks, push.destination_blocks, strict=True):
                assert there == 100 + block % 1000, "misplaced"
                if not self.fenced:  # what a preempted prompt gave away holds others' bytes: -1
                    self.memory[push.layer, block % 1000] = self.written.get((push.layer, block), -1)
        self.do_source(self.source.pushed(self.now))

    def expect(self, _: int) -> None:
        if not self.source.expected and not self.refuses and self.source.state not in FINAL:
            self.source_known = True
            self.do_source(self.source.expect(layerwise=self.layerwise, lease=LEASE))

    def compute(self, amount: int) -> None:
        """The engine's next step: a pass begins, or its next layer is written."""
        if not self.source.expected or self.ended:
            return
        if self.pass_blocks is None:
            if self.next_block < self.blocks:
                self._begin(1 + amount % (self.blocks - self.next_block), restart=False)
            return
        first, count = self.pass_blocks
        for block in range(first, first + count):
            self.version += 1
            self.written[self.pass_layer, self.place(block)] = self.version
        ids = [self.place(block) for block in range(first, first + count)]
        layer, self.pass_layer = self.pass_layer, self.pass_layer + 1
        if self.pass_layer == LAYERS:
            self.pass_blocks, self.next_block = None, first + count
        self.do_source(self.source.layer_written(self.now, layer, first, ids))

    def preempt(self, amount: int) -> None:
        if self.source.expected and not self.ended and not self.token_known:
            self.next_block = 0
            self.written.clear()
            self.restarts += 1
            self._begin(1 + amount % self.blocks, restart=True)

    def sample(self, _: int) -> None:
        if self.pass_blocks is None and self.next_block == self.blocks and not self.token_known:
            self.token_known = True
            self.do_source(self.source.first_token(self.now, 42))

    def cancel_source(self, _: int) -> None:
        if self.source_known:
            self.do_source(self.source.stop(End.CANCELLED, "cancel", tell_peer=True))

    def cancel_target(self, _: int) -> None:
        self.do_target(self.target.stop(Cause.CANCELLED, "cancel"))

    def wait(self, amount: int) -> None:
        self.now += amount / 10
        if self.source_known:
            self.do_source(self.source.tick(self.now))
        self.do_target(self.target.tick(self.now))

    @property
    def ended(self) -> bool:
        return self.source.state in FINAL

    def _begin(self, count: int, *, restart: bool) -> None:
        first = self.next_block
        self.pass_blocks, self.pass_layer = (first, count), 0
        final = first + count == self.blocks
        self.do_source(self.source.entry(self.now, first, count, final=final, restart=restart))

    # ---- the end

    def come_to_rest(self) -> None:
        for _ in range(200):
            if not (self.wire or self.pushes):
                self.wait(100)
                if not (self.wire or self.pushes):
                    break
            self.push(0)
            self.deliver(0)
        assert self.target.state in FINAL
        if self.source_known:
            assert self.source.state in FINAL
            assert self.source.in_flight == 0
        assert sum(isinstance(n, dst.Deliver | dst.Fail) for n in self.notices) == 1
        assert sum(isinstance(n, src.Release) for n in self.notices) == int(self.source.expected)


PLAIN = ("deliver", "push", "compute", "compute", "expect", "sample", "deliver", "push", "compute")
STEPS = (*PLAIN, "preempt", "cancel_source", "cancel_target", "wait", "lose_revoke")
plain = st.sampled_from(PLAIN)
any_step = st.sampled_from(STEPS)
faultless = st.sampled_from(["deliver", "push", "compute", "preempt"])


@settings(max_examples=400)
@given(
    blocks=st.integers(1, 5),
    cached=st.integers(0, 5),
    layerwise=st.booleans(),
    steps=st.lists(st.tuples(st.one_of(plain, plain, any_step), st.integers(0, 20)), max_size=70),
)
def test_any_interleaving_keeps_the_promises(
    blocks: int, cached: int, *, layerwise: bool, steps: list[tuple[str, int]]
) -> None:
    world = World(blocks, min(cached, blocks), layerwise=layerwise)
    for step, amount in steps:
        getattr(world, step)(amount)
    world.come_to_rest()
    before = list(world.notices)
    world.cancel_source(0)
    world.cancel_target(0)
    world.wait(1000)
    world.lose_revoke(0)
    assert world.notices == before  # cancelling or expiring what is over changes nothing


@settings(max_examples=100)
@given(
    blocks=st.integers(1, 5),
    cached=st.integers(0, 5),
    layerwise=st.booleans(),
    steps=st.lists(st.tuples(faultless, st.integers(0, 20)), max_size=40),
)
def test_without_faults_everything_arrives(
    blocks: int, cached: int, *, layerwise: bool, steps: list[tuple[str, int]]
) -> None:
    world = World(blocks, min(cached, blocks), layerwise=layerwise)
    world.expect(0)
    for step, amount in steps:
        getattr(world, step)(amount)
    while not (world.pass_blocks is None and world.next_block == world.blocks):
        world.compute(0)
    world.sample(0)
    while world.wire or world.pushes:
        world.push(0)
        world.deliver(0)
    assert {type(notice) for notice in world.notices} == {dst.Deliver, src.Release}
    assert world.source.state is world.target.state is TransferState.DONE
