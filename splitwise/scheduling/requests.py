"""One open request as the cluster scheduler keeps it; dropped when the request ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.scheduling.events import FailureCause
from splitwise.scheduling.states import REQUEST_TABLE, RequestInput, RequestState

if TYPE_CHECKING:
    from splitwise.scheduling.fleet import Group, Machine

BACKOFF_CAUSES = (FailureCause.ENGINE, FailureCause.OVERLOADED, FailureCause.DRAINING)


@dataclass(slots=True)
class Hold:
    """What one phase of the current attempt holds on its machine."""

    machine: Machine
    tokens: int  # prompt tokens pending there (0 in the token phase)
    blocks: int  # KV blocks promised there
    running: bool = True  # the phase's work is not over (a computed prompt still holds blocks)


@dataclass(slots=True)
class Request:
    """State of one request. `number` counts arrivals and is its place in the queue."""

    request_id: str
    model: str
    group: Group
    number: int
    prompt_tokens: int
    max_tokens: int
    deadline: float | None
    prefix_hashes: tuple[int, ...]
    state: RequestState = RequestState.ARRIVED
    attempt: int = 0
    serial: int = 0
    made: int = 0  # tokens made by all attempts
    first_seen: bool = False  # this attempt's first token was counted
    prompt: Hold | None = None
    token: Hold | None = None
    avoid: list[int] = field(default_factory=list)  # slots of the pair of the attempt that failed

    def allows(self, happened: RequestInput) -> bool:
        """Whether the table has a way on from here."""
        return (self.state, happened) in REQUEST_TABLE

    def advance(self, happened: RequestInput) -> None:
        """Take the way that the table says; KeyError when there is none."""
        self.state = REQUEST_TABLE[self.state, happened]

    def to_rest(self, cause: FailureCause, failed: Machine) -> list[Machine]:
        """Name the machines that get no work for a while after the current attempt failed on one.

        A transfer says little about whose fault it was. When a request's next one fails too,
        both sides rest: a dead daemon is reported within that time, and the request waits for
        it instead of spending its attempts in milliseconds.
        """
        if cause in BACKOFF_CAUSES:
            return [failed]
        if cause is FailureCause.TRANSFER and self.attempt > 1:
            return [hold.machine for hold in (self.prompt, self.token) if hold is not None]
        return []

    @property
    def context(self) -> int:
        """Tokens that a new attempt has to start from: the prompt and all made so far."""
        return self.prompt_tokens + self.made

    @property
    def remaining(self) -> int:
        """Tokens that may still be made."""
        return self.max_tokens - self.made
