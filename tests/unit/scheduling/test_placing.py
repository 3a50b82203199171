"""Where requests go: pools, thresholds, borrowing, the last resort, memory, reported load."""

from __future__ import annotations

import pytest

from splitwise.scheduling import arrays
from splitwise.scheduling.decisions import Assign, Enqueue, Fail, MovePool, Reject
from splitwise.scheduling.events import FailureCause, Phase, Pool
from splitwise.scheduling.policies import POLICIES
from splitwise.scheduling.settings import SchedulerSettings, SettingsChanged
from tests.unit.scheduling.cluster import Talk, of, one


def test_both_machines_are_assigned_at_arrival() -> None:
    assign = Talk("p1 p2 t1 t2").assigned("a")
    assert (assign.prompt_machine, assign.token_machine) == ("p1", "t1")
    assert (assign.attempt, assign.serial, assign.reason) == (1, 1, "jsq:prompt-pool/token-pool")


def test_the_shortest_queue_of_tokens_is_joined_not_of_requests() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("long", prompt=5000)
    assert [talk.assigned(f"s{i}", prompt=1000).prompt_machine for i in range(4)] == ["p2"] * 4


def test_a_computed_prompt_leaves_the_queue() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("a", prompt=5000)
    talk.first("a")
    assert talk.row("p1", arrays.PROMPT_KEY) == 0
    assert talk.assigned("b", prompt=5000).prompt_machine == "p2", "equal queues take turns"
    assert talk.assigned("c").prompt_machine == "p1"


@pytest.mark.parametrize("policy", ["jsq", "prefix-aware"])
def test_idle_machines_take_turns(policy: str) -> None:
    """One request at a time finds every queue empty: each machine gets its share, in order."""
    talk = Talk("p1 p2 p3 t1 t2 t3", policy=policy)
    pairs = []
    for number in range(9):
        assign = talk.assigned(f"r{number}")
        talk.first(f"r{number}")
        talk.finish(f"r{number}")
        pairs.append((assign.prompt_machine, assign.token_machine))
    assert pairs == [("p1", "t1"), ("p2", "t2"), ("p3", "t3")] * 3


def test_a_machine_that_joins_an_idle_cluster_is_next() -> None:
    talk = Talk("p1 t1 t2")
    for number in range(3):
        talk.assigned(f"r{number}")
        talk.first(f"r{number}")
        talk.finish(f"r{number}")
    talk.join("p2")
    assert talk.assigned("next").prompt_machine == "p2"


def test_turns_only_decide_between_equals() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.assigned("long", prompt=5000)  # on p1
    machines = []
    for number in range(4):
        machines.append(talk.assigned(f"r{number}", prompt=10).prompt_machine)
        talk.first(f"r{number}")
    assert machines == ["p2"] * 4, "p1 waits longer, and has a queue"


def test_token_machines_are_compared_by_free_memory() -> None:
    talk = Talk("t1", queue_tokens=10**6, last_resort_tokens=10**6)
    talk.join("p1", kv_blocks=9000)
    talk.join("t2", kv_blocks=2200)
    machines = [talk.assigned(f"r{number}", prompt=8000).token_machine for number in range(4)]
    assert machines == ["t2", "t2", "t2", "t1"], "t2 has 685 blocks free after three, t1 1,000"


def test_past_the_threshold_the_mixed_pool_is_asked_before_the_opposite_pool() -> None:
    talk = Talk("p1 t1 m1", queue_tokens=1000)
    assert talk.assigned("a", prompt=900).prompt_machine == "p1"
    second = talk.arrive("b", prompt=900)
    assert one(second, Assign).prompt_machine == "m1"
    assert one(second, Assign).reason == "jsq:mixed-pool/token-pool"
    assert of(second, MovePool) == []


def test_a_prompt_longer_than_the_threshold_goes_to_an_idle_machine() -> None:
    assert Talk("p1 t1", queue_tokens=1000).assigned("a", prompt=9000).prompt_machine == "p1"


