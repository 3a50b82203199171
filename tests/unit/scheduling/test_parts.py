"""The small parts: tables, prefix index, waiting line, event log, hash."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from splitwise.scheduling import decisions, reasons
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.eventlog import EventLogError, Recorder, ReplayError, decode, encode, replay
from splitwise.scheduling.policies import POLICIES, hash32, new_limits
from splitwise.scheduling.prefix import MOST_HOLDERS, PrefixIndex
from splitwise.scheduling.settings import SchedulerSettings, SettingsChanged
from splitwise.scheduling.states import (
    MACHINE_TABLE,
    REQUEST_TABLE,
    RUNNING_STATES,
    MachineInput,
    MachineState,
    RequestInput,
    RequestState,
)
from tests.unit.scheduling.cluster import Talk

FINAL = {RequestState.FINISHED, RequestState.FAILED, RequestState.REJECTED, RequestState.CANCELLED}


def test_final_states_have_no_way_out_and_all_others_reach_one() -> None:
    assert FINAL.isdisjoint(state for state, _ in REQUEST_TABLE)
    for state in set(RequestState) - FINAL:
        reached, border = {state}, [state]
        while border:
            here = border.pop()
            following = {to for (source, _), to in REQUEST_TABLE.items() if source is here} - reached
            reached |= following
            border += following
        assert FINAL & reached, f"{state} never ends"


def test_every_state_and_input_is_used() -> None:
    assert {state for pair in REQUEST_TABLE.items() for state in (pair[0][0], pair[1])} == set(RequestState)
    assert {happened for _, happened in REQUEST_TABLE} == set(RequestInput)
    assert {state for pair in MACHINE_TABLE.items() for state in (pair[0][0], pair[1])} == set(MachineState)
    assert {happened for _, happened in MACHINE_TABLE} == set(MachineInput)


def test_a_running_request_can_end_in_any_way() -> None:
    for state in RUNNING_STATES:
        for happened in (RequestInput.FINISH, RequestInput.GIVE_UP, RequestInput.FAIL, RequestInput.CANCEL):
            assert (state, happened) in REQUEST_TABLE


def test_only_the_scheduler_starts_an_attempt() -> None:
    placed = {state for state, happened in REQUEST_TABLE if happened is RequestInput.PLACE}
    assert placed == {RequestState.ARRIVED, RequestState.QUEUED, RequestState.RESTARTED}


def test_reasons_are_distinct_words() -> None:
    words = [value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)]
    assert len(words) == len(set(words))
    assert all(" " not in word for word in [*words, *reasons.ASSIGN.values()])


def test_the_guide_explains_every_reason_setting_and_policy() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "scheduler.md").read_text()
    words = [value for name, value in vars(reasons).items() if name.isupper() and isinstance(value, str)]
    ways = {way for reason in reasons.ASSIGN.values() for way in reason.split(":")[1].split("/")}
    settings = [field.name for field in fields(SchedulerSettings)]
    for word in [*words, *ways, *settings, *POLICIES, *(state.value for state in RequestState)]:
        assert word in guide, f"docs/scheduler.md does not tell what {word!r} is"


# ---- prefix index


def test_the_longest_prefix_comes_first() -> None:
    index = PrefixIndex(100, stride=1)
    index.remember(1, (10, 11, 12))
    index.remember(2, (10, 11, 12, 13, 14))
    assert index.find((10, 11, 12, 13, 14, 15)) == [(2, 5), (1, 2)] or index.find((10, 11, 12, 13, 14, 15))[
        0
    ] == (2, 5)
    assert index.find((99,)) == []
    assert index.find(()) == []


def test_the_index_is_bounded_and_keeps_what_was_used_last() -> None:
    index = PrefixIndex(4, stride=1)
    index.remember(1, (1, 2, 3))
    index.remember(1, (7, 8))
    assert len(index) == 4
    assert index.find((7, 8)) == [(1, 2)]
    assert index.find((1, 2, 3)) == [(1, 2)], "of an old prompt the last blocks go first"
    index.remember(1, tuple(range(50, 60)))
    assert len(index) == 4
    assert index.find(tuple(range(50, 60))) == [(1, 4)]
    index.forget_machine(1)
    assert len(index) == 0
    assert index._holders == {}


def test_with_a_stride_only_every_so_many_blocks_are_remembered() -> None:
    index = PrefixIndex(100, stride=4)
    index.remember(1, tuple(range(11)))
    assert len(index) == 2
    assert index.find(tuple(range(11))) == [(1, 8)]
    assert index.find(tuple(range(7))) == [(1, 4)]
    assert index.find(tuple(range(3))) == []


def test_a_popular_prefix_names_few_machines() -> None:
    index = PrefixIndex(10, stride=1)
    for slot in range(1000):
        index.remember(slot, (1, 2))
    assert [slot for slot, _ in index.find((1, 2))] == list(range(999, 999 - MOST_HOLDERS, -1))


# ---- event log


def recorded() -> list[str]:
    lines: list[str] = []
    recorder = Recorder(ClusterScheduler(SchedulerSettings(seed=3, policy="power-of-two")), lines.append)
    talk = Talk("")
    talk.send = recorder.handle  # type: ignore[method-assign]
    for name in ("p1", "p2", "t1", "t2"):
        talk.join(name)
    talk.arrive("a", prefix_hashes=(2**62, 5), deadline=7.25)
    talk.first("a")
    talk.kv("a")
    talk.tokens("a", 3)
    talk.report("t1", 1, 2, 3)
    talk.fail("a", ev.Phase.TOKEN, ev.FailureCause.TRANSFER)
    talk.drain("p1")
    talk.lose("t1")
    talk.tick(1.5)
    talk.send(SettingsChanged(1.5, SchedulerSettings(policy="jsq", retry_after_max=60.0)))
    talk.cancel("a")
    return lines


def test_a_log_replays() -> None:
    lines = recorded()
    assert replay(lines) == len(lines) - 1


def test_lines_survive_the_way_there_and_back() -> None:
    for number, line in enumerate(recorded()[1:], 2):
        entry = decode(line, number)
        assert encode(entry.event, entry.decisions) == line
        assert json.loads(line)["event"]["is"] == type(entry.event).__name__


def test_a_decision_that_differs_is_named_with_its_line() -> None:
    lines = recorded()
    index = next(n for n, line in enumerate(lines) if '"Assign"' in line)
    other = lines[index].replace('"attempt":1', '"attempt":2')
    with pytest.raises(ReplayError, match=f"line {index + 1}"):
        replay([*lines[:index], other, *lines[index + 1 :]])


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "not JSON"),
        ("[]", "object"),
        ('{"event":{"is":"Nonsense"},"decisions":[]}', "Nonsense"),
        ('{"event":{"is":"SchedulerSettings"},"decisions":[]}', "SchedulerSettings"),
        ('{"event":{"is":"Assign","reason":"x"},"decisions":[]}', "no event"),
        ('{"event":{"is":"Tick"},"decisions":[]}', "at"),
        ('{"event":{"is":"Tick","at":"now"},"decisions":[]}', "now"),
        ('{"event":{"is":"Tick","at":1,"more":2},"decisions":[]}', "more"),
        ('{"event":{"is":"Tick","at":1}}', "decisions"),
    ],
)
def test_a_bad_line_is_named(line: str, what: str) -> None:
    with pytest.raises(EventLogError, match="line 5") as caught:
        decode(line, 5)
    assert what in str(caught.value)


@pytest.mark.parametrize("lines", [[], ["{}"], ['{"splitwise_event_log":1}'], ['{"splitwise_event_log":9}']])
def test_what_is_no_log_is_refused(lines: list[str]) -> None:
    with pytest.raises(EventLogError, match="line 1"):
        replay(lines)


def test_every_event_has_a_handler_and_all_are_immutable() -> None:
    kinds = [v for v in vars(ev).values() if isinstance(v, type) and issubclass(v, ev.Event)]
    concrete = {kind for kind in kinds if not kind.__subclasses__()} - {ev.Event}
    assert set(ClusterScheduler()._handlers) == concrete | {SettingsChanged}
    for module in (ev, decisions):
        for kind in vars(module).values():
            if isinstance(kind, type) and is_dataclass(kind) and fields(kind):
                assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


# ---- numbers


def test_the_hash_stays_in_32_bits_and_spreads() -> None:
    values = {int(hash32(number)) for number in range(10_000)}
    assert len(values) == 10_000
    assert max(values) < 2**32
    buckets = [0] * 16
    for value in values:
        buckets[value % 16] += 1
    assert min(buckets) > 500


def test_an_unknown_policy_is_named() -> None:
    with pytest.raises(ValueError, match="best"):
        new_limits("best", 1, 1, 0)
