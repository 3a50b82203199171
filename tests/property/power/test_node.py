"""One node's limits under any order of events."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

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

UUIDS = ("a", "b", "c")
CAP = st.one_of(
    st.just(Cap()),
    st.floats(0.01, 1.0).map(lambda part: Cap(fraction=part)),
    st.floats(1.0, 2000.0).map(lambda watts: Cap(watts=watts)),
)
CAPS = st.builds(Caps, prompt=CAP, token=CAP, mixed=CAP)
STEP = st.one_of(
    st.tuples(st.just("claim"), st.sampled_from("mn"), st.sets(st.sampled_from(UUIDS), min_size=1),
              st.sampled_from(list(Role)), st.one_of(st.none(), st.floats(1, 3000))),
    st.tuples(st.just("release"), st.sampled_from("mn")),
    st.tuples(st.just("wait"), st.floats(0, 8)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("change"), st.sampled_from(UUIDS), st.floats(100, 700)),
    st.tuples(st.just("lose"), st.sampled_from(UUIDS)),
)  # fmt: skip


class World:
    """Devices that take what is in their range, and some that refuse to change at all."""

    def __init__(self, caps: Caps, previous: float) -> None:
        self.now = 0.0
        self.core = NodePower(caps)
        self.range = GpuRange(100, 700, 700, previous)
        self.limits = dict.fromkeys(UUIDS, previous)
        self.claims: dict[str, tuple[set[str], Role, float | None]] = {}
        for uuid in UUIDS:
            self.feed(GpuFound(0.0, uuid, self.range, previous))

    def feed(self, event: Event) -> None:
        for decision in self.core.handle(event):
            if isinstance(decision, Note):
                assert decision.code in ev.NOTES
                continue
            assert isinstance(decision, SetLimit)
            assert decision.reason in ev.REASONS
            assert 100 <= decision.watts <= 700, "outside the device's range"
            assert decision.watts <= self.core.previous(decision.uuid) + 0.5, "above what was there before"
            self.limits[decision.uuid] = decision.watts
            self.feed(LimitRead(self.now, decision.uuid, decision.watts))

    def step(self, step: tuple[Any, ...]) -> None:
        match step:
            case ("claim", name, gpus, role, share):
                self.feed(Claimed(self.now, name, 1, tuple(sorted(gpus)), role, share, 1e9))
                self.claims[name] = (gpus, role, share)
            case ("release", name):
                self.feed(Released(self.now, name, 1))
                self.claims.pop(name, None)
            case ("wait", seconds):
                self.now += seconds
                self.feed(Tick(self.now))
            case ("suspend", undo):
                self.feed(Resumed(self.now) if undo else Suspended(self.now))
            case ("change", uuid, watts):
                self.limits[uuid] = watts
                self.feed(LimitRead(self.now, uuid, watts))
            case ("lose", uuid):
                self.feed(GpuLost(self.now, uuid))
                self.feed(GpuFound(self.now, uuid, self.range, self.limits[uuid]))


@given(CAPS, st.floats(100, 700), st.lists(STEP, max_size=40))
def test_limits_stay_in_range_and_come_back(
    caps: Caps, previous: float, steps: list[tuple[Any, ...]]
) -> None:
    world = World(caps, previous)
    for step in steps:
        world.step(step)
    for name in "mn":
        world.step(("release", name))
    world.step(("suspend", True))
    world.step(("wait", 10.0))
    for uuid in UUIDS:
        assert abs(world.limits[uuid] - world.core.previous(uuid)) < 0.5
        assert not world.core.owes(uuid)


@given(CAPS, st.lists(STEP.filter(lambda step: step[0] not in ("lose", "change")), max_size=40))
def test_a_machine_s_share_is_never_exceeded(caps: Caps, steps: list[tuple[Any, ...]]) -> None:
    world = World(caps, 700.0)
    for step in steps:
        world.step(step)
        if world.core.suspended:
            continue
        for name, (gpus, _, share) in world.claims.items():
            others = set().union(*(one for other, (one, _, _) in world.claims.items() if other != name))
            if share is not None and not gpus & others:
                floors = 100.0 * len(gpus)
                assert sum(world.limits[uuid] for uuid in gpus) <= max(share, floors) + 0.5 * len(gpus)


@given(CAPS, st.lists(STEP.filter(lambda step: step[0] not in ("lose", "change")), max_size=30))
def test_a_borrowed_machine_without_a_budget_is_never_capped(
    caps: Caps, steps: list[tuple[Any, ...]]
) -> None:
    world = World(caps, 700.0)
    for step in steps:
        world.step(step)
        for gpus, role, share in world.claims.values():
            if role is Role.BORROWED and share is None and not world.core.suspended:
                assert all(world.limits[uuid] > 699.5 for uuid in gpus)


@given(CAPS, st.sampled_from(list(Role)), st.floats(1, 1500), st.floats(0, 1500))
def test_a_larger_share_never_gives_less(caps: Caps, role: Role, share: float, more: float) -> None:
    limits = []
    for given_share in (share, share + more):
        world = World(caps, 700.0)
        world.step(("claim", "m", set(UUIDS), role, given_share))
        limits.append(world.limits)
    assert all(limits[1][uuid] >= limits[0][uuid] - 1.0 for uuid in UUIDS)
