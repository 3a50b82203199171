"""What the cluster scheduler decides: the outputs of `ClusterScheduler.handle`.

The caller carries decisions out in order. Every decision has a `reason`: a short
machine-readable word group such as ``jsq:prompt-pool`` (the words are listed in
``reasons``), so that "why did it run there" can be answered and tested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.scheduling.candidates import NOTHING, Noted

if TYPE_CHECKING:
    from splitwise.scheduling.events import Phase, Pool


@dataclass(frozen=True, slots=True)
class Decision:
    """Base of all decisions."""

    reason: str


@dataclass(frozen=True, slots=True)
class Assign(Decision):
    """Run this attempt on this pair. `serial` grows with every assignment of the cluster.

    `weighed` tells what it was chosen from. That explains the decision and is no part of it:
    it does not count in comparisons, and event logs leave it out (a replay finds it again).
    """

    request_id: str
    attempt: int
    prompt_machine: str
    token_machine: str
    serial: int
    weighed: Noted = field(default=NOTHING, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Enqueue(Decision):
    """No machine may take it now; it waits in the scheduler's own bounded queue."""

    request_id: str
    position: int


@dataclass(frozen=True, slots=True)
class Reject(Decision):
    """Refused before any work started; worth retrying after `retry_after` seconds."""

    request_id: str
    retry_after: float
    unavailable: bool  # no machine at all (UNAVAILABLE) instead of a full queue


@dataclass(frozen=True, slots=True)
class CancelAttempt(Decision):
    """Tell one machine to stop one phase of one attempt and free everything."""

    request_id: str
    attempt: int
    machine_id: str
    phase: Phase


@dataclass(frozen=True, slots=True)
class Restart(Decision):
    """The attempt is given up; an `Assign` or `Enqueue` with a higher attempt follows."""

    request_id: str
    attempt: int  # the one given up


@dataclass(frozen=True, slots=True)
class Finish(Decision):
    """The request is complete."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Fail(Decision):
    """The request ends with an error; `status` is a gRPC status name such as ``UNAVAILABLE``."""

    request_id: str
    status: str
    message: str
    retry_after: float | None = None


@dataclass(frozen=True, slots=True)
class Cancelled(Decision):
    """The request ended because the client wanted no more of it; nothing is to be sent."""

    request_id: str


@dataclass(frozen=True, slots=True)
class MovePool(Decision):
    """A machine changes pool: borrowed (to MIXED) or returned (to its home pool)."""

    machine_id: str
    source: Pool
    target: Pool


@dataclass(frozen=True, slots=True)
class RefuseMachine(Decision):
    """A registration is refused.

    `code` is ``stale_incarnation``, ``kv_fingerprint``, ``identity_conflict`` or ``bad_description``.
    """

    machine_id: str
    code: str


@dataclass(frozen=True, slots=True)
class Ignore(Decision):
    """The event was stale or out of place; counted, otherwise without effect."""