def test_a_token_machine_is_borrowed_and_goes_home() -> None:
    talk = Talk("p1 t1 t2", queue_tokens=1000, borrow_hold=2.0)
    talk.assigned("a", prompt=900)
    decided = talk.arrive("b", prompt=900)
    assert one(decided, MovePool) == MovePool("pool:borrow", "t2", Pool.TOKEN, Pool.MIXED)
    assert one(decided, Assign).prompt_machine == "t2"
    assert one(decided, Assign).reason == "jsq:borrowed/token-pool"
    assert of(talk.first("b"), MovePool) == [], "it stays for the hold time"
    assert of(talk.tick(1.9), MovePool) == []
    assert one(talk.tick(0.2), MovePool) == MovePool("pool:return", "t2", Pool.MIXED, Pool.TOKEN)


def test_a_prompt_machine_is_borrowed_when_token_memory_is_full() -> None:
    talk = Talk("p2 t1", borrow_hold=0.0)
    talk.join("p1", kv_blocks=1200)
    talk.assigned("a", prompt=9000)
    decided = talk.arrive("b", prompt=9000)
    assert one(decided, MovePool).target is Pool.MIXED
    assert one(decided, Assign).reason == "jsq:prompt-pool/borrowed"
    borrowed = one(decided, Assign).token_machine
    back = one(talk.finish("b"), MovePool)
    assert (back.machine_id, back.target) == (borrowed, Pool.PROMPT)


def test_without_a_hold_a_machine_returns_as_soon_as_its_other_work_is_done() -> None:
    talk = Talk("p1 t1 t2", queue_tokens=1000, borrow_hold=0.0)
    talk.assigned("a", prompt=900)
    talk.arrive("b", prompt=900)
    assert one(talk.first("b"), MovePool).reason == "pool:return"


def test_the_last_resort_is_one_machine_for_both_phases() -> None:
    talk = Talk("p1 t1", queue_tokens=1000, last_resort_tokens=5000)
    for name in ("a", "b"):
        talk.assigned(name, prompt=900)  # on p1, then on t1 as borrowed
    assign = talk.assigned("c", prompt=900)
    assert assign.prompt_machine == assign.token_machine
    assert assign.reason == "jsq:last-resort/last-resort"


def test_beyond_the_last_resort_requests_wait_and_are_served_in_order() -> None:
    talk = Talk("p1 t1", queue_tokens=1000, last_resort_tokens=1000)
    talk.assigned("a", prompt=900)
    talk.assigned("b", prompt=900)
    assert one(talk.arrive("c", prompt=900), Enqueue) == Enqueue("queue:all-busy", "c", 1)
    assert one(talk.arrive("d", prompt=10), Enqueue) == Enqueue("queue:behind-others", "d", 2)
    served = of(talk.first("a"), Assign)
    assert [assign.request_id for assign in served] == ["c", "d"]


def test_one_machine_alone_serves_both_phases() -> None:
    assign = Talk("p1").assigned("a")
    assert (assign.prompt_machine, assign.token_machine) == ("p1", "p1")


def test_a_single_token_needs_no_token_machine() -> None:
    talk = Talk("p1 t1")
    assign = talk.assigned("a", most=1)
    assert (assign.prompt_machine, assign.token_machine) == ("p1", "p1")
    assert assign.reason == "jsq:prompt-pool/no-token-phase"
    assert talk.row("t1", arrays.KV_OWN) == 0
    talk.first("a", finishes=True)
    assert talk.idle()


def test_memory_of_the_prompt_counts_beside_the_token_phase_on_one_machine() -> None:
    """A machine of 1,000 blocks cannot hold a prompt of 500 and its token phase of 503 at once."""
    talk = Talk("m1")
    assert one(talk.arrive("a", prompt=8000, most=40), Fail).reason == "request:larger-than-kv"
    assert talk.assigned("b", prompt=7900, most=20).prompt_machine == "m1"


