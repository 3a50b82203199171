"""The cluster scheduler (CLS): events in, decisions out.

`ClusterScheduler` owns no clock, no I/O and no randomness. It keeps the open requests,
asks `placement` for pairs, and follows the tables in `states`. How it decides is told in
``docs/scheduler.md``.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, TypeAlias

from splitwise.scheduling import events as ev
from splitwise.scheduling import reasons, wording
from splitwise.scheduling.decisions import (
    CancelAttempt,
    Cancelled,
    Enqueue,
    Fail,
    Finish,
    Ignore,
    RefuseMachine,
    Reject,
    Restart,
)
from splitwise.scheduling.events import FailureCause, Phase
from splitwise.scheduling.fleet import Fleet
from splitwise.scheduling.placement import Placement
from splitwise.scheduling.requests import Request
from splitwise.scheduling.settings import SchedulerSettings, SettingsChanged
from splitwise.scheduling.states import MachineState, RequestInput, RequestState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    from splitwise.scheduling.decisions import Decision
    from splitwise.scheduling.fleet import Group, Machine

Decisions: TypeAlias = "list[Decision]"

SPENT_STATUS = {
    FailureCause.TRANSFER_CORRUPT: "DATA_LOSS",
    FailureCause.OVERLOADED: "RESOURCE_EXHAUSTED",
}


class ClusterScheduler:
    """The whole decision of one cluster. Not thread-safe; `handle` never raises on bad events."""

    def __init__(self, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self.fleet = Fleet()
        self.now = 0.0
        self._placement = Placement(self.fleet, self.settings)
        self._requests: dict[str, Request] = {}
        self._arrivals = 0
        self._deadlines: list[tuple[float, int, str]] = []
        self._handlers: dict[type[ev.Event], Callable[[Any, Decisions], None]] = {
            ev.MachineJoined: self._joined,
            ev.MachineLost: self._lost,
            ev.MachineDrained: self._drained,
            ev.MachinePaused: self._paused,
            ev.LoadReported: self._reported,
            ev.RequestArrived: self._arrived,
            ev.AttemptAccepted: self._accepted,
            ev.FirstTokenMade: self._first_token,
            ev.KvReceived: self._kv_received,
            ev.TokensMade: self._tokens,
            ev.AttemptFinished: self._finished,
            ev.AttemptFailed: self._failed,
            ev.RequestCancelled: self._cancelled,
            SettingsChanged: self._settings_changed,
            ev.Tick: self._tick,
        }

    def handle(self, event: ev.Event) -> list[Decision]:
        """Take one event and return what to do, in order. Time never runs backwards."""
        self.now = max(self.now, event.at)
        out: Decisions = []
        self._handlers[type(event)](event, out)
        return out

    @property
    def open_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._requests)

    @property
    def queued(self) -> int:
        """Requests that wait for a machine."""
        return sum(len(group.line) for group in self.fleet.groups.values())

    def request(self, request_id: str) -> Request | None:
        """Return an open request, for reading."""
        return self._requests.get(request_id)

    # ---- machines

    def _joined(self, event: ev.MachineJoined, out: Decisions) -> None:
        spec = event.machine
        known = self.fleet.machines.get(spec.machine_id)
        code = self.fleet.refusal(spec)
        if code is not None:
            out.append(RefuseMachine(code, spec.machine_id, code))
            return
        if known is not None and known.spec == spec:
            out.append(Ignore(reasons.RENEWED))
            return
        orphans = self._take_off(known) if known is not None else []
        machine = self.fleet.join(spec)
        self._restart(orphans, reasons.MACHINE_REPLACED, out)
        if known is not None:
            self._left_without_machines(known.group, out)
        self._serve(machine.group, out)

    def _lost(self, event: ev.MachineLost, out: Decisions) -> None:
        machine = self._known_machine(event.machine_id, event.incarnation, out)
        if machine is None:
            return
        orphans = self._take_off(machine)
        self._restart(orphans, reasons.MACHINE_LOST, out)
        self._left_without_machines(machine.group, out)
        self._serve(machine.group, out)

    def _drained(self, event: ev.MachineDrained, out: Decisions) -> None:
        machine = self.fleet.machines.get(event.machine_id)
        if machine is None:
            out.append(Ignore(reasons.UNKNOWN_MACHINE))
        elif event.undo == (machine.state is not MachineState.DRAINING):
            out.append(Ignore(reasons.ALREADY_SO))
        elif event.undo:
            self.fleet.undrain(machine)
            self._serve(machine.group, out)
        else:
            self.fleet.drain(machine)
            self._left_without_machines(machine.group, out)

    def _paused(self, event: ev.MachinePaused, out: Decisions) -> None:
        machine = self.fleet.machines.get(event.machine_id)
        if machine is None:
            out.append(Ignore(reasons.UNKNOWN_MACHINE))
        elif event.undo == (machine.paused_at is None):
            out.append(Ignore(reasons.ALREADY_SO))
        elif event.undo:
            self.fleet.resume(machine)
            self._serve(machine.group, out)
        else:
            self.fleet.pause(machine, self.now)

    def _reported(self, event: ev.LoadReported, out: Decisions) -> None:
        machine = self._known_machine(event.machine_id, event.incarnation, out)
        if machine is None:
            return
        if event.sequence <= machine.sequence:
            out.append(Ignore(reasons.STALE_REPORT))
        elif event.assigned_through > self._placement.serial:
            out.append(Ignore(reasons.FUTURE_REPORT))
        elif min(event.prompt_tokens, event.token_requests, event.kv_blocks_used) < 0:
            out.append(Ignore(reasons.BAD_VALUE))
        else:
            self.fleet.report(machine, event)
            self._serve(machine.group, out)

    def _known_machine(self, machine_id: str, incarnation: int, out: Decisions) -> Machine | None:
        machine = self.fleet.machines.get(machine_id)
        if machine is None:
            out.append(Ignore(reasons.UNKNOWN_MACHINE))
        elif machine.spec.incarnation != incarnation:
            out.append(Ignore(reasons.OTHER_INCARNATION))
        else:
            return machine
        return None

    def _take_off(self, machine: Machine) -> list[Request]:
        """Remove a machine and return the requests that it takes with it."""
        orphans = list(machine.open.values())
        for request in orphans:
            if request.prompt is not None and request.prompt.machine is machine:
                self._placement.release_prompt(request)
            if request.token is not None and request.token.machine is machine:
                self._placement.release_token(request)
        self._placement.forget(machine)
        self.fleet.remove(machine)
        return sorted(orphans, key=lambda request: request.number)

    def _left_without_machines(self, group: Group, out: Decisions) -> None:
        """Fail what waits for a model that no machine serves any more."""
        if group.serving:
            return
        for request in list(group.line):
            self._fail(request, reasons.NO_MACHINE, "UNAVAILABLE", wording.nobody(group), out)
        self.fleet.drop_group_if_empty(group)

    # ---- settings

    def _settings_changed(self, event: SettingsChanged, out: Decisions) -> None:
        """Take up new settings; waiting requests may find a place under them."""
        self.settings = event.settings
        self._placement.use(event.settings)
        for group in list(self.fleet.groups.values()):
            self._serve(group, out)

    # ---- requests

    def _arrived(self, event: ev.RequestArrived, out: Decisions) -> None:
        if event.request_id in self._requests:
            out.append(Ignore(reasons.DUPLICATE_REQUEST))
            return
        group = self.fleet.groups.get(event.model)
        if group is None or not group.serving:
            wait = self.settings.unavailable_retry_after
            out.append(Reject(reasons.NO_MACHINE, event.request_id, wait, unavailable=True))
            return
        self._arrivals += 1
        request = Request(
            event.request_id, event.model, group, self._arrivals, event.prompt_tokens, event.max_tokens,
            event.deadline, event.prefix_hashes,
        )  # fmt: skip
        self._requests[event.request_id] = request
        if event.deadline is not None:
            heapq.heappush(self._deadlines, (event.deadline, request.number, request.request_id))
        if event.prompt_tokens < 1 or event.max_tokens < 1:
            sizes = f"prompt_tokens is {event.prompt_tokens} and max_tokens {event.max_tokens}"
            text = f"{sizes}: both must be 1 or more"
            self._fail(request, reasons.INVALID, "INVALID_ARGUMENT", text, out)
        elif event.deadline is not None and event.deadline <= self.now:
            self._expire(request, out)
        elif not self._placement.ever_fits(request):
            self._fail(request, reasons.TOO_LARGE, "INVALID_ARGUMENT", self._too_large(request), out)
        else:
            self._place_or_park(request, out)

    def _place_or_park(self, request: Request, out: Decisions) -> None:
        line = request.group.line
        head = line.head()
        if head is None or request.number < head.number:
            placed = self._placement.place(request, self.now)
            if placed is not None:
                out.extend(placed)
                return
        if request.state is RequestState.ARRIVED and len(line) >= self.settings.max_queued:
            request.advance(RequestInput.REJECT)
            self._drop(request)
            wait = self._retry_after(request.group)
            out.append(Reject(reasons.QUEUE_FULL, request.request_id, wait, unavailable=False))
            return
        request.advance(RequestInput.PARK)
        reason = reasons.BEHIND_OTHERS if head is not None else reasons.ALL_BUSY
        out.append(Enqueue(reason, request.request_id, line.add(request)))

    def _serve(self, group: Group, out: Decisions) -> None:
        """Give waiting requests to machines, in order, until one finds no place."""
        if not group.serving:
            return  # `_left_without_machines` ends them
        while (request := group.line.head()) is not None:
            if request.deadline is not None and request.deadline <= self.now:
                self._expire(request, out)
                continue
            if not self._placement.ever_fits(request):
                self._fail(request, reasons.TOO_LARGE, "UNAVAILABLE", self._too_large(request), out)
                continue
            placed = self._placement.place(request, self.now)
            if placed is None:
                return
            group.line.remove(request)
            out.extend(placed)

    # ---- attempts

    def _attempt(self, event: ev.AttemptEvent, happened: RequestInput, out: Decisions) -> Request | None:
        """Return the request if the event is of its current attempt and in its place."""
        request = self._requests.get(event.request_id)
        if request is None:
            out.append(Ignore(reasons.UNKNOWN_REQUEST))
        elif request.attempt != event.attempt:
            out.append(Ignore(reasons.OTHER_ATTEMPT))
        elif not request.allows(happened):
            out.append(Ignore(reasons.OUT_OF_PLACE))
        else:
            return request
        return None

    def _accepted(self, event: ev.AttemptAccepted, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.ACCEPT, out)
        if request is not None and event.phase is Phase.PROMPT:
            request.advance(RequestInput.ACCEPT)

    def _first_token(self, event: ev.FirstTokenMade, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.FIRST_TOKEN, out)
        if request is None:
            return
        if request.first_seen:
            out.append(Ignore(reasons.OUT_OF_PLACE))
            return
        request.first_seen = True
        request.made += 1
        if event.finishes or request.token is None:
            self._cancel_side(request, Phase.TOKEN, reasons.FIRST_IS_LAST, out)
            self._finish(request, reasons.FIRST_IS_LAST, out)
            return
        request.advance(RequestInput.FIRST_TOKEN)
        machine = request.prompt.machine if request.prompt is not None else None
        self._placement.prompt_computed(request)
        self._freed(request.group, [machine], out)

    def _kv_received(self, event: ev.KvReceived, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.KV_RECEIVED, out)
        if request is None:
            return
        if request.token is None:  # it has no token phase
            out.append(Ignore(reasons.OUT_OF_PLACE))
            return
        request.advance(RequestInput.KV_RECEIVED)
        self._handed_over(request, out)

    def _handed_over(self, request: Request, out: Decisions) -> None:
        if request.prompt is not None and request.token is not None:
            machine = request.prompt.machine
            self._placement.release_prompt(request)
            self._freed(request.group, [machine], out)

    def _tokens(self, event: ev.TokensMade, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.TOKENS, out)
        if request is None:
            return
        if event.count < 1 or request.token is None:
            out.append(Ignore(reasons.BAD_VALUE))
            return
        request.made = min(request.max_tokens, request.made + event.count)
        self._placement.grow(request)
        if request.prompt is not None:
            request.advance(RequestInput.TOKENS)
            self._handed_over(request, out)

    def _finished(self, event: ev.AttemptFinished, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.FINISH, out)
        if request is not None:
            self._finish(request, reasons.LAST_TOKEN, out)

    def _failed(self, event: ev.AttemptFailed, out: Decisions) -> None:
        request = self._attempt(event, RequestInput.GIVE_UP, out)
        if request is None:
            return
        hold = request.prompt if event.phase is Phase.PROMPT else request.token
        if hold is None:  # that side had done its part
            out.append(Ignore(reasons.OUT_OF_PLACE))
            return
        other = Phase.TOKEN if event.phase is Phase.PROMPT else Phase.PROMPT
        if event.cause is FailureCause.INVALID:
            self._cancel_side(request, other, reasons.INVALID, out)
            self._fail(request, reasons.INVALID, "INVALID_ARGUMENT", event.message, out)
            return
        for machine in request.to_rest(event.cause, hold.machine):
            if machine.state is not MachineState.DRAINING:
                self.fleet.set_aside(machine, self.now + self.settings.backoff)
        reason = reasons.PROMPT_FAILED if event.phase is Phase.PROMPT else reasons.TOKEN_FAILED
        self._restart([request], reason, out, event)

    def _cancelled(self, event: ev.RequestCancelled, out: Decisions) -> None:
        request = self._requests.get(event.request_id)
        if request is None:
            out.append(Ignore(reasons.UNKNOWN_REQUEST))
            return
        self._cancel_both(request, reasons.CLIENT, out)
        self._end(request, RequestInput.CANCEL, [Cancelled(reasons.CLIENT, request.request_id)], out)

    def _restart(
        self, requests: list[Request], reason: str, out: Decisions, failed: ev.AttemptFailed | None = None
    ) -> None:
        """Give up attempts and start the next ones, from the prompt and all tokens made.

        What the failed side or a lost machine held is known to be free; the other side is told.
        """
        machines: dict[int, Machine] = {}
        for request in requests:
            for phase, hold in ((Phase.PROMPT, request.prompt), (Phase.TOKEN, request.token)):
                if hold is None:
                    continue
                machines[hold.machine.slot] = hold.machine
                request.avoid.append(hold.machine.slot)
                if failed is None or failed.phase is not phase:
                    self._cancel_side(request, phase, reason, out)
            self._placement.release_prompt(request)
            self._placement.release_token(request)
            request.advance(RequestInput.GIVE_UP)
            out.append(Restart(reason, request.request_id, request.attempt))
        for request in requests:
            self._next_attempt(request, failed, out)
        for group in {request.group.index: request.group for request in requests}.values():
            self._freed(group, machines.values(), out)

    def _next_attempt(self, request: Request, failed: ev.AttemptFailed | None, out: Decisions) -> None:
        if request.remaining < 1:
            self._finish(request, reasons.ALL_MADE, out)
        elif request.deadline is not None and request.deadline <= self.now:
            self._expire(request, out)
        elif not request.group.serving:
            self._fail(request, reasons.NO_MACHINE, "UNAVAILABLE", wording.nobody(request.group), out)
        elif request.attempt >= self.settings.max_attempts:
            status = SPENT_STATUS.get(failed.cause, "UNAVAILABLE") if failed else "UNAVAILABLE"
            why = failed.message if failed else "its machine was lost"
            text = f"attempt {request.attempt} of {self.settings.max_attempts} failed as well: {why}"
            self._fail(request, reasons.ATTEMPTS_SPENT, status, text, out)
        elif not self._placement.ever_fits(request):
            self._fail(request, reasons.TOO_LARGE, "UNAVAILABLE", self._too_large(request), out)
        else:
            self._place_or_park(request, out)

    # ---- time

    def _tick(self, _event: ev.Tick, out: Decisions) -> None:
        while self._deadlines and self._deadlines[0][0] <= self.now:
            _, number, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None and request.number == number:
                self._expire(request, out)
        for machine in self.fleet.back_from_aside(self.now):
            self._serve(machine.group, out)
        for machine in self.fleet.paused_too_long(self.now - self.settings.pause_limit):
            self._left_without_machines(machine.group, out)
        for machine in list(self.fleet.borrowed.values()):
            self._freed(machine.group, [machine], out)
        for group in list(self.fleet.groups.values()):
            self._serve(group, out)

    def _expire(self, request: Request, out: Decisions) -> None:
        self._cancel_both(request, reasons.DEADLINE, out)
        text = f"the deadline passed while the request was {request.state.value}"
        self._fail(request, reasons.DEADLINE, "DEADLINE_EXCEEDED", text, out)

    # ---- ends

    def _finish(self, request: Request, reason: str, out: Decisions) -> None:
        self._end(request, RequestInput.FINISH, [Finish(reason, request.request_id)], out)

    def _fail(self, request: Request, reason: str, status: str, message: str, out: Decisions) -> None:
        retry = None
        if status == "UNAVAILABLE":
            retry = self.settings.unavailable_retry_after
        elif status == "RESOURCE_EXHAUSTED":
            retry = self._retry_after(request.group)
        self._end(request, RequestInput.FAIL, [Fail(reason, request.request_id, status, message, retry)], out)

    def _end(self, request: Request, how: RequestInput, last: Decisions, out: Decisions) -> None:
        """End a request: every way out leads through here."""
        machines = [hold.machine for hold in (request.prompt, request.token) if hold is not None]
        if request.state is RequestState.QUEUED:
            request.group.line.remove(request)
        self._placement.release_prompt(request)
        self._placement.release_token(request)
        request.advance(how)
        self._drop(request)
        out.extend(last)
        if machines:
            request.group.departed(self.now)
            self._freed(request.group, machines, out)

    def _drop(self, request: Request) -> None:
        del self._requests[request.request_id]
        if len(self._deadlines) > 2 * len(self._requests) + 64:
            alive = {request.number for request in self._requests.values()}
            self._deadlines = [entry for entry in self._deadlines if entry[1] in alive]
            heapq.heapify(self._deadlines)

    def _freed(self, group: Group, machines: Iterable[Machine | None], out: Decisions) -> None:
        """Something on these machines was given back: home they go, and the queue moves."""
        for machine in machines:
            if machine is not None:
                returned = self._placement.send_home(machine, self.now)
                if returned is not None:
                    out.append(returned)
        self._serve(group, out)

    def _cancel_both(self, request: Request, reason: str, out: Decisions) -> None:
        self._cancel_side(request, Phase.PROMPT, reason, out)
        self._cancel_side(request, Phase.TOKEN, reason, out)

    def _cancel_side(self, request: Request, phase: Phase, reason: str, out: Decisions) -> None:
        hold = request.prompt if phase is Phase.PROMPT else request.token
        if hold is not None:
            name = hold.machine.spec.machine_id
            out.append(CancelAttempt(reason, request.request_id, request.attempt, name, phase))

    def _retry_after(self, group: Group) -> float:
        wait = (len(group.line) + 1) * group.departure_interval
        return min(self.settings.retry_after_max, max(self.settings.retry_after_min, wait))

    def _too_large(self, request: Request) -> str:
        prompt, _, most = self._placement.sizes(request)
        return wording.too_large(request, prompt, most)
