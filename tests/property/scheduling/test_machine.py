"""The machine scheduler under any load: memory, batches, order, and bounded preemption."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.scheduling.machine import Batch, MachineLimits, MachineScheduler, Stage

BLOCK = 4


class Machine:
    """A machine scheduler with the outside world of one machine, checked after every step."""

    def __init__(self, limits: MachineLimits) -> None:
        self.limits = limits
        self.scheduler = MachineScheduler(limits)
        self.left: dict[str, int] = {}  # tokens that the request will still make; unknown to the scheduler
        self.here: dict[str, bool] = {}  # its token phase runs here
        self.preempted: Counter[str] = Counter()
        self.arrived: list[str] = []
        self.began: list[str] = []
        self.done: set[str] = set()

    def add(self, prompt: int, output: int, most: int, kind: int) -> None:
        key = f"w{len(self.arrived)}"
        capacity = self.limits.kv_blocks * BLOCK
        prompt = min(prompt, capacity - 1)
        most = max(1, min(most, capacity - prompt))
        output = min(output, most)
        if kind == 2:
            self.scheduler.add_token(key, prompt, most)
            self.left[key] = output - 1
        else:
            self.scheduler.add_prompt(key, prompt, most, stays=kind == 1)
            self.left[key] = output if kind == 1 else 1
        self.here[key] = kind > 0
        self.arrived.append(key)
        self.check()

    def iterate(self, *, arrive: bool = True) -> Batch:
        self.scheduler.admit()
        for key in list(self.left):
            if arrive and self.scheduler.work(key).stage is Stage.ARRIVING:
                if self.left[key] == 0:
                    self.end(key)
                else:
                    self.scheduler.ready(key)
        resident = {k for k in self.left if self.scheduler.work(k).stage is Stage.RUNNING}
        decoding = {k for k in resident if self.scheduler.work(k).decoding}
        batch = self.scheduler.next_batch()
        self.check_batch(batch, decoding)
        for key in self.scheduler.complete(batch):
            self.left[key] -= 1
            if self.left[key] == 0:
                self.end(key)
        self.check()
        return batch

    def end(self, key: str) -> None:
        self.scheduler.finish(key)
        del self.left[key]
        self.done.add(key)

    def check_batch(self, batch: Batch, decoding: set[str]) -> None:
        ran = {key for key, _ in batch.parts}
        for key in decoding - ran:
            assert key in (*batch.sat_out, *batch.evicted), "it did not run and nobody says so"
            self.preempted[key] += 1
            assert self.preempted[key] <= self.limits.max_preemptions
        prompts = {key: n for key, n in batch.parts if not self.scheduler.work(key).decoding}
        if prompts:
            assert sum(n for _, n in batch.parts) <= self.limits.max_batch_tokens
        assert len(batch.parts) <= self.limits.max_running
        for key in prompts:
            if self.scheduler.work(key).preemptions == 0 and key not in self.began:
                self.began.append(key)
        order = [self.arrived.index(key) for key in self.began]
        assert order == sorted(order), "a prompt overtook an older one"

    def check(self) -> None:
        works = [self.scheduler.work(key) for key in self.left]
        held = sum(work.blocks for work in works)
        assert held + self.scheduler.free == self.limits.kv_blocks
        assert self.scheduler.free >= 0
        for work in works:
            assert (work.blocks == 0) == (work.stage is Stage.WAITING)
            assert work.blocks * BLOCK >= work.computed
            assert work.preemptions <= self.limits.max_preemptions


LIMITS = st.builds(
    MachineLimits,
    kv_blocks=st.integers(6, 40),
    block_tokens=st.just(BLOCK),
    max_batch_tokens=st.integers(9, 30),
    max_running=st.integers(1, 8),
    max_preemptions=st.integers(0, 5),
)
ADD = st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 90), st.integers(0, 2))
STEPS = st.lists(ADD | st.integers(0, 6), max_size=60)


@given(LIMITS, STEPS)
def test_memory_batches_and_preemptions_are_bounded_and_all_work_ends(limits: MachineLimits, steps) -> None:
    machine = Machine(limits)
    for step in steps:
        if isinstance(step, tuple):
            machine.add(*step)
        elif step == 6 and machine.left:
            machine.end(next(iter(machine.left)))  # a cancel
        else:
            machine.iterate(arrive=step % 2 == 0)
    tokens = sum(machine.scheduler.work(k).most for k in machine.left)
    for _ in range(2 * (limits.max_preemptions + 2) * (tokens + 1)):
        if not machine.left:
            break
        machine.iterate()
    assert not machine.left, "something starves"
    assert machine.scheduler.free == limits.kv_blocks


@given(st.integers(1, 6), st.integers(2, 12))
def test_a_flood_of_prompts_does_not_stop_token_phases(bound: int, phases: int) -> None:
    """With prompts that would fill every batch, token phases still run after `bound` iterations."""
    machine = Machine(MachineLimits(4000, BLOCK, 20, 16, bound))
    for _ in range(phases):
        machine.add(4, 40, 50, 2)
    machine.iterate()
    for number in range(80):
        machine.add(20, 1, 1, 0)
        machine.iterate()
        assert number < bound - 1 or len(machine.preempted) <= phases
    assert all(f"w{n}" in machine.done for n in range(phases))
    assert max(machine.preempted.values(), default=0) <= bound


def test_the_rules_meet_every_kind_of_preemption() -> None:
    """The bounds above are tight: runs reach sitting out, eviction, and the bound itself."""
    machine = Machine(MachineLimits(24, BLOCK, 12, 8, 3))
    sat_out = evicted = 0
    for number in range(300):
        if number % 3 == 0 and len(machine.left) < 12:
            machine.add(5 + number % 20, 30, 60, number % 2 + 1)
        batch = machine.iterate()
        sat_out += len(batch.sat_out)
        evicted += len(batch.evicted)
    assert sat_out > 20
    assert evicted > 20
    assert max(machine.preempted.values()) == 3


def test_a_long_prompt_is_computed_in_chunks_and_short_ones_together() -> None:
    machine = MachineScheduler(MachineLimits(1000))
    machine.add_prompt("long", 5000, 10)
    machine.add_prompt("a", 1000, 10)
    machine.add_prompt("b", 900, 10)
    machine.add_prompt("c", 600, 10)
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
    machine = MachineScheduler(MachineLimits(10, 4, 100, 8))
    machine.add_prompt("a", 4, 30, stays=True)
    used = []
    for _ in range(10):
        machine.complete(machine.next_batch())
        used.append(10 - machine.free)
    assert used == [2, 2, 2, 2, 3, 3, 3, 3, 4, 4]


def test_the_newest_least_preempted_gives_way_and_comes_back_first() -> None:
    machine = MachineScheduler(MachineLimits(6, 4, 100, 8, 2))
    for key in ("old", "new"):
        machine.add_prompt(key, 7, 17, stays=True)
    machine.add_prompt("waits", 15, 4)
    evicted = []
    while not evicted:
        batch = machine.next_batch()
        evicted = list(batch.evicted)
        machine.complete(batch)
    assert evicted == ["new"]
    machine.finish("old")
    assert [key for key, _ in machine.next_batch().parts] == ["new"]
    assert machine.work("waits").stage is Stage.WAITING


@pytest.mark.parametrize(("prompt", "most"), [(100, 1), (10, 60)])
def test_work_that_never_fits_is_refused(prompt: int, most: int) -> None:
    machine = MachineScheduler(MachineLimits(10, 4, 100, 8))
    with pytest.raises(ValueError, match="10"):
        machine.add_prompt("a", prompt, most, stays=True)
    machine.add_prompt("b", 4, 4)
    with pytest.raises(ValueError, match="already"):
        machine.add_token("b", 4, 4)


def test_limits_that_could_starve_prompts_are_refused() -> None:
    with pytest.raises(ValueError, match="max_running"):
        MachineLimits(10, 4, 8, 8)
    with pytest.raises(ValueError, match="preemptions"):
        MachineLimits(10, max_preemptions=-1)
