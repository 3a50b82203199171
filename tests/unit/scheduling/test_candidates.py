"""What an assignment was chosen from, as it is noted beside the decision."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.scheduling import arrays
from splitwise.scheduling.candidates import SHOWN
from splitwise.scheduling.decisions import Assign
from splitwise.scheduling.events import Phase, Pool
from tests.unit.scheduling.cluster import Talk


def told(assign: Assign, phase: Phase) -> list[tuple[str, int, bool]]:
    seen = assign.weighed.unpack()
    return [(c.machine_id, c.queue_tokens, c.chosen) for c in seen if c.phase is phase]


def test_all_machines_of_a_small_pool_are_told_with_queue_and_memory() -> None:
    talk = Talk("p1 p2 p3 t1 t2")
    talk.assigned("a", prompt=900)
    talk.assigned("b", prompt=320)
    assign = talk.assigned("c", prompt=100)
    assert told(assign, Phase.PROMPT) == [("p3", 0, True), ("p2", 320, False), ("p1", 900, False)]
    memory = {(c.machine_id, c.phase): (c.kv_blocks_used, c.kv_blocks) for c in assign.weighed.unpack()}
    assert memory["p1", Phase.PROMPT] == (57, 1000)
    assert memory["t1", Phase.TOKEN] == (60, 1000), "900 prompt tokens and 50 of output, in whole blocks"
    assert memory["t2", Phase.TOKEN] == (24, 1000)
    assert told(assign, Phase.TOKEN) == [("t2", 1, True), ("t1", 1, False)]
    assert assign.weighed.left_out(Phase.PROMPT) == assign.weighed.left_out(Phase.TOKEN) == 0


def test_of_a_large_pool_the_best_are_told_and_the_others_counted() -> None:
    talk = Talk(" ".join(f"p{number} t{number}" for number in range(30)))
    for number in range(30):
        talk.assigned(f"r{number}", prompt=1000 - 10 * number)
    assign = talk.assigned("next", prompt=5)
    prompts = told(assign, Phase.PROMPT)
    assert [queue for _, queue, _ in prompts] == [710 + 10 * number for number in range(SHOWN)]
    assert prompts[0] == ("p29", 710, True)
    assert assign.weighed.left_out(Phase.PROMPT) == 30 - SHOWN
    assert len(told(assign, Phase.TOKEN)) == SHOWN


def test_pools_that_were_passed_over_are_told_too() -> None:
    talk = Talk("p1 t1 t2 m1", queue_tokens=1000)
    talk.assigned("a", prompt=900)
    talk.assigned("b", prompt=900)  # on m1
    talk.assigned("c", prompt=900)  # on a token machine, borrowed
    assign = talk.assigned("d", prompt=900)
    assert assign.reason.startswith("jsq:borrowed/")
    pools = [c.pool for c in assign.weighed.unpack() if c.phase is Phase.PROMPT]
    assert pools == [Pool.PROMPT, Pool.MIXED, Pool.MIXED, Pool.TOKEN]


def test_the_chosen_one_is_told_whatever_its_place() -> None:
    talk = Talk(" ".join(f"p{number} t{number}" for number in range(40)), policy="random", seed=3)
    for number in range(200):
        assign = talk.assigned(f"r{number}", prompt=10 + number)
        for phase, name in ((Phase.PROMPT, assign.prompt_machine), (Phase.TOKEN, assign.token_machine)):
            seen = told(assign, phase)
            assert [machine for machine, _, chosen in seen if chosen] == [name]
            assert SHOWN <= len(seen) <= SHOWN + 1
            assert len(seen) + assign.weighed.left_out(phase) == 40


def test_cached_tokens_are_told_where_they_decide() -> None:
    talk = Talk("p1 p2 t1 t2", policy="prefix-aware")
    blocks = tuple(range(100, 160))
    talk.assigned("a", prompt=1000, prefix_hashes=blocks)
    talk.first("a")
    talk.assigned("other", prompt=500)  # on p2, so that p1 is the shorter queue as well
    assign = talk.assigned("b", prompt=1000, prefix_hashes=blocks)
    cached = {c.machine_id: c.cached_tokens for c in assign.weighed.unpack() if c.phase is Phase.PROMPT}
    assert cached == {"p1": 960, "p2": 0}


def test_a_single_token_has_no_token_candidates() -> None:
    assign = Talk("p1 p2 t1").assigned("a", most=1)
    assert {c.phase for c in assign.weighed.unpack()} == {Phase.PROMPT}
    assert assign.weighed.left_out(Phase.TOKEN) == 0


def test_names_are_those_of_the_moment() -> None:
    """A lost machine's slot goes to the next one that joins; what was noted keeps its name."""
    talk = Talk("p1 t1")
    assign = talk.assigned("a")
    talk.lose("p1")
    talk.join("p2")
    assert [name for name, _, _ in told(assign, Phase.PROMPT)] == ["p1"]


def test_nothing_is_noted_when_it_is_turned_off_and_decisions_are_the_same() -> None:
    loud, quiet = Talk("p1 p2 t1 t2"), Talk("p1 p2 t1 t2", explain=False)
    for number in range(10):
        one, other = (talk.assigned(f"r{number}", prompt=50 * number + 1) for talk in (loud, quiet))
        assert one == other
        assert other.weighed.unpack() == ()
        assert other.weighed.left_out(Phase.PROMPT) == 0


@given(st.lists(st.integers(1, 2000), min_size=1, max_size=60), st.integers(1, 20))
def test_the_order_is_that_of_sorting_all_machines(prompts: list[int], machines: int) -> None:
    talk = Talk(" ".join(f"p{number}" for number in range(machines)) + " t0", queue_tokens=32768)
    rows = talk.scheduler.fleet.state.machines
    slots = {name: machine.slot for name, machine in talk.scheduler.fleet.machines.items() if name[0] == "p"}
    for number, prompt in enumerate(prompts):
        keys = rows[[arrays.PROMPT_KEY, arrays.PROMPT_TURN]].T
        order = sorted(slots, key=lambda name: (*keys[slots[name]].tolist(), slots[name]))
        decided = talk.arrive(f"r{number}", prompt=prompt, most=1)
        assigns = [d for d in decided if isinstance(d, Assign)]
        if not assigns or not assigns[0].reason.startswith("jsq:prompt-pool"):
            break
        assert [name for name, _, _ in told(assigns[0], Phase.PROMPT)][:SHOWN] == order[:SHOWN]


@pytest.mark.parametrize("machines", [1, 2, 3, 500])
def test_pools_of_any_size(machines: int) -> None:
    talk = Talk(" ".join(f"p{number}" for number in range(machines)) + " t0")
    assign = talk.assigned("a")
    assert len(told(assign, Phase.PROMPT)) == min(machines, SHOWN)
    assert assign.weighed.left_out(Phase.PROMPT) == max(0, machines - SHOWN)
