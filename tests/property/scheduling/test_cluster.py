"""Whatever happens to a cluster, in any order: the scheduler's books stay right."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from splitwise.scheduling import events as ev
from splitwise.scheduling.checkpoint import capture
from splitwise.scheduling.decisions import Assign, Enqueue, MovePool
from splitwise.scheduling.eventlog import decode, decode_start, encode, replay
from splitwise.scheduling.events import MachineSpec, Pool
from splitwise.scheduling.policies import POLICIES
from splitwise.scheduling.settings import SchedulerSettings
from tests.property.scheduling.world import OPERATIONS, World

NUMBERS = st.integers(0, 120)
STEPS = st.lists(st.tuples(st.sampled_from(OPERATIONS), NUMBERS, NUMBERS, NUMBERS), max_size=120)
SETTINGS = st.builds(
    SchedulerSettings,
    policy=st.sampled_from(sorted(POLICIES)),
    queue_tokens=st.sampled_from([200, 1000, 8192]),
    last_resort_tokens=st.sampled_from([8192, 32768]),
    reserve_output_tokens=st.sampled_from([1, 64, 256]),
    max_queued=st.sampled_from([0, 3, 1000]),
    max_attempts=st.integers(1, 4),
    borrow_hold=st.sampled_from([0.0, 0.5]),
    backoff=st.sampled_from([0.0, 0.5]),
    prefix_blocks_per_machine=st.sampled_from([0, 20, 1000]),
    seed=st.integers(0, 2**32 - 1),
)
quick = settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=150)


def started(options: SchedulerSettings) -> World:
    world = World(options)
    for number in range(6):
        world.step("join", number, 1, 1)
    return world


@given(SETTINGS, STEPS)
@quick
def test_books_are_right_after_every_event(options: SchedulerSettings, steps) -> None:
    world = started(options)
    for step in steps:
        world.step(*step)


@given(SETTINGS, STEPS)
@quick
def test_every_request_ends_once_and_nothing_is_left(options: SchedulerSettings, steps) -> None:
    world = started(options)
    for step in steps:
        world.step(*step)
    world.finish_all()
    assert world.scheduler.open_requests == 0
    assert world.scheduler.queued == 0
    assert set(world.ends) == {f"r{number}" for number in range(world.arrived)}
    assert not world.counters().any()
    assert not world.scheduler.fleet.borrowed
    assert all(m.pool is m.spec.home for m in world.scheduler.fleet.machines.values())
    assert len(world.scheduler._deadlines) <= 64


@given(SETTINGS, STEPS)
@quick
def test_a_log_replays_to_the_same_decisions(options: SchedulerSettings, steps) -> None:
    world = started(options)
    for step in steps:
        world.step(*step)
    assert replay(world.log) == len(world.log) - 1
    for number, line in enumerate(world.log[1:], 2):
        entry = decode(line, number)
        assert encode(entry.event, entry.decisions) == line


@given(SETTINGS, STEPS, STEPS)
@quick
def test_a_log_that_begins_again_replays_from_there(options: SchedulerSettings, before, after) -> None:
    """The state in its first line decides everything as the scheduler does that lived through it all."""
    world = started(options)
    for step in before:
        world.step(*step)
    world.recorder.begin_again()
    cut = len(world.log) - 1
    for step in after:
        world.step(*step)
    assert replay(world.log[cut:]) == len(world.log) - cut - 1
    restored = decode_start(world.log[cut])
    for number, line in enumerate(world.log[cut + 1 :], 2):
        entry = decode(line, number)
        restored.handle(entry.event)
    assert capture(restored) == capture(world.scheduler)


@given(SETTINGS, STEPS)
@quick
def test_kv_is_never_promised_twice(options: SchedulerSettings, steps) -> None:
    """At the moment of an assignment the pair's memory holds all that was promised there."""
    world = started(options)
    for step in steps:
        seen = len(world.decisions)
        world.step(*step)
        fresh = [d for d in world.decisions[seen:] if isinstance(d, Assign)]
        for assign in fresh[-1:]:
            request = world.scheduler.request(assign.request_id)
            for hold in (request.prompt, request.token) if request else ():
                if hold is not None:
                    spec, slot = hold.machine.spec, hold.machine.slot
                    assert hold.blocks <= spec.kv_blocks
                    # growth of older requests may have passed the bound before, never this promise
                    others = world.counters()[3, slot] - hold.blocks
                    assert others + hold.blocks <= spec.kv_blocks
            if request and request.token is not None:
                most = -(-(request.prompt_tokens + request.max_tokens) // 16)
                assert most <= request.token.machine.spec.kv_blocks


@given(st.lists(st.tuples(st.integers(1, 900), st.integers(1, 300)), min_size=1, max_size=60), SETTINGS)
@quick
def test_the_queue_is_first_come_first_served(sizes, options: SchedulerSettings) -> None:
    """No request overtakes another one of its model, however large the first and small the second."""
    world = World(options)
    world.step("join", 0, 1, 1)
    world.step("join", 1, 1, 1)
    order: list[str] = []
    for number, (prompt, most) in enumerate(sizes):
        decided = world.send(ev.RequestArrived(number, f"q{number}", "alpha", prompt, most))
        order += [d.request_id for d in decided if isinstance(d, Assign)]
    while world.running:
        name = next(iter(world.running))
        decided = world.send(ev.AttemptFinished(99.0, name, 1))
        order += [d.request_id for d in decided if isinstance(d, Assign)]
    assert order == sorted(order, key=lambda name: int(name[1:]))
    assert world.scheduler.queued == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 0.2)), max_size=150))
