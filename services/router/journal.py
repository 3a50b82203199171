"""Why requests ran where they ran: the scheduler's decisions, kept for a bounded while."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.rpc.v1 import common_pb2
from splitwise.rpc.v1.router_pb2 import Candidate, DecisionRecord, Explanation
from splitwise.scheduling import decisions
from splitwise.scheduling.decisions import Assign
from splitwise.scheduling.events import Phase, Pool

if TYPE_CHECKING:
    from splitwise.scheduling.candidates import Candidate as Weighed
    from splitwise.scheduling.decisions import Decision

MAX_REQUESTS = 20_000
MAX_ENTRIES = 400_000
"""Decisions and noted machines over all requests: some tens of megabytes."""
MAX_PER_REQUEST = 64

POOLS = {
    Pool.PROMPT: common_pb2.POOL_PROMPT,
    Pool.TOKEN: common_pb2.POOL_TOKEN,
    Pool.MIXED: common_pb2.POOL_MIXED,
}
PHASES = {Phase.PROMPT: common_pb2.PHASE_PROMPT, Phase.TOKEN: common_pb2.PHASE_TOKEN}
_KINDS = {
    decisions.Assign: "assign",
    decisions.Enqueue: "queue",
    decisions.Reject: "reject",
    decisions.CancelAttempt: "cancel",
    decisions.Restart: "restart",
    decisions.Finish: "finish",
    decisions.Fail: "fail",
    decisions.Cancelled: "cancelled",
}


@dataclass(slots=True)
class _Entry:
    arrived: float
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    weight: int = 0


class Journal:
    """Decisions by request id; the oldest requests are forgotten first."""

    def __init__(self, max_requests: int = MAX_REQUESTS, max_entries: int = MAX_ENTRIES) -> None:
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._max_requests = max_requests
        self._max_entries = max_entries
        self._weight = 0

    def arrived(self, request_id: str, now: float) -> None:
        """Begin to remember a request."""
        self._entries[request_id] = _Entry(now)
        while self._entries and (len(self._entries) > self._max_requests or self._weight > self._max_entries):
            _, oldest = self._entries.popitem(last=False)
            self._weight -= oldest.weight

    def record(self, request_id: str, decision: Decision, now: float) -> None:
        """Remember one decision."""
        entry = self._entries.get(request_id)
        if entry is None or len(entry.decisions) >= MAX_PER_REQUEST or type(decision) not in _KINDS:
            return
        entry.decisions.append((now, decision))
        weight = 1 + (len(decision.weighed.names) if isinstance(decision, Assign) else 0)
        entry.weight += weight
        self._weight += weight

    def explain(self, request_id: str) -> Explanation | None:
        """Return what was decided, or None when the request is unknown or too long ago."""
        entry = self._entries.get(request_id)
        if entry is None:
            return None
        records = [_record(decision, at - entry.arrived) for at, decision in entry.decisions]
        return Explanation(request_id=request_id, decisions=records)


def _record(decision: Decision, after_s: float) -> DecisionRecord:
    record = DecisionRecord(
        kind=_KINDS[type(decision)], reason=decision.reason, at_us=max(0, round(after_s * 1e6))
    )
    if isinstance(decision, Assign):
        record.prompt_machine = decision.prompt_machine
        record.token_machine = decision.token_machine
        weighed = decision.weighed
        record.prompt_machines_left_out = weighed.left_out(Phase.PROMPT)
        record.token_machines_left_out = weighed.left_out(Phase.TOKEN)
        record.candidates.extend(map(_candidate, weighed.unpack()))
    elif isinstance(decision, decisions.CancelAttempt):
        target = "prompt_machine" if decision.phase is Phase.PROMPT else "token_machine"
        setattr(record, target, decision.machine_id)
    return record


def _candidate(seen: Weighed) -> Candidate:
    return Candidate(
        machine_id=seen.machine_id,
        phase=PHASES[seen.phase],
        pool=POOLS[seen.pool],
        queue_tokens=max(0, seen.queue_tokens),
        chosen=seen.chosen,
        kv_blocks_used=max(0, seen.kv_blocks_used),
        kv_blocks=seen.kv_blocks,
        cached_tokens=seen.cached_tokens,
    )
