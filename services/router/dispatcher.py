"""The scheduler's hands: machine events become scheduler events, its decisions become commands.

Holds every open request (`Session`) and every connected machine (`MachineLink`), and nothing
else that decides: who runs where, what is retried and what is refused is `ClusterScheduler`'s.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

from services.router import metrics
from services.router.admission import prefix_hashes
from services.router.journal import Journal
from services.router.power import PowerShares
from services.router.session import Session
from services.router.traces import begin_trace
from splitwise.errors import OverloadedError, RemoteError, UnavailableError
from splitwise.requests import CannotContinueError
from splitwise.rpc.status import EXCEPTIONS
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.router_pb2 import RequestCounters
from splitwise.scheduling import decisions as de
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.events import FailureCause, Phase
from splitwise.scheduling.settings import SettingsChanged
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.router.link import MachineLink
    from services.router.session import Admitted
    from splitwise.config import RouterSettings
    from splitwise.requests import Piece
    from splitwise.scheduling.settings import SchedulerSettings

CAUSES = {
    pb.FAILURE_CAUSE_INVALID: FailureCause.INVALID,
    pb.FAILURE_CAUSE_ENGINE: FailureCause.ENGINE,
    pb.FAILURE_CAUSE_TRANSFER: FailureCause.TRANSFER,
    pb.FAILURE_CAUSE_TRANSFER_CORRUPT: FailureCause.TRANSFER_CORRUPT,
    pb.FAILURE_CAUSE_OVERLOADED: FailureCause.OVERLOADED,
    pb.FAILURE_CAUSE_DRAINING: FailureCause.DRAINING,
}


class Dispatcher:
    """One router's open requests and machines, around one scheduler."""

    def __init__(
        self,
        settings: RouterSettings,
        scheduling: SchedulerSettings,
        on_end: Callable[[Session], None] = lambda _session: None,
    ) -> None:
        """`on_end(session)` is called once for every request that is over."""
        self.scheduler = ClusterScheduler(scheduling)
        self.handle = self.scheduler.handle  # every event passes here: an event log may stand before it
        self.sessions: dict[str, Session] = {}
        self.links: dict[str, MachineLink] = {}
        self.journal = Journal()
        self.counters = RequestCounters()
        self.pool_reasons: dict[str, str] = {}
        self.power = PowerShares(settings.power_budget_watts, self._order_power)
        self._settings = settings
        self._on_end = on_end
        self._events: deque[ev.Event] = deque()
        self._busy = False

    def reconfigure(self, settings: RouterSettings, scheduling: SchedulerSettings) -> None:
        """Use these settings from now on; what runs goes on as it began."""
        self._settings = settings
        self.power.use(settings.power_budget_watts)
        if scheduling != self.scheduler.settings:
            self.feed(SettingsChanged(time.monotonic(), scheduling))

    # ---- clients

    def submit(self, admitted: Admitted, block_tokens: int) -> Session:
        """Give a checked request to the scheduler; its session's mailbox has the rest."""
        session = Session(
            admitted,
            self._settings.serialized_below_tokens,
            message_gap_s=self._settings.message_gap_ms / 1e3,
        )
        session.trace = begin_trace(session.request_id, admitted)
        self.sessions[session.request_id] = session
        self.counters.received += 1
        now = time.monotonic()
        self.journal.arrived(session.request_id, now)
        hashes = prefix_hashes(admitted.token_ids, block_tokens) if self._uses_prefixes() else ()
        self.feed(
            ev.RequestArrived(
                now,
                session.request_id,
                admitted.model,
                len(admitted.token_ids),
                admitted.sampling.max_tokens,
                admitted.deadline,
                hashes,
            )
        )
        return session

    def _uses_prefixes(self) -> bool:
        return self.scheduler.settings.policy == "prefix-aware"

    def leave(self, session: Session) -> None:
        """The client's call is over, by whichever end: free what may still run for it."""
        if session.request_id in self.sessions:
            self.feed(ev.RequestCancelled(time.monotonic(), session.request_id, "the client went away"))

    # ---- machines

    def join(self, link: MachineLink, spec: ev.MachineSpec) -> de.RefuseMachine | None:
        """Take a machine up; returns the scheduler's refusal, if it refuses."""
        decided = self.handle(ev.MachineJoined(time.monotonic(), spec))
        refusal = next((d for d in decided if isinstance(d, de.RefuseMachine)), None)
        if refusal is None:
            self.links[spec.machine_id] = link
            self.power.joined(spec.machine_id, spec.home)
            self._carry_out(decided)
            self._drain()
        return refusal

    def _order_power(self, machine_id: str, order: pb.PowerOrder) -> None:
        link = self.links.get(machine_id)
        if link is not None:
            link.order_power(order)

    def lose(self, link: MachineLink, reason: str) -> None:
        """A machine's stream broke or its lease ran out."""
        if link.description is None:
            return
        identity = link.description.identity
        if self.links.get(identity.machine_id) is link:
            del self.links[identity.machine_id]
            self.pool_reasons.pop(identity.machine_id, None)
            self.power.left(identity.machine_id)
            metrics.MACHINES_LOST.inc()
            get_logger().warning("machine.lost", machine=identity.machine_id, reason=reason)
            self.feed(ev.MachineLost(time.monotonic(), identity.machine_id, identity.incarnation, reason))

    def take(self, link: MachineLink, phase: Phase, batch: pb.MachineEvents) -> None:
        """Take one message of a machine's control stream; one of a lost link changes nothing."""
        if link.description is None or self.links.get(link.description.identity.machine_id) is not link:
            return
        now = time.monotonic()
        link.heard_at = now
        for event in batch.events:
            kind = event.WhichOneof("event")
            if kind == "tokens":
                self._tokens(phase, event.tokens, now)
            elif kind == "accepted":
                self._accepted(link, phase, event.accepted.work, now)
            elif kind == "kv_received":
                self._kv_received(event.kv_received, now)
            elif kind == "failed":
                self._failed(phase, event.failed, now)
            elif kind == "load":
                self._load(link, event.load, now)
            elif kind == "draining":
                machine = link.description.identity.machine_id
                drained = event.draining
                stops = ev.MachinePaused if drained.paused else ev.MachineDrained
                self._events.append(stops(now, machine, drained.reason, undo=drained.over))
        self._drain()

    def tick(self) -> None:
        """Let the scheduler look at the clock."""
        self.feed(ev.Tick(time.monotonic()))

    def feed(self, event: ev.Event) -> None:
        """Give the scheduler one event and carry out what it decides."""
        self._events.append(event)
        self._drain()

    # ---- events

    def _current(self, work: pb.WorkRef, kind: str) -> Session | None:
        """Return the request that a machine's message is about, unless it gave that attempt up."""
        session = self.sessions.get(work.request_id)
        if session is None or session.runs(work.attempt):
            return session
        metrics.STALE_MESSAGES.labels(kind).inc()
        return None

    def _accepted(self, link: MachineLink, phase: Phase, work: pb.WorkRef, now: float) -> None:
        session = self._current(work, "accepted")
        if session is not None:
            link.accepted_serial = max(link.accepted_serial, session.serial)
            self._events.append(ev.AttemptAccepted(now, work.request_id, work.attempt, phase))

    def _tokens(self, phase: Phase, tokens: pb.Tokens, now: float) -> None:
        session = self._current(tokens.work, "tokens")
        if session is None:
            return
        if phase is Phase.PROMPT:
            self._first_token(session, tokens, now)
        else:
            self._later_tokens(session, tokens, now)
        if not session.keeps_up and not session.mailbox.closed:
            session.fail(OverloadedError("the client reads too slowly: its unread tokens reached the bound"))
            self._events.append(ev.RequestCancelled(now, session.request_id, "slow client"))

    def _first_token(self, session: Session, tokens: pb.Tokens, now: float) -> None:
        if session.first_seen:
            return
        ended = session.prompt_tokens(tokens, now)
        session.trace.first_token()
        deferred, session.deferred = session.deferred, []
        finishes = ended is not None and not deferred
        self._events.append(ev.FirstTokenMade(now, session.request_id, session.attempt, finishes=finishes))
        self._events.extend(deferred)
        if finishes and session.transfers:
            self._give_up_transfer(session)
        elif not finishes:
            self._stop_engine_if_text_ended(session, ended, now)

    def _give_up_transfer(self, session: Session) -> None:
        """Free the KV cache of a prompt whose first token is the last, whether or not it was granted."""
        placement = session.placement
        link = self.links.get(placement.prompt_machine) if placement is not None else None
        if link is not None:
            work = pb.WorkRef(request_id=session.request_id, attempt=session.attempt)
            link.cancel(Phase.PROMPT, pb.CancelWork(work=work, reason="the first token was the last"))

    def _later_tokens(self, session: Session, tokens: pb.Tokens, now: float) -> None:
        ended = session.token_tokens(tokens, now)
        happened: list[ev.AttemptEvent] = []
        names = (now, session.request_id, session.attempt)
        if tokens.ids:
            happened.append(ev.TokensMade(*names, count=len(tokens.ids)))
        if tokens.finish:
            happened.append(ev.AttemptFinished(*names))
        if session.first_seen:
            self._events.extend(happened)
            self._stop_engine_if_text_ended(session, ended, now)
        else:
            session.deferred.extend(happened)

    def _stop_engine_if_text_ended(self, session: Session, ended: Piece | None, now: float) -> None:
        if ended is not None and ended.by_text:
            self._events.append(ev.RequestCancelled(now, session.request_id, "the text ended"))

    def _kv_received(self, received: pb.KvReceived, now: float) -> None:
        session = self._current(received.work, "kv_received")
        if session is None:
            return
        stats = received.stats if received.HasField("stats") else None
        session.kv_received(stats)
        if stats is not None:
            session.trace.kv_received(stats)
        arrived = ev.KvReceived(now, received.work.request_id, received.work.attempt)
        if session.first_seen:
            self._events.append(arrived)
        else:  # until then the prompt machine is still needed: its loss must restart the request
            session.deferred.append(arrived)

    def _failed(self, phase: Phase, failed: pb.WorkFailed, now: float) -> None:
        cause = CAUSES.get(failed.cause)
        if cause is None:  # our own cancel was answered
            return
        session = self._current(failed.work, "failed")
        if session is None:
            return
        session.trace.attempt_failed(phase.value, cause.value)
        metrics.ATTEMPTS_FAILED.labels(phase.value, cause.value).inc()
        get_logger().info(
            "attempt.failed",
            request_id=failed.work.request_id,
            attempt=failed.work.attempt,
            phase=phase.value,
            cause=cause.value,
            error=failed.message,
        )
        self._events.append(
            ev.AttemptFailed(now, failed.work.request_id, failed.work.attempt, phase, cause, failed.message)
        )

    def _load(self, link: MachineLink, load: pb.LoadReport, now: float) -> None:  # type: ignore[name-defined]
        link.load, link.load_at = load, now
        if link.description is None:
            return
        identity = link.description.identity
        self.power.reported(identity.machine_id, load)
        self._events.append(
            ev.LoadReported(
                now,
                identity.machine_id,
                identity.incarnation,
                load.sequence,
                load.prompt_tokens,
                load.token_requests,
                load.kv_blocks_used,
                link.accepted_serial,
            )
        )

    # ---- decisions

    def _drain(self) -> None:
        """Handle queued events; carrying decisions out may queue more."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._events:
                self._carry_out(self.handle(self._events.popleft()))
        finally:
            self._busy = False

    def _carry_out(self, decided: list[de.Decision]) -> None:
        now = time.monotonic()
        for decision in decided:
            metrics.decided(decision)
            request_id = getattr(decision, "request_id", None)
            if request_id is not None:
                self.journal.record(request_id, decision, now)
            self._one(decision, now)

    def _one(self, decision: de.Decision, now: float) -> None:
        if isinstance(decision, de.Assign):
            self._assign(decision, now)
        elif isinstance(decision, de.CancelAttempt):
            link = self.links.get(decision.machine_id)
            if link is not None:
                work = pb.WorkRef(request_id=decision.request_id, attempt=decision.attempt)
                link.cancel(decision.phase, pb.CancelWork(work=work, reason=decision.reason))
        elif isinstance(decision, de.Reject):
            kind = UnavailableError if decision.unavailable else OverloadedError
            text = "no machine serves this model now" if decision.unavailable else "the queue is full"
            error = kind(f"{text} ({decision.reason})", retry_after=decision.retry_after)
            self._end(decision.request_id, "rejected", error)
        elif isinstance(decision, de.Fail):
            self._end(decision.request_id, "failed", _error(decision))
        elif isinstance(decision, de.Finish):
            self._end(decision.request_id, "finished", None)
        elif isinstance(decision, de.Cancelled):
            self._end(decision.request_id, "cancelled", None)
        elif isinstance(decision, de.Restart):
            self.counters.restarted += 1
            session = self.sessions[decision.request_id]
            session.give_up()
            session.trace.restarted(decision.reason)
        elif isinstance(decision, de.MovePool):
            self.pool_reasons[decision.machine_id] = decision.reason
            self.power.moved(decision.machine_id, decision.target)
            get_logger().info(
                "pool.moved",
                machine=decision.machine_id,
                source=decision.source.value,
                target=decision.target.value,
                reason=decision.reason,
            )

    def _assign(self, decision: de.Assign, now: float) -> None:
        session = self.sessions[decision.request_id]
        prompt, token = self.links.get(decision.prompt_machine), self.links.get(decision.token_machine)
        if prompt is None or prompt.description is None or token is None:
            return  # its loss is queued behind this decision and restarts the request
        try:
            commands = session.begin(decision, prompt.description, self._settings.transfer_lease_ms, now)
        except CannotContinueError as error:
            session.fail(UnavailableError(str(error), retry_after=0.0))
            session.outcome = "failed"
            self._events.append(ev.RequestCancelled(now, session.request_id, "cannot be continued"))
            return
        start_prompt, start_token = commands
        start_prompt.traceparent = session.trace.assigned(decision)
        if start_token is not None:
            start_token.traceparent = start_prompt.traceparent
            token.start_token(start_token)
        prompt.start_prompt(start_prompt)

    def _end(self, request_id: str, outcome: str, error: RemoteError | None) -> None:
        session = self.sessions.pop(request_id, None)
        if session is None:
            return
        if session.answered:
            outcome = "finished"
        elif session.outcome is not None:
            outcome = session.outcome
        elif error is not None:
            session.fail(error)
        elif outcome == "finished":
            session.fail(UnavailableError("the engine ended the request without its last token"))
            outcome = "failed"
        session.outcome = outcome
        session.trace.ended(outcome, session.finished)
        setattr(self.counters, outcome, getattr(self.counters, outcome) + 1)
        self._on_end(session)


def _error(decision: de.Fail) -> RemoteError:
    kind = next(
        (error for code, error in EXCEPTIONS.items() if code.name == decision.status), UnavailableError
    )
    return kind(decision.message, code=decision.status, retry_after=decision.retry_after)
