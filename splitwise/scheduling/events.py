"""What may happen to a cluster: the inputs of `ClusterScheduler.handle`.

Every event carries ``at``, seconds on the caller's clock (monotonic in the live router,
simulated in the simulator): the scheduler itself has no clock and no randomness, so a
recorded list of events replays to the same decisions.

An *attempt* is one try at running one request on one (prompt machine, token machine)
pair; attempts count from 1, and an event of an attempt that was given up is ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Phase(Enum):
    """The two phases of a request (Splitwise paper, section II)."""

    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105 - the phase, not a secret


class Pool(Enum):
    """The scheduler's groups of machines (Splitwise paper, section IV-A)."""

    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105 - the pool, not a secret
    MIXED = "mixed"


class FailureCause(Enum):
    """Why one attempt ended without finishing the request."""

    INVALID = "invalid"  # the engine refuses the request for good: never retried
    ENGINE = "engine"
    TRANSFER = "transfer"
    TRANSFER_CORRUPT = "transfer_corrupt"
    OVERLOADED = "overloaded"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class MachineSpec:
    """What the scheduler must know of a machine.

    Units: `kv_blocks` counts KV blocks of `block_tokens` tokens each. Machines may serve one
    request together only when `model` and `kv_fingerprint` are equal.
    """

    machine_id: str
    incarnation: int
    home: Pool
    model: str
    kv_fingerprint: str
    node: str
    kv_blocks: int
    block_tokens: int
    max_running: int


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events; `at` is in seconds."""

    at: float


@dataclass(frozen=True, slots=True)
class MachineJoined(Event):
    """A machine registered (again): same id with a higher incarnation replaces the old one."""

    machine: MachineSpec


@dataclass(frozen=True, slots=True)
class MachineLost(Event):
    """A machine's stream broke or its lease ran out."""

    machine_id: str
    incarnation: int
    reason: str


@dataclass(frozen=True, slots=True)
class MachineDrained(Event):
    """An operator or the machine itself asks for no new work (`undo` takes that back)."""

    machine_id: str
    reason: str
    undo: bool = False


@dataclass(frozen=True, slots=True)
class MachinePaused(Event):
    """A machine cannot take work now and means to again: its engine failed, its daemon is away."""

    machine_id: str
    reason: str
    undo: bool = False


@dataclass(frozen=True, slots=True)
class LoadReported(Event):
    """A machine's own view of its queues; older than the truth by the report period.

    `assigned_through` is the `Assign.serial` of the newest assignment that the machine had
    accepted when it reported, so that the scheduler can add back what came after.
    """

    machine_id: str
    incarnation: int
    sequence: int
    prompt_tokens: int
    token_requests: int
    kv_blocks_used: int
    assigned_through: int = 0


@dataclass(frozen=True, slots=True)
class RequestArrived(Event):
    """A valid, tokenized request. `prefix_hashes` name its full KV blocks, first block first."""

    request_id: str
    model: str
    prompt_tokens: int
    max_tokens: int
    deadline: float | None = None
    prefix_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptEvent(Event):
    """Base of what happens to one attempt."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class AttemptAccepted(AttemptEvent):
    """One machine has the attempt's phase in its engine's queue."""

    phase: Phase


@dataclass(frozen=True, slots=True)
class FirstTokenMade(AttemptEvent):
    """The prompt machine sampled the first token. `finishes`: it also ends the request."""

    finishes: bool = False


@dataclass(frozen=True, slots=True)
class KvReceived(AttemptEvent):
    """The token machine holds the complete, verified KV cache."""


@dataclass(frozen=True, slots=True)
class TokensMade(AttemptEvent):
    """The token machine made `count` more tokens."""

    count: int


@dataclass(frozen=True, slots=True)
class AttemptFinished(AttemptEvent):
    """The request's last token was made."""


@dataclass(frozen=True, slots=True)
class AttemptFailed(AttemptEvent):
    """One side gave up; `phase` says which."""

    phase: Phase
    cause: FailureCause
    message: str


@dataclass(frozen=True, slots=True)
class RequestCancelled(Event):
    """The client cancelled, went away, or its stop string matched."""

    request_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed: deadlines, queue retries and pool returns are looked at."""
