"""What becomes of requests: ends, restarts, refusals, deadlines, pauses of their machines."""

from __future__ import annotations

import pytest

from splitwise.scheduling import arrays
from splitwise.scheduling.decisions import (
    Assign,
    CancelAttempt,
    Cancelled,
    Enqueue,
    Fail,
    Finish,
    Ignore,
    Reject,
    Restart,
)
from splitwise.scheduling.events import FailureCause, Phase
from splitwise.scheduling.states import RequestState
from tests.unit.scheduling.cluster import Talk, of, one


def state(talk: Talk, name: str) -> RequestState:
    request = talk.scheduler.request(name)
    assert request is not None
    return request.state


def test_a_request_lives_through_its_states_and_is_dropped() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    assert state(talk, "a") is RequestState.ASSIGNED
    talk.first("a")
    assert state(talk, "a") is RequestState.HANDING_OVER
    talk.kv("a")
    assert state(talk, "a") is RequestState.TOKEN_RUNNING
    assert talk.row("p1", arrays.KV_OWN) == 0
    talk.tokens("a", 10)
    assert talk.finish("a") == [Finish("finish:last-token", "a")]
    assert talk.scheduler.open_requests == 0
    assert talk.idle()


def test_events_of_the_two_streams_may_overtake_each_other() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    talk.kv("a")
    talk.tokens("a", 3)
    talk.first("a")
    assert state(talk, "a") is RequestState.TOKEN_RUNNING
    request = talk.scheduler.request("a")
    assert request is not None
    assert request.made == 4
    assert one(talk.first("a"), Ignore).reason == "ignore:out-of-place", "the first token comes once"
    assert request.made == 4


def test_promised_memory_grows_with_the_output() -> None:
    talk = Talk("p1 t1", reserve_output_tokens=16)
    talk.assigned("a", prompt=160, most=1000)
    assert talk.row("t1", arrays.KV_OWN) == 11
    talk.first("a")
    talk.tokens("a", 15)
    assert talk.row("t1", arrays.KV_OWN) == 11
    talk.tokens("a", 1)
    assert talk.row("t1", arrays.KV_OWN) == 12
    talk.finish("a")
    assert talk.idle()


def test_a_first_token_that_ends_the_request_cancels_the_token_side() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    cancel, finish = talk.first("a", finishes=True)
    assert cancel == CancelAttempt("finish:first-token", "a", 1, "t1", Phase.TOKEN)
    assert finish == Finish("finish:first-token", "a")
    assert talk.idle()


def test_cancel_stops_both_sides_wherever_the_request_stands() -> None:
    talk = Talk("p1 t1")
    for name, steps in {"a": [], "b": [talk.first], "c": [talk.first, talk.kv]}.items():
        talk.assigned(name)
        for step in steps:
            step(name)
        decided = talk.cancel(name)
        sides = {(c.machine_id, c.phase) for c in of(decided, CancelAttempt)}
        assert sides == {("t1", Phase.TOKEN)} | ({("p1", Phase.PROMPT)} if name != "c" else set())
        assert decided[-1] == Cancelled("client:cancelled", name)
        assert talk.idle()
    assert one(talk.cancel("a"), Ignore).reason == "ignore:unknown-request"


def test_a_waiting_request_can_be_cancelled() -> None:
    talk = Talk("p1 t1", queue_tokens=100, last_resort_tokens=100)
    for number in range(4):
        talk.arrive(f"r{number}", prompt=90)
    assert talk.scheduler.queued == 2
    assert talk.cancel("r2") == [Cancelled("client:cancelled", "r2")]
    assert [a.request_id for a in of(talk.finish("r0"), Assign)] == ["r3"]


# ---- failures and restarts


def test_a_lost_token_machine_restarts_from_all_tokens_made() -> None:
    talk = Talk("p1 t1 t2")
    talk.assigned("a", prompt=160, most=200)
    talk.first("a")
    talk.kv("a")
    talk.tokens("a", 95)
    decided = talk.lose("t1")
    assert decided[0] == Restart("machine:lost", "a", 1)
    again = one(decided, Assign)
    assert (again.attempt, again.token_machine) == (2, "t2")
    assert talk.row("p1", arrays.PROMPT_TOKENS) == 160 + 96
    request = talk.scheduler.request("a")
    assert request is not None
    assert request.remaining == 104


