"""A cluster around the real scheduler: machines that obey its decisions, and its invariants.

`World.step` turns a few drawn numbers into an event that may happen (or must be refused),
hands it to the scheduler, obeys the decisions and checks everything that must always hold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling import arrays, decisions
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.decisions import Assign, CancelAttempt, Cancelled, Fail, Finish, Reject
from splitwise.scheduling.eventlog import Recorder
from splitwise.scheduling.events import FailureCause, MachineSpec, Phase, Pool
from splitwise.scheduling.policies import POLICIES
from splitwise.scheduling.settings import SettingsChanged
from splitwise.scheduling.states import MachineState, RequestState

if TYPE_CHECKING:
    from splitwise.scheduling.settings import SchedulerSettings

MODELS = ("alpha", "beta")
HOMES = (Pool.PROMPT, Pool.TOKEN, Pool.PROMPT, Pool.TOKEN, Pool.MIXED)
CAUSES = tuple(FailureCause)
OPERATIONS = (
    "arrive", "arrive", "arrive", "first", "first", "kv", "kv", "tokens", "tokens", "finish", "finish",
    "fail", "cancel", "lose", "join", "join", "drain", "undrain", "pause", "resume", "report", "report",
    "tick", "stray", "configure",
)  # fmt: skip


class World:
    """One scheduler, the events it got, and what the outside world knows."""

    def __init__(self, settings: SchedulerSettings) -> None:
        self.log: list[str] = []
        self.recorder = Recorder(ClusterScheduler(settings), self.log.append)
        self.scheduler = self.recorder.scheduler
        self.now = 0.0
        self.specs: dict[str, MachineSpec] = {}
        self.running: dict[str, Assign] = {}  # by request: its newest assignment
        self.sizes: dict[str, tuple[int, int]] = {}
        self.seen_first: set[str] = set()
        self.sequence = 0
        self.arrived = 0
        self.ends: Counter[str] = Counter()
        self.decisions: list[decisions.Decision] = []

    # ---- driving

    def step(self, operation: str, first: int, second: int, third: int) -> None:
        getattr(self, f"_{operation}")(first, second, third)

    def send(self, event: ev.Event) -> list[decisions.Decision]:
        before = {m: machine.state for m, machine in self.scheduler.fleet.machines.items()}
        decided = self.recorder.handle(event)
        self.decisions += decided
        for decision in decided:
            self._obey(decision, before)
        self.check()
        return decided

    def _obey(self, decision: decisions.Decision, before: dict[str, MachineState]) -> None:
        assert decision.reason
        if isinstance(decision, Assign):
            for name in (decision.prompt_machine, decision.token_machine):
                assert before.get(name) is not MachineState.DRAINING or self._undrained(name)
                assert self.scheduler.fleet.machines[name].paused_at is None
            self.running[decision.request_id] = decision
            self.seen_first.discard(decision.request_id)
        elif isinstance(decision, Finish | Fail | Reject | Cancelled):
            self.ends[decision.request_id] += 1
            assert self.ends[decision.request_id] == 1, "a request ended twice"
            self.running.pop(decision.request_id, None)
        elif isinstance(decision, CancelAttempt):
            assert decision.machine_id in self.scheduler.fleet.machines, "a lost machine is told to cancel"

    def _undrained(self, name: str) -> bool:
        machine = self.scheduler.fleet.machines.get(name)
        return machine is not None and machine.state is not MachineState.DRAINING

    def _pick(self, number: int) -> Assign | None:
        names = sorted(self.running)
        return self.running[names[number % len(names)]] if names else None

    def _arrive(self, first: int, second: int, third: int) -> None:
        name = f"r{self.arrived}"
        self.arrived += 1
        self.sizes[name] = (1 + first * 7 % 900, 1 + second % 400)
        deadline = self.now + third if third % 3 == 0 else None
        prefix = tuple(range(first % 3 * 100, first % 3 * 100 + self.sizes[name][0] // 16))
        model = MODELS[0] if second % 4 else MODELS[1]
        self.send(ev.RequestArrived(self.now, name, model, *self.sizes[name], deadline, prefix))

    def _first(self, first: int, second: int, _third: int) -> None:
        assign = self._pick(first)
        if assign is not None:
            self.seen_first.add(assign.request_id)
            self.send(
                ev.FirstTokenMade(self.now, assign.request_id, assign.attempt, finishes=second % 9 == 0)
            )

    def _kv(self, first: int, _second: int, _third: int) -> None:
        assign = self._pick(first)
        if assign is not None:
            self.send(ev.KvReceived(self.now, assign.request_id, assign.attempt))

    def _tokens(self, first: int, second: int, _third: int) -> None:
        assign = self._pick(first)
        if assign is not None:
            self.send(ev.TokensMade(self.now, assign.request_id, assign.attempt, second % 60))

    def _finish(self, first: int, _second: int, _third: int) -> None:
        assign = self._pick(first)
        if assign is not None:
            self.send(ev.AttemptFinished(self.now, assign.request_id, assign.attempt))

    def _fail(self, first: int, second: int, third: int) -> None:
        assign = self._pick(first)
        if assign is not None:
            phase, cause = tuple(Phase)[third % 2], CAUSES[second % len(CAUSES)]
            self.send(
                ev.AttemptFailed(self.now, assign.request_id, assign.attempt, phase, cause, "it failed")
            )

    def _cancel(self, first: int, _second: int, _third: int) -> None:
        if self.arrived:
            self.send(ev.RequestCancelled(self.now, f"r{first % self.arrived}", "the client went away"))

    def _join(self, first: int, second: int, third: int) -> None:
        name = f"m{first % 6}"
        old = self.specs.get(name)
        spec = MachineSpec(
            name, (old.incarnation if old else 0) + second % 3, HOMES[first % 5], MODELS[first % 6 == 5],
            "same" if third % 8 else "other", "node", 60 + 20 * (first % 6), 16, 4 + third % 8,
        )  # fmt: skip
        decided = self.send(ev.MachineJoined(self.now, spec))
        if not any(isinstance(d, decisions.RefuseMachine) for d in decided):
            self.specs[name] = spec

    def _lose(self, first: int, second: int, _third: int) -> None:
        spec = self.specs.get(f"m{first % 6}")
        if spec is not None:
            incarnation = spec.incarnation - (second % 4 == 0)
            self.send(ev.MachineLost(self.now, spec.machine_id, incarnation, "stream broke"))

    def _drain(self, first: int, _second: int, _third: int) -> None:
        self.send(ev.MachineDrained(self.now, f"m{first % 6}", "operator"))

    def _undrain(self, first: int, _second: int, _third: int) -> None:
        self.send(ev.MachineDrained(self.now, f"m{first % 6}", "operator", undo=True))

    def _pause(self, first: int, _second: int, _third: int) -> None:
        self.send(ev.MachinePaused(self.now, f"m{first % 6}", "its daemon is away"))

    def _resume(self, first: int, _second: int, _third: int) -> None:
        self.send(ev.MachinePaused(self.now, f"m{first % 6}", "", undo=True))

    def _report(self, first: int, second: int, third: int) -> None:
        """A report that is late by `third` assignments, with some work of another router in it."""
        spec = self.specs.get(f"m{first % 6}")
        if spec is None:
            return
        self.sequence += 1
        newest = max((assign.serial for assign in self.running.values()), default=0)
        self.send(
            ev.LoadReported(
                self.now, spec.machine_id, spec.incarnation, self.sequence - (second % 5 == 0),
                second * 11 % 600, second % 5, second % 50, max(0, newest - third % 9),
            )
        )  # fmt: skip

    def _tick(self, first: int, _second: int, _third: int) -> None:
        self.now += first / 40
        self.send(ev.Tick(self.now))

    def _configure(self, first: int, second: int, third: int) -> None:
        """An operator's change: another policy, other bounds."""
        changed = replace(
            self.scheduler.settings,
            policy=sorted(POLICIES)[first % len(POLICIES)],
            queue_tokens=(200, 1000, 2000)[second % 3],
            max_queued=(0, 3, 1000)[third % 3],
        )
        self.send(SettingsChanged(self.now, changed))

    def _stray(self, first: int, second: int, third: int) -> None:
        """Events that fit to nothing: each must be ignored and change no counter."""
        before = self.counters().copy()
        strays: list[ev.Event] = [
            ev.FirstTokenMade(self.now, "nobody", 1),
            ev.TokensMade(self.now - 5, f"r{first}", 99, 1),
            ev.MachineLost(self.now, "nobody", 1, "-"),
            ev.LoadReported(self.now, f"m{second % 6}", 10**9, 10**9, 1, 1, 1),
            ev.LoadReported(self.now, f"m{second % 6}", 1, 10**9, 1, 1, 1, assigned_through=10**9),
            ev.RequestCancelled(self.now, "nobody", "-"),
        ]
        decided = self.send(strays[third % len(strays)])
        assert [type(d) for d in decided] == [decisions.Ignore]
        assert (self.counters() == before).all()

    def finish_all(self) -> None:
        """Let the load go away: machines without reports of others, every request over."""
        for name in [f"m{i}" for i in range(6)]:
            self.send(ev.MachineDrained(self.now, name, "operator", undo=True))
            self.send(ev.MachinePaused(self.now, name, "", undo=True))
        for _ in range(400):
            self.now += 1.0
            for machine in list(self.scheduler.fleet.machines.values()):
                self.sequence += 1
                spec = machine.spec
                self.send(
                    ev.LoadReported(
                        self.now, spec.machine_id, spec.incarnation, self.sequence + 10, 0, 0, 0,
                        assigned_through=0,
                    )
                )  # fmt: skip
            for assign in list(self.running.values()):
                self.send(ev.AttemptFinished(self.now, assign.request_id, assign.attempt))
            self.send(ev.Tick(self.now))
            if not self.scheduler.open_requests:
                break
        self.now += self.scheduler.settings.borrow_hold + 1.0
        self.send(ev.Tick(self.now))

    # ---- invariants

    def counters(self) -> arrays.Int64s:
        rows = [arrays.PROMPT_TOKENS, arrays.OPEN_PROMPTS, arrays.TOKEN_REQUESTS, arrays.KV_OWN]
        return self.scheduler.fleet.state.machines[rows]

    def check(self) -> None:
        self._check_counters()
        self._check_machines()
        self._check_trees()
        self._check_lines()
        self._check_groups()

    def _open(self) -> list:
        return list(self.scheduler._requests.values())

    def _check_counters(self) -> None:
        expected = np.zeros_like(self.counters())
        for request in self._open():
            if request.prompt is not None:
                slot = request.prompt.machine.slot
                expected[0, slot] += request.prompt.tokens if request.prompt.running else 0
                expected[1, slot] += request.prompt.running
                expected[3, slot] += request.prompt.blocks
            if request.token is not None:
                expected[2, request.token.machine.slot] += 1
                expected[3, request.token.machine.slot] += request.token.blocks
        live = [machine.slot for machine in self.scheduler.fleet.machines.values()]
        assert (self.counters()[:, live] == expected[:, live]).all()
        assert expected.sum() == expected[:, live].sum(), "a request holds something on a lost machine"
        assert (self.counters() >= 0).all()

    def _check_machines(self) -> None:
        fleet = self.scheduler.fleet
        for machine in fleet.machines.values():
            rows = fleet.state.machines[:, machine.slot]
            held = {
                request.serial
                for request in self._open()
                for hold in (request.prompt, request.token)
                if hold is not None and hold.machine is machine
            }
            assert set(machine.open) == held
            assert list(machine.open) == sorted(machine.open)
            away = machine.pool is not machine.spec.home
            assert away == (machine.slot in fleet.borrowed)
            assert machine.state in (MachineState.SERVING, MachineState.BORROWED, MachineState.DRAINING)
            assert machine.state is not MachineState.BORROWED or away
            assert machine.takes_work == (rows[arrays.POSITION] != arrays.NONE)
            fingerprints = {other.spec.kv_fingerprint for other in machine.group.machines.values()}
            assert len(fingerprints) == 1
        for request in self._open():
            for hold in (request.prompt, request.token):
                assert hold is None or hold.machine.spec.model == request.model

    def _check_trees(self) -> None:
        state = self.scheduler.fleet.state
        rows = state.machines
        for group in range(len(state.sizes) // arrays.POOLS):
            for pool in range(arrays.POOLS):
                members = [
                    slot
                    for slot in range(rows.shape[1])
                    if rows[arrays.POSITION, slot] != arrays.NONE
                    and (rows[arrays.GROUP, slot], rows[arrays.POOL, slot]) == (group, pool)
                ]
                which = group * arrays.POOLS + pool
                assert sorted(state.members[which, : state.sizes[which]].tolist()) == members
                for phase in range(arrays.PHASES):
                    key, turn = rows[arrays.PROMPT_KEY + phase], rows[arrays.PROMPT_TURN + phase]
                    order = sorted((key[slot], turn[slot], slot) for slot in members)
                    best = order[0][2] if order else arrays.NONE
                    assert arrays.least_loaded(state, group, pool, phase) == best

    def _check_groups(self) -> None:
        for group in self.scheduler.fleet.groups.values():
            counted = (group.serving, group.paused, group.roomiest)
            group.measure()
            assert counted == (group.serving, group.paused, group.roomiest)

    def _check_lines(self) -> None:
        for group in self.scheduler.fleet.groups.values():
            waiting = list(group.line)
            assert [r.number for r in waiting] == sorted(r.number for r in waiting)
            assert all(r.state is RequestState.QUEUED for r in waiting)
        queued = [r for r in self._open() if r.state is RequestState.QUEUED]
        assert len(queued) == self.scheduler.queued
        assert all(r.prompt is None and r.token is None for r in queued)
