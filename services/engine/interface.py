"""What a prompt or token service expects of an engine, real or emulated.

One engine per machine, shared by both servicers. The service gives it *work* and reads
*outputs*; KV memory and transfers are between the engine and its node's KV daemon, and
the service never sees them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from splitwise.rpc.v1.common_pb2 import MachineDescription, SamplingParams, TransferMode


@dataclass(frozen=True, slots=True)
class WorkKey:
    """One attempt at one request; the engine's request id is built from it."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt at one KV transfer: 16 random bytes and a generation counted from 1."""

    transfer_id: bytes
    generation: int


@dataclass(frozen=True, slots=True)
class PromptWork:
    """Compute the prompt, sample one token, keep the KV blocks until the daemon released them.

    Without `transfer` the first token is also the last and nothing is kept.
    """

    key: WorkKey
    token_ids: list[int]
    sampling: SamplingParams
    transfer: Transfer | None
    mode: TransferMode.ValueType
    lease_ms: int = 60_000  # the KV blocks are kept so long after the prompt for their delivery


@dataclass(frozen=True, slots=True)
class TokenWork:
    """Reserve blocks, wait for the KV cache and the first token, make the later tokens."""

    key: WorkKey
    token_ids: list[int]
    sampling: SamplingParams
    transfer: Transfer
    source_kvd_address: str
    source_engine_id: str
    lease_ms: int
    traceparent: str = ""  # W3C: the span that the daemon's is a child of; empty: not traced


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens of one iteration for one work item. `finish` is ``stop``, ``length`` or None."""

    token_ids: list[int]
    logprobs: list[dict[int, float]] = field(default_factory=list)  # per token: id to logprob, chosen first
    finish: str | None = None
    stop_token_id: int | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The engine's queues, by its own immediate accounting."""

    kv_blocks_used: int
    kv_blocks_total: int
    preemptions: int
    batch_requests: int = 0  # in the iteration that is being computed; 0 between two
    batch_tokens: int = 0  # tokens that it computes


class EngineError(Exception):
    """The engine raised or died; the machine is of no use until it is restarted."""


class WorkRefusedError(Exception):
    """The engine refuses this work for good (it would refuse it anywhere); names the field."""


class TransferFailedError(Exception):
    """The KV cache did not arrive. `corrupt`: it arrived and did not verify."""

    def __init__(self, message: str, *, corrupt: bool = False) -> None:
        super().__init__(message)
        self.corrupt = corrupt


class Engine(Protocol):
    """An engine. All methods are called from one event loop."""

    async def start(self) -> MachineDescription:
        """Load the model, attach the KV memory to the daemon; fills all engine-side fields."""

    def run_prompt(self, work: PromptWork) -> AsyncIterator[TokenOutput]:
        """Yield exactly one output; ends when the daemon released the KV blocks; closing aborts."""

    def run_token(self, work: TokenWork) -> AsyncIterator[TokenOutput]:
        """Yield the second and later tokens; raises `TransferFailedError`; closing aborts."""

    def load(self) -> EngineLoad:
        """Return the current queue figures without waiting."""

    def failure(self) -> str | None:
        """Say why the engine cannot take work (it died, its daemon is away), or return None."""

    def dead(self) -> bool:
        """Whether what `failure` says is for good: only a new process can help."""

    async def close(self) -> None:
        """Free the KV memory and every process of the engine."""