def test_a_prompt_leaves_the_only_large_machine_to_the_token_phase() -> None:
    talk = Talk("")
    talk.join("p1", kv_blocks=1000)
    talk.join("t1", kv_blocks=600)
    assign = talk.assigned("a", prompt=8000, most=4000)  # 500 blocks, and 750 at the longest
    assert (assign.prompt_machine, assign.token_machine) == ("t1", "p1")


def test_a_request_that_would_outgrow_a_machine_is_not_put_there() -> None:
    """t1 has more memory free than t2 but is too small for the request at its longest."""
    talk = Talk("p1 p2", reserve_output_tokens=16)
    talk.join("t1", kv_blocks=400)
    talk.join("t2", kv_blocks=900)
    talk.assigned("filler", prompt=9600)
    assign = talk.assigned("a", prompt=100, most=7000)
    assert assign.token_machine == "t2"


@pytest.mark.parametrize(("prompt", "most"), [(20_000, 5), (100, 17_000)])
def test_what_fits_nowhere_is_refused_by_name(prompt: int, most: int) -> None:
    fail = one(Talk("p1 t1").arrive("a", prompt=prompt, most=most), Fail)
    assert (fail.status, fail.reason) == ("INVALID_ARGUMENT", "request:larger-than-kv")
    assert "max_tokens" in fail.message
    assert "1000" in fail.message


def test_a_full_batch_takes_no_more_requests() -> None:
    talk = Talk("p1 p2")
    talk.join("t1", max_running=2)
    talk.join("t2", kv_blocks=200, max_running=2)
    machines = [talk.assigned(f"r{i}", prompt=160).token_machine for i in range(4)]
    assert sorted(machines) == ["t1", "t1", "t2", "t2"]
    assert one(talk.arrive("more", prompt=160), Assign).reason.endswith("borrowed")


def test_models_are_never_mixed() -> None:
    talk = Talk("p1 t1")
    talk.join("p2", model="other", kv_fingerprint="g")
    talk.join("t2", model="other", kv_fingerprint="g")
    for number in range(20):
        assign = talk.assigned(f"r{number}", model="other")
        assert {assign.prompt_machine, assign.token_machine} <= {"p2", "t2"}


# ---- reported load


def test_other_routers_work_counts() -> None:
    talk = Talk("p1 p2 t1 t2")
    talk.report("p1", prompt=4000)
    talk.report("t1", requests=3, blocks=500)
    assign = talk.assigned("a")
    assert (assign.prompt_machine, assign.token_machine) == ("p2", "t2")


def test_assignments_after_the_report_are_added_back() -> None:
    talk = Talk("p1 p2 t1 t2")
    serial = talk.assigned("a", prompt=3000).serial
    talk.report("p1", prompt=0, through=serial - 1)  # made before it accepted "a"
    assert talk.row("p1", arrays.PROMPT_KEY) == 3000
    talk.report("p1", prompt=1000, through=serial)  # it has computed 2,000 of it
    assert talk.row("p1", arrays.PROMPT_KEY) == 1000


def test_acknowledged_work_is_not_counted_twice() -> None:
    talk = Talk("p1 t1")
    serial = talk.assigned("a", prompt=1600).serial
    talk.report("t1", requests=1, blocks=104, through=serial)
    talk.report("p1", prompt=1600, blocks=100, through=serial)
    assert talk.row("t1", arrays.KV_FOREIGN) == 0
    assert talk.row("p1", arrays.PROMPT_KEY) == 1600
    assert talk.row("p1", arrays.KV_FOREIGN) == 0


