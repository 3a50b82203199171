"""The machine scheduler under any load: memory, batches, order, and bounded preemption."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.machine import Batch, MachineLimits, MachineScheduler, Stage

BLOCK = 4


class Blocks:
    """The memory of a machine as plain numbers; nothing is cached."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held: Counter[str] = Counter()

    @property
    def free(self) -> int:
        return self.total - self.held.total()

    def take(self, key: str, blocks: int, leave: int) -> int:
        assert not self.held[key]
        if blocks + leave > self.free:
            return NONE
        self.held[key] = blocks
        return 0

    def grow(self, key: str, blocks: int) -> None:
        assert blocks <= self.free
        self.held[key] += blocks

    def take_back(self, key: str) -> None:
        del self.held[key]


class Machine:
    """A machine scheduler with the outside world of one machine, checked after every step."""

    def __init__(self, kv_blocks: int, limits: MachineLimits) -> None:
        self.limits = limits
        self.blocks = Blocks(kv_blocks)
        self.scheduler: MachineScheduler[str] = MachineScheduler(limits, self.blocks)
        self.left: dict[str, int] = {}  # tokens that the request will still make; unknown to the scheduler
        self.known: dict[str, int] = {}
        self.most: dict[str, int] = {}
        self.token_side: dict[str, bool] = {}
        self.preempted: Counter[str] = Counter()
        self.arrived: list[str] = []
        self.began: list[str] = []
        self.done: set[str] = set()
        self.evicted: set[str] = set()

    def add(self, prompt: int, output: int, most: int, *, token_side: bool) -> None:
        key = f"w{len(self.arrived)}"
        capacity = self.blocks.total * BLOCK
        prompt = min(prompt, capacity - 1)
        most = max(1, min(most, capacity - prompt))
        if token_side:
            self.scheduler.add_token(key, prompt, prompt + most)
        else:
            self.scheduler.add_prompt(key, prompt)
        self.known[key], self.most[key], self.token_side[key] = prompt, prompt + most, token_side
        self.left[key] = min(output, most) - 1 if token_side else 1
        self.arrived.append(key)
        self.check()

    def at(self, stage: Stage) -> set[str]:
        return {key for key in self.left if self.scheduler.stage(key) is stage}

    def iterate(self, *, arrive: bool = True) -> Batch[str]:
        self.scheduler.reserve()
        for key in sorted(self.at(Stage.ARRIVING)) if arrive else ():
            if self.left[key] == 0:
                self.end(key)
            else:
                self.scheduler.ready(key)
                self.known[key] += 1
        phases = self.at(Stage.TOKEN)
        self.evicted = set(self.scheduler.make_room())
        self.scheduler.admit()
        batch = self.scheduler.next_batch()
        self.check_batch(batch, phases)
        for key in self.scheduler.complete(batch):
            self.left[key] -= 1
            self.known[key] += 1
            if self.left[key] == 0:
                self.end(key)
        self.check()
        return batch

    def end(self, key: str) -> None:
        self.scheduler.remove(key)
        self.blocks.held.pop(key, None)
        del self.left[key]
        self.done.add(key)

    def check_batch(self, batch: Batch[str], phases: set[str]) -> None:
        ran = {key for key, _ in batch.parts}
        assert phases - ran == {*batch.sat_out, *self.evicted}
        self.preempted.update(phases - ran)
        assert max(self.preempted.values(), default=0) <= self.limits.max_preemptions
        prompts = {key: n for key, n in batch.parts if key not in phases or key in self.evicted}
        assert sum(prompts.values()) == batch.prompt_tokens
        assert len(prompts) == batch.prompt_sequences
        assert batch.sequences == len(ran & phases) <= self.limits.max_running
        assert batch.context == sum(self.known[key] for key in ran & phases)
        assert all(self.blocks.held[key] * BLOCK >= self.known[key] for key in ran), "KV has no place"
        if prompts:
            assert sum(n for _, n in batch.parts) <= self.limits.max_batch_tokens
        for key in prompts:
            if not self.token_side[key] and key not in self.began:
                self.began.append(key)
        order = [self.arrived.index(key) for key in self.began]
        assert order == sorted(order), "a prompt overtook an older one"

    def check(self) -> None:
        assert self.blocks.free >= 0
        for key in self.left:
            waiting = self.scheduler.stage(key) is Stage.WAITING
            assert (self.blocks.held[key] == 0) == waiting
            assert self.scheduler.held(key) == self.blocks.held[key]
            assert self.scheduler.preemptions(key) == self.preempted[key]


LIMITS = st.builds(
    MachineLimits,
    block_tokens=st.just(BLOCK),
    max_batch_tokens=st.integers(9, 30),
    max_running=st.integers(1, 8),
    max_preemptions=st.integers(1, 5),
    headroom=st.integers(0, 3),
)
ADD = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 90), st.booleans())
STEPS = st.lists(ADD | st.integers(0, 6), max_size=60)