@quick
def test_machines_do_not_flap(steps) -> None:
    """A borrowed machine stays for the hold time, so moves are bounded by time, not by requests."""
    hold = 1.0
    world = World(SchedulerSettings(queue_tokens=100, last_resort_tokens=100, borrow_hold=hold))
    for name, home in (("p", Pool.PROMPT), ("t", Pool.TOKEN)):
        world.send(ev.MachineJoined(0, MachineSpec(name, 1, home, "alpha", "f", "n", 1000, 16, 8)))
    for number, (kind, wait) in enumerate(steps):
        world.now += wait
        if kind < 2:
            world.send(ev.RequestArrived(world.now, f"f{number}", "alpha", 90, 40))
        elif kind == 2 and world.running:
            name = next(iter(world.running))
            world.send(ev.AttemptFinished(world.now, name, world.running[name].attempt))
        else:
            world.send(ev.Tick(world.now))
    moves = [d.machine_id for d in world.decisions if isinstance(d, MovePool)]
    for name in ("p", "t"):
        assert moves.count(name) <= 2 * (world.now / hold + 1)


DIGEST = """
import hashlib, random, sys
from tests.property.scheduling.world import OPERATIONS, World
from splitwise.scheduling.decisions import Assign
from splitwise.scheduling.policies import POLICIES
from splitwise.scheduling.settings import SchedulerSettings
digest = hashlib.sha256()
for seed, policy in enumerate(sorted(POLICIES)):
    draw = random.Random(seed)
    world = World(SchedulerSettings(policy=policy, queue_tokens=1000, seed=seed))
    for number in range(6):
        world.step("join", number, 1, 1)
    for _ in range(300):
        world.step(draw.choice(OPERATIONS), *(draw.randrange(120) for _ in range(3)))
    digest.update("\\n".join(world.log).encode())
    digest.update(repr([d.weighed for d in world.decisions if isinstance(d, Assign)]).encode())
print(digest.hexdigest())
"""


def test_compiled_and_plain_kernels_decide_alike() -> None:
    """The same events in a process with numba and one without give the same logs and notes, byte for byte."""
    root = Path(__file__).parents[3]
    digests = set()
    for disable in ("0", "1"):
        environment = {**os.environ, "NUMBA_DISABLE_JIT": disable, "PYTHONPATH": str(root)}
        run = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(run.stdout.strip())
    assert len(digests) == 1
    assert hashlib.sha256(b"").hexdigest() not in digests


def test_the_steps_reach_what_they_are_for() -> None:
    """A long random run must meet queues, borrowing, restarts and ends of every kind."""
    import random

    draw = random.Random(5)
    world = started(SchedulerSettings(queue_tokens=300, last_resort_tokens=2000, max_attempts=3))
    for _ in range(2500):
        world.step(draw.choice(OPERATIONS), *(draw.randrange(120) for _ in range(3)))
    kinds = {type(decision).__name__ for decision in world.decisions}
    assert kinds >= {"Assign", "Enqueue", "Reject", "Restart", "Finish", "Fail", "Cancelled", "MovePool"}
    assert any(isinstance(d, Enqueue) and d.reason == "queue:behind-others" for d in world.decisions)
    borrowed = [d for d in world.decisions if isinstance(d, Assign) and "borrowed" in d.reason]
    assert borrowed
    assert any(d.prompt_machine == d.token_machine for d in world.decisions if isinstance(d, Assign))