@pytest.mark.parametrize("late", [0, 1, 3, 8])
def test_load_is_the_same_however_stale_the_report(late: int) -> None:
    """A report of `late` assignments ago, with those added back, equals the exact state."""
    talk = Talk("p1 t1", queue_tokens=100_000, last_resort_tokens=100_000)
    serials = [talk.assigned(f"r{i}", prompt=100 + i).serial for i in range(8)]
    exact = [talk.row("p1", row) for row in (arrays.PROMPT_KEY, arrays.TOKEN_KEY)]
    known = range(8 - late)
    talk.report(
        "p1",
        prompt=sum(100 + i for i in known),
        blocks=sum(-(-(100 + i) // 16) for i in known),
        through=serials[7 - late] if late < 8 else 0,
    )
    assert [talk.row("p1", row) for row in (arrays.PROMPT_KEY, arrays.TOKEN_KEY)] == exact


# ---- policies


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - {"together"}))
def test_every_policy_names_itself_and_finds_the_free_machine(policy: str) -> None:
    """Whatever a policy looks at first, no request waits while some machine has room."""
    talk = Talk("p1 p2 p3 t1 t2 t3", policy=policy, queue_tokens=1000, seed=7)
    for number in range(3):
        assign = talk.assigned(f"r{number}", prompt=900)
        assert assign.reason == f"{policy}:prompt-pool/token-pool"
    assert len({talk.row(f"p{i}", arrays.PROMPT_TOKENS) for i in (1, 2, 3)}) == 1


def test_together_splits_nothing_and_spreads_over_all_machines() -> None:
    talk = Talk("p1 p2 t1", policy="together", last_resort_tokens=10_000, queue_tokens=1000)
    found = [talk.assigned(f"r{number}", prompt=900) for number in range(6)]
    assert all(assign.prompt_machine == assign.token_machine for assign in found)
    assert {assign.reason for assign in found} == {"together:last-resort/last-resort"}
    assert sorted(assign.prompt_machine for assign in found) == ["p1", "p1", "p2", "p2", "t1", "t1"]


def test_round_robin_goes_round() -> None:
    talk = Talk("p1 p2 p3 t1 t2", policy="round-robin")
    pairs = [talk.assigned(f"r{i}") for i in range(6)]
    assert [a.prompt_machine for a in pairs] == ["p1", "p2", "p3"] * 2
    assert [a.token_machine for a in pairs] == ["t1", "t2"] * 3


def test_random_spreads_and_depends_on_the_seed_only() -> None:
    machines = " ".join(f"p{i} t{i}" for i in range(8))
    runs = []
    for seed in (1, 1, 2):
        talk = Talk(machines, policy="random", seed=seed)
        runs.append([talk.assigned(f"r{i}", prompt=10).prompt_machine for i in range(200)])
    assert runs[0] == runs[1] != runs[2]
    assert all(10 < runs[0].count(f"p{i}") < 45 for i in range(8))


def test_power_of_two_balances_better_than_random() -> None:
    machines = " ".join(f"p{i} t{i}" for i in range(16))
    spread = {}
    for policy in ("random", "power-of-two"):
        talk = Talk(machines, policy=policy, queue_tokens=10**6, last_resort_tokens=10**6)
        for number in range(320):
            talk.assigned(f"r{number}", prompt=10, most=2)
        loads = [talk.row(f"p{i}", arrays.PROMPT_TOKENS) for i in range(16)]
        spread[policy] = max(loads) - min(loads)
    assert spread["power-of-two"] < spread["random"]


def test_prefix_aware_prefers_the_cache_until_its_queue_costs_more() -> None:
    talk = Talk("p1 p2 t1 t2", policy="prefix-aware")
    blocks = tuple(range(100, 160))  # 960 tokens
    assert talk.assigned("a", prompt=1000, prefix_hashes=blocks).prompt_machine == "p1"
    again = talk.assigned("b", prompt=1000, prefix_hashes=blocks)
    assert again.prompt_machine == "p2", "p1 still has 1,000 tokens to compute: more than the prompt itself"
    talk.first("a")
    talk.first("b")
    talk.assigned("other", prompt=500)  # on p1: 500 pending there
    talk.assigned("another", prompt=3000)  # on p2
    cached = talk.assigned("c", prompt=1000, prefix_hashes=blocks)
    assert cached.reason == "prefix-aware:prefix-cached/token-pool"
    assert cached.prompt_machine == "p1"
    assert talk.row("p1", arrays.PROMPT_TOKENS) == 540, "only the uncached tokens are pending"