def test_a_lost_prompt_machine_matters_only_before_the_hand_over() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("a")
    talk.first("a")
    talk.kv("a")
    assert talk.lose("p1") == []
    talk.assigned("b")
    talk.first("b")
    decided = talk.lose("p2")
    assert one(decided, CancelAttempt).machine_id == "t2"
    assert one(decided, Restart).request_id == "b"


def test_the_next_attempt_avoids_the_pair_that_failed() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("a")
    again = one(talk.fail("a", Phase.TOKEN, FailureCause.TRANSFER), Assign)
    assert (again.prompt_machine, again.token_machine) == ("p2", "t2")
    only = Talk("p1 t1")
    only.assigned("a")
    same = one(only.fail("a", Phase.TOKEN, FailureCause.TRANSFER), Assign)
    assert (same.prompt_machine, same.token_machine) == ("p1", "t1"), "the same pair before none"


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (FailureCause.TRANSFER, "UNAVAILABLE"),
        (FailureCause.TRANSFER_CORRUPT, "DATA_LOSS"),
        (FailureCause.OVERLOADED, "RESOURCE_EXHAUSTED"),
        (FailureCause.ENGINE, "UNAVAILABLE"),
    ],
)
def test_attempts_are_bounded(cause: FailureCause, status: str) -> None:
    talk = Talk("p1 p2 t1 t2", max_attempts=3, backoff=0.0)
    talk.assigned("a")
    for attempt in (1, 2):
        assert one(talk.fail("a", Phase.TOKEN, cause, attempt), Assign).attempt == attempt + 1
        talk.tick(0.1)
    decided = talk.fail("a", Phase.TOKEN, cause, 3)
    fail = one(decided, Fail)
    assert (fail.status, fail.reason) == (status, "attempts:spent")
    assert "3 of 3" in fail.message
    assert "because" in fail.message
    assert of(decided, Assign) == []
    assert talk.idle()


def test_an_invalid_request_is_not_tried_again() -> None:
    talk = Talk("p1 t1")
    talk.assigned("a")
    decided = talk.fail("a", Phase.PROMPT, FailureCause.INVALID)
    assert one(decided, Fail).status == "INVALID_ARGUMENT"
    assert one(decided, CancelAttempt).phase is Phase.TOKEN
    assert talk.idle()


def test_a_restart_with_every_token_made_is_a_finish() -> None:
    talk = Talk("p1 t1 t2")
    talk.assigned("a", most=5)
    talk.first("a")
    talk.kv("a")
    talk.tokens("a", 4)
    assert one(talk.lose("t1"), Finish).reason == "finish:all-tokens-made"


def test_events_of_an_attempt_that_was_given_up_are_ignored() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("a")
    talk.fail("a", Phase.TOKEN, FailureCause.TRANSFER)
    before = talk.scheduler.fleet.state.machines.copy()
    for late in (talk.first("a", 1), talk.kv("a", 1), talk.tokens("a", 5, 1), talk.finish("a", 1)):
        assert one(late, Ignore).reason == "ignore:other-attempt"
    assert one(talk.first("a", 3), Ignore).reason == "ignore:other-attempt", "nor one of the future"
    assert (talk.scheduler.fleet.state.machines == before).all()


def test_restarted_requests_keep_their_place_before_later_ones() -> None:
    talk = Talk("p1 t1 t2", queue_tokens=1000, last_resort_tokens=1000)
    for name in ("a", "b", "c"):
        talk.assigned(name, prompt=900)
    talk.arrive("late", prompt=900)
    decided = talk.lose("t2")
    restarted = of(decided, Restart)
    assert restarted
    assert of(decided, Assign) == []
    first = {e.request_id: e.position for e in of(decided, Enqueue)}
    assert sorted(first.values()) == list(range(1, len(first) + 1)), "in front of `late`"


