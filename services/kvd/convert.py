"""Between protobuf messages and the pure types of `splitwise.kv`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.kv.destination import Cause
from splitwise.kv.geometry import Geometry
from splitwise.kv.states import End
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.rpc.v1.common_pb2 import TransferRef

if TYPE_CHECKING:
    from splitwise.kv.identity import TransferKey

_FIELDS = (
    "layers",
    "num_blocks",
    "block_bytes_per_layer",
    "layer_stride_bytes",
    "block_stride_bytes",
    "base_offset",
    "block_tokens",
    "dtype",
    "layout",
    "model",
    "backend",
    "tp_rank",
    "tp_size",
)

FAILURE_OF_CAUSE: dict[Cause, pb.TransferFailure.ValueType] = {
    Cause.CANCELLED: pb.TRANSFER_FAILURE_CANCELLED,
    Cause.EXPIRED: pb.TRANSFER_FAILURE_EXPIRED,
    Cause.PEER_LOST: pb.TRANSFER_FAILURE_PEER_LOST,
    Cause.REFUSED: pb.TRANSFER_FAILURE_REFUSED,
    Cause.CORRUPT: pb.TRANSFER_FAILURE_CORRUPT,
    Cause.STALE: pb.TRANSFER_FAILURE_STALE,
    Cause.SOURCE: pb.TRANSFER_FAILURE_SOURCE,
}
FAILURE_OF_END: dict[End, pb.TransferFailure.ValueType] = {
    End.CANCELLED: pb.TRANSFER_FAILURE_SOURCE,
    End.FAILED: pb.TRANSFER_FAILURE_SOURCE,
    End.EXPIRED: pb.TRANSFER_FAILURE_EXPIRED,
}
_CAUSE_OF_FAILURE = {failure: cause for cause, failure in FAILURE_OF_CAUSE.items()}


def geometry_of(message: pb.KvGeometry) -> Geometry:
    """Read a geometry."""
    return Geometry(**{name: getattr(message, name) for name in _FIELDS})


def geometry_message(geometry: Geometry) -> pb.KvGeometry:
    """Write a geometry."""
    return pb.KvGeometry(**{name: getattr(geometry, name) for name in _FIELDS})


def ref(key: TransferKey) -> TransferRef:
    """Write a transfer's name."""
    return TransferRef(transfer_id=key.transfer_id, generation=key.generation)


def cause_of(failure: pb.TransferFailure.ValueType) -> Cause:
    """Read why a source gave up."""
    return _CAUSE_OF_FAILURE.get(failure, Cause.SOURCE)