def test_prefixes_of_a_lost_machine_are_forgotten() -> None:
    talk = Talk("p1 p2 t1 t2", policy="prefix-aware")
    blocks = tuple(range(60))
    talk.assigned("a", prompt=1000, prefix_hashes=blocks)
    talk.cancel("a")
    talk.lose("p1")
    talk.join("p1", incarnation=2)
    assert (
        talk.assigned("b", prompt=1000, prefix_hashes=blocks).reason == "prefix-aware:prompt-pool/token-pool"
    )


# ---- aside


@pytest.mark.parametrize("cause", [FailureCause.ENGINE, FailureCause.OVERLOADED])
def test_a_machine_that_refuses_rests_for_the_backoff(cause: FailureCause) -> None:
    talk = Talk("p1 p2 t1", backoff=1.0)
    assert talk.assigned("a").prompt_machine == "p1"
    assert one(talk.fail("a", Phase.PROMPT, cause), Assign).prompt_machine == "p2"
    assert talk.assigned("b", prompt=4000).prompt_machine == "p2"
    assert talk.assigned("c").prompt_machine == "p2", "p1 rests although its queue is shorter"
    talk.tick(1.1)
    assert talk.assigned("d").prompt_machine == "p1"


def test_a_resting_machine_does_not_come_back_by_a_drain_that_is_undone() -> None:
    talk = Talk("p1 p2 t1", backoff=1.0)
    talk.assigned("a")
    talk.fail("a", Phase.PROMPT, FailureCause.ENGINE)
    talk.drain("p1")
    talk.drain("p1", undo=True)
    assert talk.assigned("b", prompt=4000).prompt_machine == "p2"
    assert talk.assigned("c").prompt_machine == "p2"


def test_when_every_machine_rests_requests_wait_for_the_tick() -> None:
    talk = Talk("m1", backoff=1.0)
    talk.assigned("a")
    decided = talk.fail("a", Phase.TOKEN, FailureCause.OVERLOADED)
    assert one(decided, Enqueue).request_id == "a"
    assert one(talk.tick(1.5), Assign).attempt == 2


def test_a_second_failed_transfer_rests_both_sides_and_the_request_waits() -> None:
    talk = Talk("p1 t1", backoff=1.0)
    talk.assigned("a")
    assert one(talk.fail("a", Phase.TOKEN, FailureCause.TRANSFER), Assign).attempt == 2
    decided = talk.fail("a", Phase.TOKEN, FailureCause.TRANSFER, 2)
    assert one(decided, Enqueue).request_id == "a"
    assert one(talk.tick(1.5), Assign).attempt == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy", "best"), ("queue_tokens", 0), ("max_attempts", 0), ("max_queued", -1), ("borrow_hold", -0.1),
     ("last_resort_tokens", 100), ("retry_after_max", 0.01)],
)  # fmt: skip
def test_bad_settings_are_named(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerSettings(**{name: value})  # type: ignore[arg-type]


def test_changed_settings_count_for_the_next_decision_and_for_who_waits() -> None:
    talk = Talk("p1 t1", queue_tokens=1000, last_resort_tokens=1000, max_queued=2)
    answers = {f"r{number}": talk.arrive(f"r{number}", prompt=900) for number in range(6)}
    waiting = [name for name, decided in answers.items() if isinstance(decided[-1], Enqueue)]
    assert len(waiting) == 2
    assert isinstance(answers["r5"][-1], Reject)
    changed = SchedulerSettings(policy="round-robin", queue_tokens=5000, last_resort_tokens=5000)
    placed = of(talk.send(SettingsChanged(talk.now, changed)), Assign)
    assert [assign.request_id for assign in placed] == waiting
    assert talk.assigned("next", prompt=900).reason.startswith("round-robin:")
    assert talk.scheduler.settings.max_queued == changed.max_queued
