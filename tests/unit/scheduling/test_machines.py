"""Machines that register, report, drain and leave; bad input; size and memory."""

from __future__ import annotations

import gc

import pytest

from splitwise.scheduling import arrays
from splitwise.scheduling.decisions import (
    Assign,
    Fail,
    Finish,
    Ignore,
    RefuseMachine,
    Restart,
)
from splitwise.scheduling.fleet import REMEMBERED_IDS
from splitwise.scheduling.states import MachineState
from tests.unit.scheduling.cluster import Talk, one


def test_a_machine_that_registers_again_keeps_its_work() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    assert one(talk.join("p1"), Ignore).reason == "ignore:already-registered"
    assert talk.row("p1", arrays.PROMPT_TOKENS) == 100


def test_bad_registrations_are_refused_by_name() -> None:
    talk = Talk("p1")
    talk.join("t1", incarnation=5)
    codes = [
        one(talk.join("t1", incarnation=4), RefuseMachine).code,
        one(talk.join("t1", incarnation=5, kv_blocks=7), RefuseMachine).code,
        one(talk.join("t2", kv_fingerprint="other"), RefuseMachine).code,
        one(talk.join("t2", home="router"), RefuseMachine).code,
        one(talk.join("t2", kv_blocks=0), RefuseMachine).code,
    ]
    assert codes == [
        "stale_incarnation", "identity_conflict", "kv_fingerprint", "bad_description", "bad_description",
    ]  # fmt: skip
    assert set(talk.scheduler.fleet.machines) == {"p1", "t1"}


def test_an_older_incarnation_is_refused_even_after_the_loss_of_the_newer() -> None:
    talk = Talk("p1")
    talk.join("t1", incarnation=5)
    talk.lose("t1", 5)
    assert one(talk.join("t1", incarnation=4), RefuseMachine).code == "stale_incarnation"
    assert talk.join("t1", incarnation=5) == []


def test_a_new_incarnation_takes_the_place_of_the_old_one() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    decided = talk.join("t1", incarnation=2)
    assert one(decided, Restart).reason == "machine:new-incarnation"
    assert one(decided, Assign).attempt == 2
    assert one(talk.lose("t1", 1), Ignore).reason == "ignore:other-incarnation"
    assert one(talk.report("t1", incarnation=1), Ignore).reason == "ignore:other-incarnation"
    talk.finish("a", 2)
    assert talk.idle()


def test_another_fingerprint_is_welcome_once_no_machine_has_the_old_one() -> None:
    talk = Talk("p1 t1")
    talk.lose("p1")
    talk.lose("t1")
    assert talk.join("p1", incarnation=2, kv_fingerprint="new") == []
    assert one(talk.join("t1", incarnation=2), RefuseMachine).code == "kv_fingerprint"


def test_reports_that_are_old_or_from_the_future_are_ignored() -> None:
    talk = Talk("p1 t1")
    talk.report("p1", prompt=500, sequence=7)
    reasons = [
        one(talk.report("p1", prompt=1, sequence=7), Ignore).reason,
        one(talk.report("p1", prompt=1, sequence=6), Ignore).reason,
        one(talk.report("p1", prompt=1, sequence=8, through=99), Ignore).reason,
        one(talk.report("p1", prompt=-1, sequence=8), Ignore).reason,
        one(talk.report("p1", prompt=1, sequence=8, incarnation=2), Ignore).reason,
        one(talk.report("nobody", prompt=1), Ignore).reason,
    ]
    assert reasons == [
        "ignore:stale-report", "ignore:stale-report", "ignore:report-from-the-future", "ignore:bad-value",
        "ignore:other-incarnation", "ignore:unknown-machine",
    ]  # fmt: skip
    assert talk.row("p1", arrays.PROMPT_KEY) == 500