def test_nothing_is_lost_when_a_machine_with_hundreds_of_requests_is() -> None:
    talk = Talk("p1 p2 t1 t2 t3")
    names = [f"r{number}" for number in range(150)]
    for name in names:
        talk.assigned(name, prompt=16, most=30)
        talk.first(name)
        talk.kv(name)
    victims = {n for n in names if talk.scheduler.request(n).token.machine.spec.machine_id == "t2"}  # type: ignore[union-attr]
    decided = talk.lose("t2")
    assert {r.request_id for r in of(decided, Restart)} == victims
    assert {a.request_id for a in of(decided, Assign)} == victims
    for name in names:
        talk.finish(name, 2 if name in victims else 1)
    assert talk.idle()


# ---- no machines, full queues, deadlines


def test_without_machines_requests_are_refused_as_unavailable() -> None:
    reject = one(Talk("").arrive("a"), Reject)
    assert (reject.unavailable, reject.reason) == (True, "machines:none")
    assert reject.retry_after > 0


def test_when_all_machines_are_lost_everything_ends_and_service_recovers_by_itself() -> None:
    talk = Talk("p1 t1", queue_tokens=200, last_resort_tokens=200)
    for number in range(6):
        talk.arrive(f"r{number}", prompt=150)
    ends = talk.lose("p1") + talk.lose("t1")
    failed = of(ends, Fail)
    assert {f.request_id for f in failed} == {f"r{n}" for n in range(6)}
    assert all((f.status, f.reason) == ("UNAVAILABLE", "machines:none") and f.retry_after for f in failed)
    assert talk.scheduler.fleet.groups == {}
    assert talk.scheduler.open_requests == talk.scheduler.queued == 0
    assert one(talk.arrive("x"), Reject).unavailable
    talk.join("p1", incarnation=2)
    talk.join("t1", incarnation=2)
    assert talk.assigned("x").prompt_machine == "p1"


def test_requests_wait_for_machines_that_pause() -> None:
    """A dead KV daemon is started again: nothing fails until it is back."""
    talk = Talk("p1 t1")
    talk.assigned("a")
    talk.pause("p1")
    talk.pause("t1")
    assert one(talk.pause("t1"), Ignore).reason == "ignore:already-so"
    parked = one(talk.fail("a", Phase.TOKEN, FailureCause.TRANSFER), Enqueue)
    assert parked.reason == "queue:all-busy"
    assert one(talk.arrive("b"), Enqueue).position == 2
    assert one(talk.arrive("late", deadline=5.0), Enqueue)
    assert of(talk.tick(4.0), Fail) == []
    assert one(talk.tick(1.0), Fail).reason == "deadline:passed"
    assert talk.pause("t1", undo=True) != [], "one machine takes both phases"
    assert talk.scheduler.queued == 0
    assert one(talk.pause("t1", undo=True), Ignore).reason == "ignore:already-so"


def test_nobody_waits_longer_than_the_pause_limit() -> None:
    talk = Talk("p1 t1", pause_limit=10.0)
    talk.pause("p1")
    talk.tick(5.0)
    talk.pause("t1")
    talk.arrive("a")
    assert of(talk.tick(5.0), Fail) == [], "t1 may yet come back"
    fail = one(talk.tick(5.0), Fail)
    assert (fail.status, fail.reason) == ("UNAVAILABLE", "machines:none")
    assert fail.retry_after
    assert talk.scheduler.fleet.machines["p1"].condition == "paused"
    assert one(talk.arrive("b"), Reject).unavailable
    talk.pause("p1", undo=True)
    assert talk.assigned("c").token_machine == "p1"


def test_a_pause_and_a_drain_are_two_things() -> None:
    talk = Talk("p1 p2 t1")
    talk.drain("p1")
    talk.pause("p1")
    talk.pause("p1", undo=True)
    assert {talk.assigned(f"r{n}").prompt_machine for n in range(4)} == {"p2"}, "the operator drained it"
    talk.pause("p1")
    talk.drain("p1", undo=True)
    assert {talk.assigned(f"s{n}").prompt_machine for n in range(4)} == {"p2"}, "its daemon is away"
    talk.pause("p1", undo=True)
    assert talk.assigned("x").prompt_machine == "p1"


def test_a_paused_machine_that_restarts_is_new() -> None:
    talk = Talk("p1 t1")
    talk.pause("p1")
    talk.pause("t1")
    talk.arrive("a")
    assert one(talk.join("p1", incarnation=2), Assign).prompt_machine == "p1"


