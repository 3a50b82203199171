"""What the client returns: plain, frozen dataclasses.

Durations are in seconds (floats), sizes in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why the text ended."""

    STOP = "stop"  # end-of-sequence token, a stop token id or a stop string
    LENGTH = "length"  # max_tokens reached
    CANCELLED = "cancelled"


class TransferMode(StrEnum):
    """When the KV cache is pushed: after the prompt, or layer by layer while it is computed."""

    SERIALIZED = "serialized"
    LAYERWISE = "layerwise"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of one chosen token; `top` maps the likeliest token ids to theirs."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Chunk:
    """What came with one message: whole characters, and the tokens, which may be ahead of them."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds, measured by the router from the request's arrival; queueing counts.

    `second` is the gap between the first and the second token (where a KV transfer that was
    not hidden shows); `tbt_mean` and `tbt_max` are the gaps after the second.
    """

    queued: float
    ttft: float
    second: float
    tbt_mean: float
    tbt_max: float
    e2e: float


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the two phases ran, and the scheduler's reason."""

    prompt_machine: str
    token_machine: str
    reason: str


@dataclass(frozen=True, slots=True)
class Transfer:
    """What the KV push took. `exposed` is the part after the first token: what was not hidden."""

    bytes: int
    puts: int
    blocks: int
    blocks_skipped: int
    seconds: float
    exposed: float
    mode: TransferMode | None
    transport: str

    @property
    def hidden_share(self) -> float:
        """The part of the push that ran behind the prompt's computation, 0 to 1."""
        if self.seconds <= 0:
            return 1.0
        return min(1.0, max(0.0, 1.0 - self.exposed / self.seconds))


@dataclass(frozen=True, slots=True)
class Generation:
    """A finished request."""

    request_id: str
    client_request_id: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stop_matched: str
    prompt_tokens: int
    output_tokens: int
    cached_prompt_tokens: int
    restarts: int
    timing: Timing
    placement: Placement
    transfer: Transfer | None


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the cluster; `serving` when a prompt and a token machine are there."""

    name: str
    max_model_len: int
    serving: bool


@dataclass(frozen=True, slots=True)
class MachinePower:
    """Watts of a machine's GPUs together, as its node's power agent says.

    `share` is its part of the cluster's budget (0: there is none) and `share_reason` why it is
    that; `requested` is the limit set, for `reason`, and `enforced` the one in force.
    """

    gpus: int
    requested: float
    enforced: float
    draw: float
    reason: str
    share: float
    share_reason: str
    problem: str


@dataclass(frozen=True, slots=True)
class ClusterPower:
    """Watts of all GPUs whose power is managed. `budget` 0: there is none.

    `missing`: by how much the budget is below what the devices can be set to; `unmanaged`:
    machines without a power agent, which are outside the budget.
    """

    budget: float
    requested: float
    enforced: float
    draw: float
    missing: float
    unmanaged: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine as the router sees it."""

    machine_id: str
    home_pool: str
    pool: str
    pool_reason: str
    state: str
    address: str
    node: str
    kvd_address: str
    model: str
    engine: str
    prompt_requests: int
    token_requests: int
    pending_prompt_tokens: int
    kv_blocks_used: int
    kv_blocks: int
    preemptions: int
    power_watts: float
    report_age: float
    power: MachinePower | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster at one moment."""

    machines: tuple[Machine, ...]
    models: tuple[Model, ...]
    queued: int
    running: int
    policy: str
    counters: dict[str, int]
    power: ClusterPower | None = None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A machine that was weighed for one phase, as the scheduler saw it just before.

    `queue_tokens`: pending prompt tokens and one per request in its token phase.
    `kv_blocks_used` of `kv_blocks` were in use or promised; `cached_tokens` of the prompt
    were thought to be in its prefix cache.
    """

    machine_id: str
    phase: str
    pool: str
    queue_tokens: int
    chosen: bool
    kv_blocks_used: int = 0
    kv_blocks: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecisionRecord:
    """One decision about a request, `at` seconds after it arrived.

    `left_out` counts, per phase, the machines that were weighed beside `candidates`.
    """

    at: float
    kind: str
    reason: str
    prompt_machine: str
    token_machine: str
    candidates: tuple[Candidate, ...]
    left_out: dict[str, int] = field(default_factory=dict)