def test_a_draining_machine_gets_no_work_and_finishes_its_own() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("a")
    talk.drain("p1")
    assert talk.scheduler.fleet.machines["p1"].state is MachineState.DRAINING
    assert {talk.assigned(f"r{n}").prompt_machine for n in range(5)} == {"p2"}
    assert talk.first("a") == []
    assert one(talk.drain("p1"), Ignore).reason == "ignore:already-so"
    talk.drain("p1", undo=True)
    assert talk.assigned("b").prompt_machine == "p1"


def test_a_borrowed_machine_drains_and_goes_home() -> None:
    talk = Talk("p1 t1 t2", queue_tokens=1000, borrow_hold=0.0)
    talk.assigned("a", prompt=900)
    talk.assigned("b", prompt=900)
    machine = talk.scheduler.fleet.machines["t2"]
    assert machine.state is MachineState.BORROWED
    talk.drain("t2")
    talk.first("b")
    assert (machine.state, machine.pool) == (MachineState.DRAINING, machine.spec.home)


def test_a_duplicate_request_id_is_ignored() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    assert one(talk.arrive("a", prompt=999), Ignore).reason == "ignore:duplicate-request"
    assert talk.row("p1", arrays.PROMPT_TOKENS) == 100


@pytest.mark.parametrize(("prompt", "most"), [(0, 5), (-3, 5), (5, 0)])
def test_empty_requests_are_invalid(prompt: int, most: int) -> None:
    assert one(Talk("p1 t1").arrive("a", prompt=prompt, most=most), Fail).status == "INVALID_ARGUMENT"


def test_time_never_runs_backwards() -> None:
    talk = Talk("p1 t1")
    talk.tick(10.0)
    talk.now = 3.0
    assert one(talk.arrive("a", deadline=9.0), Fail).status == "DEADLINE_EXCEEDED"


# ---- size


def test_the_cluster_grows_to_thousands_of_machines_and_many_models() -> None:
    talk = Talk("")
    for number in range(2000):
        talk.join(f"{'pt'[number % 2]}{number}", model=f"m{number % 40}")
    for number in range(400):
        assign = talk.assigned(f"r{number}", model=f"m{number % 40}")
        assert int(assign.prompt_machine[1:]) % 40 == number % 40
    for number in range(0, 2000, 3):
        talk.lose(f"{'pt'[number % 2]}{number}")
    assert len(talk.scheduler.fleet.machines) == 2000 - 667


def test_memory_is_bounded_over_many_requests_and_machines() -> None:
    talk = Talk("p1 t1", policy="prefix-aware", prefix_blocks_per_machine=100, borrow_hold=0.0)
    for number in range(5000):
        talk.assigned(f"r{number}", prompt=160, prefix_hashes=tuple(range(number * 10, number * 10 + 10)),
                      deadline=1e9)  # fmt: skip
        talk.finish(f"r{number}")
    scheduler = talk.scheduler
    assert scheduler.open_requests == 0
    assert len(scheduler._deadlines) <= 65
    assert len(scheduler._placement.prefixes) <= 100
    assert not any(machine.open for machine in scheduler.fleet.machines.values())
    for number in range(REMEMBERED_IDS + 50):
        talk.join(f"p-{number}")
        talk.lose(f"p-{number}")
    assert len(scheduler.fleet._last_incarnation) == REMEMBERED_IDS
    assert len(scheduler.fleet.by_slot) == 16
    gc.collect()


def test_ten_thousand_requests_run_at_once() -> None:
    talk = Talk("")
    for number in range(40):
        talk.join(f"{'pt'[number % 2]}{number}", kv_blocks=100_000, max_running=1000)
    for number in range(10_000):
        talk.assigned(f"r{number}", prompt=32, most=20)
        talk.first(f"r{number}")
        talk.kv(f"r{number}")
    assert talk.scheduler.open_requests == 10_000
    for number in range(10_000):
        assert one(talk.finish(f"r{number}"), Finish)
    assert talk.idle()
