"""What the connector's scheduler side tells its worker side with each step, and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from splitwise.kv.identity import TransferKey


@dataclass(frozen=True, slots=True)
class Push:
    """The blocks of one request that a pass completes; see ``PushEntry`` in kvd.proto."""

    key: TransferKey
    first_block: int
    block_ids: list[int]
    final: bool
    restart: bool


@dataclass(slots=True)
class StepPlan(KVConnectorMetadata):  # type: ignore[misc]
    """One step: blocks to push, and requests whose KV cache will not come."""

    pushes: list[Push] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)


class StepDone(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Says nothing, but is there: vLLM asks the scheduler side after a step only when it is."""

    def aggregate(self, _other: KVConnectorWorkerMetadata) -> StepDone:
        """Combine two ranks' answers."""
        return self