@given(st.integers(6, 40), LIMITS, STEPS)
def test_memory_batches_and_preemptions_are_bounded_and_all_work_ends(
    kv_blocks: int, limits: MachineLimits, steps: list[tuple[int, int, int, bool] | int]
) -> None:
    machine = Machine(kv_blocks, limits)
    for step in steps:
        if isinstance(step, tuple):
            prompt, output, most, token_side = step
            machine.add(prompt, output, most, token_side=token_side)
        elif step == 6 and machine.left:
            machine.end(next(iter(machine.left)))  # a cancel
        else:
            machine.iterate(arrive=step % 2 == 0)
    tokens = sum(machine.most[key] for key in machine.left)
    for _ in range(2 * (limits.max_preemptions + 2) * (tokens + 1)):
        if not machine.left:
            break
        machine.iterate()
    assert not machine.left, "something starves"
    assert machine.blocks.free == kv_blocks


@given(st.integers(1, 6), st.integers(2, 12))
def test_a_flood_of_prompts_does_not_stop_token_phases(bound: int, phases: int) -> None:
    """With prompts that would fill every batch, token phases still run after `bound` iterations."""
    machine = Machine(4000, MachineLimits(BLOCK, 20, 16, bound))
    for _ in range(phases):
        machine.add(4, 40, 50, token_side=True)
    machine.iterate()
    for _ in range(40 + bound * phases):
        machine.add(20, 1, 1, token_side=False)
        machine.iterate()
    assert all(f"w{n}" in machine.done for n in range(phases))
    assert max(machine.preempted.values(), default=0) < bound or bound == 1


def test_the_rules_meet_every_kind_of_preemption() -> None:
    """The bounds above are tight: runs reach sitting out, eviction, and the bound itself."""
    machine = Machine(24, MachineLimits(BLOCK, 12, 8, 3))
    sat_out = evicted = 0
    for number in range(300):
        if number % 3 == 0 and len(machine.left) < 12:
            machine.add(5 + number % 20, 30, 60, token_side=number % 2 == 0)
        batch = machine.iterate()
        sat_out += len(batch.sat_out)
        evicted += len(machine.evicted)
    assert sat_out > 20
    assert evicted > 20
    assert max(machine.preempted.values()) == 3


def test_a_long_prompt_is_computed_in_chunks_and_short_ones_together() -> None:
    machine = MachineScheduler(MachineLimits(), Blocks(1000))
    for key, tokens in (("long", 5000), ("a", 1000), ("b", 900), ("c", 600)):
        machine.add_prompt(key, tokens)
    assert machine.admit() == ["long", "a", "b", "c"]
    batches = []
    for _ in range(5):
        batches.append(machine.next_batch())
        machine.complete(batches[-1])
    assert [b.parts for b in batches] == [
        (("long", 2048),),
        (("long", 2048),),
        (("long", 904), ("a", 1000)),
        (("b", 900), ("c", 600)),
        (),
    ]


def test_memory_is_taken_as_the_output_grows() -> None:
    blocks = Blocks(10)
    machine = MachineScheduler(MachineLimits(4, 100, 8), blocks)
    machine.add_token("a", 4, 34)
    assert machine.reserve() == ["a"]
    used = [10 - blocks.free]
    machine.ready("a")
    for _ in range(9):
        assert machine.make_room() == []
        machine.complete(machine.next_batch())
        used.append(10 - blocks.free)
    assert used == [1, 2, 2, 2, 2, 3, 3, 3, 3, 4]


def test_the_newest_gives_way_lets_others_pass_and_comes_back_first() -> None:
    blocks = Blocks(7)
    machine = MachineScheduler(MachineLimits(4, 100, 8, 2), blocks)
    for key in ("old", "new"):
        machine.add_token(key, 7, 17)
    assert machine.reserve() == ["old", "new"]
    machine.ready("old")
    machine.ready("new")
    evicted: list[str] = []
    while not evicted:
        evicted = machine.make_room()
        machine.complete(machine.next_batch())
    assert evicted == ["new"]
    for key, tokens in (("small", 8), ("big", 15), ("behind", 2)):
        machine.add_prompt(key, tokens)
    assert machine.admit() == ["small"]  # "new" lets it pass; nobody passes "big"
    machine.remove("old")
    blocks.take_back("old")
    assert machine.admit() == ["new"]
    assert [key for key, _ in machine.next_batch().parts] == ["small", "new"]


def test_a_key_is_used_once() -> None:
    machine = MachineScheduler(MachineLimits(4, 100, 8), Blocks(10))
    machine.add_prompt("b", 4)
    with pytest.raises(ValueError, match="already"):
        machine.add_token("b", 4, 8)


def test_limits_that_could_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="max_running"):
        MachineLimits(4, 8, 8)
    with pytest.raises(ValueError, match="1 or more"):
        MachineLimits(max_preemptions=0)
