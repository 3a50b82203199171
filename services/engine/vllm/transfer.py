"""What travels with a request into the engine core: which phase it is, and its transfer.

vLLM carries it as ``kv_transfer_params``, a plain dictionary, from the adapter to both
sides of the connector.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from splitwise.kv.identity import TransferKey

if TYPE_CHECKING:
    from splitwise.rpc.v1.common_pb2 import TransferMode

_MARK = "splitwise"


@dataclass(frozen=True, slots=True)
class TransferParams:
    """One request's transfer. The last three fields are for the token phase only."""

    phase: Literal["prompt", "token"]
    transfer_id: str  # hexadecimal
    generation: int
    mode: TransferMode.ValueType
    lease_ms: int
    source_kvd_address: str = ""
    source_engine_id: str = ""
    traceparent: str = ""  # as in `TokenWork`

    @property
    def name(self) -> str:
        """The transfer's name on the hotline."""
        return hotline_name(self.phase, self.key)

    @property
    def key(self) -> TransferKey:
        """The transfer's name."""
        return TransferKey(bytes.fromhex(self.transfer_id), self.generation)

    def to_vllm(self) -> dict[str, Any]:
        """Return what to put under ``kv_transfer_params``."""
        return {_MARK: asdict(self)}


def from_vllm(params: dict[str, Any] | None) -> TransferParams | None:
    """Read it back; None for a request without a transfer."""
    return TransferParams(**params[_MARK]) if params and _MARK in params else None


def hotline_name(phase: str, key: TransferKey) -> str:
    """Return one side of a transfer as one word; an engine may be both sides of one."""
    return f"{phase}/{key.transfer_id.hex()}/{key.generation}"


def hotline_key(name: str) -> TransferKey:
    """Read a transfer's key back from `hotline_name`."""
    _, transfer_id, generation = name.split("/")
    return TransferKey(bytes.fromhex(transfer_id), int(generation))