def test_draining_everything_fails_what_waits_and_lets_the_rest_finish() -> None:
    talk = Talk("p1 t1", queue_tokens=200, last_resort_tokens=200)
    for number in range(3):
        talk.arrive(f"r{number}", prompt=150)
    assert talk.drain("p1") == []
    assert one(talk.drain("t1"), Fail).request_id == "r2"
    assert one(talk.arrive("x"), Reject).unavailable
    assert one(talk.finish("r0"), Finish).request_id == "r0"


def test_a_flood_is_queued_up_to_the_bound_and_then_rejected_with_a_delay() -> None:
    talk = Talk("p1 t1", max_queued=10_000)
    answers = [talk.arrive(f"r{number}", prompt=8, most=4)[-1] for number in range(12_000)]
    kinds = [type(answer) for answer in answers]
    assert kinds.count(Enqueue) == 10_000
    rejected = [a for a in answers if isinstance(a, Reject)]
    assert len(rejected) == 12_000 - 10_000 - kinds.count(Assign)
    assert all(not r.unavailable and r.reason == "queue:full" and r.retry_after >= 0.1 for r in rejected)
    ended = 0
    running = {a.request_id for a in answers if isinstance(a, Assign)}
    while running:
        decided = talk.finish(running.pop())
        ended += len(of(decided, Finish))
        running |= {a.request_id for a in of(decided, Assign)}
    assert ended == 12_000 - len(rejected)
    assert talk.idle()


def test_the_delay_told_follows_how_fast_the_queue_moves() -> None:
    talk = Talk("p1 t1", queue_tokens=200, last_resort_tokens=200, max_queued=40)
    for number in range(42):
        talk.arrive(f"r{number}", prompt=150)
    for number in range(20):
        talk.now += 0.5
        talk.finish(f"r{number}")
    for number in range(42, 62):
        talk.arrive(f"r{number}", prompt=150)
    wait = one(talk.arrive("more", prompt=150), Reject).retry_after
    assert 0.5 * 41 * 0.5 < wait <= 0.5 * 41


def test_deadlines_are_honoured_while_queued_and_while_running() -> None:
    talk = Talk("p1 t1", queue_tokens=200, last_resort_tokens=200)
    talk.arrive("a", prompt=150, deadline=5.0)
    talk.arrive("b", prompt=150)
    talk.arrive("c", prompt=150, deadline=1.0)
    talk.arrive("d", prompt=150)
    assert one(talk.arrive("e", deadline=0.0), Fail).status == "DEADLINE_EXCEEDED"
    talk.now = 2.0
    decided = talk.finish("b")
    assert one(decided, Fail).request_id == "c", "expired in the queue, found without a tick"
    assert one(decided, Assign).request_id == "d"
    late = talk.tick(4.0)
    assert one(late, Fail).status == "DEADLINE_EXCEEDED"
    assert {c.phase for c in of(late, CancelAttempt)} == {Phase.PROMPT, Phase.TOKEN}


def test_an_expired_restart_is_not_tried_again() -> None:
    talk = Talk("p1 p2 t1")
    talk.assigned("a", deadline=1.0)
    talk.now = 2.0
    assert one(talk.fail("a", Phase.PROMPT, FailureCause.TRANSFER), Fail).status == "DEADLINE_EXCEEDED"


def test_a_waiting_request_whose_only_fitting_machine_is_lost_does_not_block_the_others() -> None:
    talk = Talk("p1 t1", queue_tokens=200, last_resort_tokens=200)
    talk.join("m1", kv_blocks=5000)
    for number in range(3):
        talk.assigned(f"r{number}", prompt=190)
    assert one(talk.arrive("big", prompt=20_000, most=10_000), Enqueue).position == 1
    assert one(talk.arrive("small", prompt=20), Enqueue).position == 2
    talk.lose("m1")
    served = [decision for name in ("r0", "r2", "r1") for n in (1, 2) for decision in talk.finish(name, n)]
    failed = one(served, Fail)
    assert (failed.request_id, failed.status) == ("big", "UNAVAILABLE")
    assert "small" in {a.request_id for a in of(served, Assign)}
