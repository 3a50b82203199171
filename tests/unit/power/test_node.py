"""The decisions about one node's GPUs."""

from __future__ import annotations

from typing import Any

import pytest

from splitwise.power import (
    Cap,
    Caps,
    Claimed,
    Event,
    GpuFound,
    GpuLost,
    GpuRange,
    LimitRead,
    NodePower,
    Note,
    Released,
    Resumed,
    Role,
    SetLimit,
    Suspended,
    Tick,
)
from splitwise.power import events as ev


class Node:
    """A node whose GPUs do what they are told, unless they are `stuck`."""

    def __init__(
        self, *uuids: str, caps: Caps | None = None, floor: float = 200, previous: float = 700
    ) -> None:
        self.core = NodePower(caps or Caps(), recap_after=2.0)
        self.limits = dict.fromkeys(uuids or ("a",), previous)
        self.stuck: set[str] = set()
        self.set: list[SetLimit] = []
        self.notes: list[Note] = []
        for uuid, limit in self.limits.items():
            self.feed(GpuFound(0, uuid, GpuRange(floor, 700, 700, previous), limit))

    def feed(self, event: Event) -> None:
        for decision in self.core.handle(event):
            if isinstance(decision, Note):
                self.notes.append(decision)
                continue
            self.set.append(decision)
            if decision.uuid not in self.stuck:
                self.limits[decision.uuid] = decision.watts
            self.feed(LimitRead(event.now, decision.uuid, self.limits[decision.uuid]))

    def claim(self, now: float, role: Role, *gpus: str, **fields: Any) -> None:
        fields = {"share": None, "lease": 5.0, "incarnation": 1, "machine_id": "m", **fields}
        self.feed(Claimed(now, gpus=gpus or tuple(self.limits), role=role, **fields))

    def why(self, uuid: str = "a") -> str:
        return self.core.requested(uuid)[1]

    @property
    def codes(self) -> list[str]:
        return [note.code for note in self.notes]


def test_a_token_machine_is_capped_and_a_prompt_machine_is_not() -> None:
    node = Node("a", "b")
    node.claim(1, Role.TOKEN, "a", machine_id="t")
    node.claim(1, Role.PROMPT, "b", machine_id="p")
    assert node.limits == {"a": 350, "b": 700}
    assert (node.why("a"), node.why("b")) == (ev.TOKEN_CAP, ev.UNCAPPED)
    assert node.set == [SetLimit("a", 350, ev.TOKEN_CAP)]


def test_the_cap_is_lifted_at_once_and_set_again_later() -> None:
    node = Node()
    node.claim(1, Role.TOKEN)
    node.claim(2, Role.BORROWED)
    assert (node.limits["a"], node.why()) == (700, ev.BORROWED)
    node.claim(3, Role.TOKEN)
    assert (node.limits["a"], node.why()) == (700, ev.HELD)
    node.claim(4.5, Role.TOKEN)  # its heartbeat does not begin the wait anew
    node.feed(Tick(4.9))
    assert node.limits["a"] == 700
    node.feed(Tick(5.0))
    assert (node.limits["a"], node.why()) == (350, ev.TOKEN_CAP)


def test_a_machine_that_comes_and_goes_is_not_capped_in_between() -> None:
    node = Node()
    node.claim(0, Role.TOKEN)
    before = len(node.set)
    for step in range(20):
        node.claim(1 + step, Role.BORROWED)
        node.claim(1.5 + step, Role.TOKEN)
    assert [decision.watts for decision in node.set[before:]] == [700]


def test_a_share_of_the_budget_is_kept_at_once() -> None:
    node = Node()
    node.claim(1, Role.BORROWED)
    node.claim(2, Role.TOKEN, share=600.0)
    assert (node.limits["a"], node.why()) == (600, ev.BUDGET)
    node.claim(2.5, Role.TOKEN, share=300.0)
    assert (node.limits["a"], node.why()) == (300, ev.BUDGET)
    node.feed(Tick(4.0))
    assert node.limits["a"] == 300


def test_a_share_is_divided_among_the_machine_s_gpus() -> None:
    node = Node("a", "b")
    node.claim(1, Role.PROMPT, share=1001.0)
    assert node.limits == {"a": 500, "b": 500}


def test_a_share_below_the_floors_is_said() -> None:
    node = Node("a", "b")
    node.claim(1, Role.TOKEN, share=300.0)
    assert node.limits == {"a": 200, "b": 200}
    assert node.codes == [ev.UNMET]
    assert "300 W" in node.notes[0].message
    assert "400 W" in node.notes[0].message


def test_below_the_device_s_minimum_is_clamped_and_said_once() -> None:
    node = Node(caps=Caps(token=Cap(watts=100)))
    for now in range(1, 5):
        node.claim(now, Role.TOKEN)
    assert node.limits["a"] == 200
    assert node.codes == [ev.CLAMPED]
    assert "100 W" in node.notes[0].message
    assert "200 to 700 W" in node.notes[0].message
    node.claim(5, Role.BORROWED)
    node.claim(6, Role.TOKEN)
    node.feed(Tick(9))
    assert node.codes == [ev.CLAMPED, ev.CLAMPED]  # it was over, and began again


def test_machines_that_share_a_gpu_get_the_higher_limit() -> None:
    node = Node()
    node.claim(1, Role.TOKEN, machine_id="t")
    node.claim(1, Role.PROMPT, machine_id="p")
    assert (node.limits["a"], node.why()) == (700, ev.SHARED)
    node.feed(Released(2, "p", 1))
    assert (node.limits["a"], node.why()) == (350, ev.TOKEN_CAP)


