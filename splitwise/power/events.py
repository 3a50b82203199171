"""What the power agent hears of its node, and what is decided about it.

Moments (`now`) are seconds of one monotonic clock, limits are watts of one GPU unless a name
says machine. Every decision has a reason from `REASONS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitwise.power.caps import GpuRange, Role

# Why a GPU has the limit that it has.
PROMPT_CAP, TOKEN_CAP, MIXED_CAP = "prompt-cap", "token-cap", "mixed-cap"
UNCAPPED = "uncapped"  # the machine's role has no cap
BORROWED = "borrowed"  # a token machine that runs prompts is not capped
HELD = "held"  # back in the token pool, but not for long enough to be capped again
BUDGET = "budget"  # its share of the cluster's budget is below what its role has
SHARED = "shared"  # several machines run on it: the highest of their limits
RETURNED = "returned"  # no machine claims it: it has its previous limit
SUSPENDED = "suspended"  # an operator asked for the previous limits
REASONS = (
    PROMPT_CAP, TOKEN_CAP, MIXED_CAP, UNCAPPED, BORROWED, HELD, BUDGET, SHARED, RETURNED, SUSPENDED,
)  # fmt: skip

# What an operator should know; `Note.code`.
CLAMPED = "clamped"  # the cap is outside what the device allows
UNMET = "budget-unmet"  # the machine's share is below the least its GPUs can be set to
CHANGED = "changed"  # somebody else changed the limit
UNKNOWN_GPU = "unknown-gpu"  # a machine claims a GPU that this node does not have
EXPIRED = "lease-expired"  # a machine was silent for too long
NOTES = (CLAMPED, UNMET, CHANGED, UNKNOWN_GPU, EXPIRED)


@dataclass(frozen=True, slots=True)
class Event:
    """Base of all events."""

    now: float


@dataclass(frozen=True, slots=True)
class GpuFound(Event):
    """A GPU whose limit can be set; `limit` is what it has now."""

    uuid: str
    range: GpuRange
    limit: float


@dataclass(frozen=True, slots=True)
class GpuLost(Event):
    """A GPU does not answer any more. It may be found again."""

    uuid: str


@dataclass(frozen=True, slots=True)
class Claimed(Event):
    """A machine says which GPUs it runs on and what it does now; to be repeated within the lease.

    `share` is its part of the cluster's budget, for all its GPUs together; None: no budget.
    """

    machine_id: str
    incarnation: int
    gpus: tuple[str, ...]
    role: Role
    share: float | None
    lease: float


@dataclass(frozen=True, slots=True)
class Released(Event):
    """A machine gives its GPUs back; one of an older incarnation changes nothing."""

    machine_id: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class LimitRead(Event):
    """The limit that a GPU has now, as read back."""

    uuid: str
    limit: float


@dataclass(frozen=True, slots=True)
class Suspended(Event):
    """An operator wants the previous limits, until `Resumed`."""


@dataclass(frozen=True, slots=True)
class Resumed(Event):
    """An operator lets caps be set again."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed."""


@dataclass(frozen=True, slots=True)
class SetLimit:
    """Give a GPU this limit."""

    uuid: str
    watts: float
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Something that an operator should know, said when it begins."""

    code: str
    subject: str  # a GPU's UUID or a machine's id
    message: str


Decision = SetLimit | Note
