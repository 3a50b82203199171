"""What an operator can set about cluster scheduling, with where each default comes from."""

from __future__ import annotations

from dataclasses import dataclass

from splitwise.scheduling.events import Event
from splitwise.scheduling.policies import POLICIES


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """Settings of `ClusterScheduler`. Times are in seconds, queues in tokens."""

    policy: str = "jsq"
    """One of ``jsq``, ``power-of-two``, ``round-robin``, ``random``, ``prefix-aware``,
    ``together`` (no request is split)."""

    queue_tokens: int = 8192
    """A machine that has work takes a prompt only up to so many pending tokens; beyond it
    the mixed pool and then the opposite pool are asked (value: SplitwiseSim)."""

    last_resort_tokens: int = 32768
    """The same bound when one machine takes both phases; beyond it requests wait in the
    scheduler's queue. Four full thresholds: some seconds of an H100's prompt work."""

    reserve_output_tokens: int = 256
    """KV promised for output at assignment, since its length is unknown: above the mean of
    the Azure 2023 conversation trace (211). More is promised as the output grows."""

    max_queued: int = 10_000
    """Requests that may wait for a machine; further ones are rejected with a delay."""

    max_attempts: int = 6
    """Attempts at one request before it fails."""

    borrow_hold: float = 0.5
    """A borrowed machine stays in the mixed pool so long after its last work of the other kind."""

    backoff: float = 0.5
    """A machine whose engine failed or refused work gets none for so long."""

    pause_limit: float = 30.0
    """Requests wait so long for a machine that cannot take work and means to again (its daemon
    restarts, say); then it counts as drained, and what waits for nobody else fails."""

    retry_after_min: float = 0.1
    retry_after_max: float = 30.0
    """Bounds of the delay told to rejected clients."""

    unavailable_retry_after: float = 1.0
    """The delay told when there is no machine at all: about the time of a lease."""

    prefix_blocks_per_machine: int = 8192
    """Prefix hashes remembered per machine by the prefix-aware policy, one per four blocks."""

    seed: int = 0
    """Starts the counter-based draws of the random policies."""

    explain: bool = True
    """Whether `Assign.weighed` is filled."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming them."""
        if self.policy not in POLICIES:
            message = f"policy {self.policy!r} is unknown: choose one of {', '.join(POLICIES)}"
            raise ValueError(message)
        positive = ("queue_tokens", "last_resort_tokens", "max_attempts", "reserve_output_tokens")
        not_negative = (
            "max_queued", "borrow_hold", "backoff", "pause_limit", "retry_after_min",
            "unavailable_retry_after", "prefix_blocks_per_machine",
        )  # fmt: skip
        for name in positive:
            if getattr(self, name) <= 0:
                message = f"{name} is {getattr(self, name)}: it must be above 0"
                raise ValueError(message)
        for name in not_negative:
            if getattr(self, name) < 0:
                message = f"{name} is {getattr(self, name)}: it must be 0 or more"
                raise ValueError(message)
        if self.last_resort_tokens < self.queue_tokens:
            message = (
                f"last_resort_tokens ({self.last_resort_tokens}) is below queue_tokens"
                f" ({self.queue_tokens}): the last resort would take less than the first"
            )
            raise ValueError(message)
        if self.retry_after_max < self.retry_after_min:
            message = f"retry_after_max ({self.retry_after_max}) is below retry_after_min"
            raise ValueError(message)


@dataclass(frozen=True, slots=True)
class SettingsChanged(Event):
    """An operator changed the settings: from now on these count, for waiting requests too.

    What runs keeps its place. `prefix_blocks_per_machine` counts from a start alone.
    """

    settings: SchedulerSettings