def test_a_released_gpu_gets_its_previous_limit() -> None:
    node = Node(previous=500)
    node.claim(1, Role.TOKEN)
    assert node.core.owes("a")
    node.feed(Released(2, "m", 1))
    assert (node.limits["a"], node.why()) == (500, ev.RETURNED)
    assert not node.core.owes("a")


def test_a_silent_machine_s_gpus_are_returned() -> None:
    node = Node()
    node.claim(1, Role.TOKEN, lease=5.0)
    node.feed(Tick(5.9))
    assert node.limits["a"] == 350
    node.feed(Tick(6.0))
    assert node.limits["a"] == 700
    assert node.codes == [ev.EXPIRED]


def test_an_older_incarnation_changes_nothing() -> None:
    node = Node()
    node.claim(1, Role.PROMPT, incarnation=2)
    assert not node.core.accepts("m", 1)
    node.claim(1, Role.TOKEN, incarnation=1)
    assert node.limits["a"] == 700
    node.feed(Released(1, "m", 1))
    assert node.core.machines == {"m": Role.PROMPT}
    node.claim(2, Role.TOKEN, incarnation=3)
    assert node.limits["a"] == 350  # a new start is not a return: nothing is held


def test_what_a_crash_left_is_given_back() -> None:
    core = NodePower(Caps())
    assert core.handle(GpuFound(0, "a", GpuRange(200, 700, 700, previous=600), 350)) == [
        SetLimit("a", 600, ev.RETURNED)
    ]
    assert core.owes("a")
    core.handle(LimitRead(0, "a", 600))
    assert not core.owes("a")


def test_a_limit_that_does_not_take_effect_is_set_again_now_and_then() -> None:
    node = Node()
    node.stuck.add("a")
    for tenth in range(10, 160):
        node.claim(tenth / 10, Role.TOKEN)
    assert len(node.set) == 3  # at 1, 6 and 11 s
    node.stuck.clear()
    node.claim(16, Role.TOKEN)
    assert node.limits["a"] == 350


def test_a_failed_return_is_not_taken_for_an_operator_s_choice() -> None:
    node = Node()
    node.claim(1, Role.TOKEN)
    node.stuck.add("a")
    node.feed(Released(2, "m", 1))
    assert node.core.owes("a")
    node.feed(LimitRead(3, "a", 350))
    assert node.core.previous("a") == 700
    node.stuck.clear()
    node.feed(Tick(8))
    assert node.limits["a"] == 700
    assert not node.core.owes("a")


def test_an_operator_s_own_limit_becomes_the_previous_one() -> None:
    node = Node()
    node.feed(LimitRead(1, "a", 450))
    node.claim(2, Role.PROMPT)
    assert (node.limits["a"], node.core.requested("a")) == (700, (450, ev.UNCAPPED))  # nothing to set
    assert not node.set
    assert node.core.previous("a") == 450


def test_a_change_by_somebody_else_is_undone_and_said() -> None:
    node = Node()
    node.claim(1, Role.TOKEN)
    node.claim(5, Role.TOKEN)
    node.limits["a"] = 700
    node.feed(LimitRead(8, "a", 700))
    assert node.limits["a"] == 350
    assert node.codes == [ev.CHANGED]
    assert "from 350 W to 700 W" in node.notes[0].message


def test_an_operator_can_have_all_limits_back() -> None:
    node = Node("a", "b")
    node.claim(1, Role.TOKEN)
    node.feed(Suspended(2))
    assert node.core.suspended
    assert node.limits == {"a": 700, "b": 700}
    assert node.why() == ev.SUSPENDED
    assert not node.core.owes("a")
    node.claim(3, Role.TOKEN, share=500.0)
    assert node.limits == {"a": 700, "b": 700}
    node.feed(Resumed(4))
    assert node.limits == {"a": 250, "b": 250}


def test_a_gpu_that_is_not_there_is_said_and_may_come() -> None:
    node = Node("a")
    node.claim(1, Role.TOKEN, "a", "b")
    assert node.codes == [ev.UNKNOWN_GPU]
    assert node.notes[0].subject == "b"
    node.limits["b"] = 700
    node.feed(GpuFound(2, "b", GpuRange(200, 700, 700, 700), 700))
    assert node.limits == {"a": 350, "b": 350}
    node.feed(GpuLost(3, "b"))
    assert node.codes == [ev.UNKNOWN_GPU, ev.UNKNOWN_GPU]
    assert not node.core.owes("b")
    assert node.limits["a"] == 350


def test_what_a_machine_would_have() -> None:
    node = Node("a", "b")
    assert node.core.wanted("m") == 0
    node.claim(1, Role.TOKEN, share=400.0)
    assert node.core.wanted("m") == 700
    assert node.core.wishes(("a", "b"), Role.BORROWED) == 1400
    assert node.core.least(("a", "b")) == 400
    node.claim(2, Role.BORROWED)
    node.claim(3, Role.TOKEN)
    assert node.core.wanted("m") == 1400  # held


def test_caps_change_while_it_runs() -> None:
    node = Node()
    node.claim(1, Role.TOKEN)
    node.core.use(Caps(token=Cap(watts=400)), recap_after=0)
    node.feed(Tick(2))
    assert node.limits["a"] == 400
    node.claim(3, Role.BORROWED)
    node.claim(4, Role.TOKEN)
    assert node.limits["a"] == 400  # nothing is held any more


@pytest.mark.parametrize("text", ev.REASONS)
def test_reasons_are_words(text: str) -> None:
    assert text.replace("-", "").isalpha()
