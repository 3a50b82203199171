"""The engine core's one session with the KV daemon and one hotline, used by both sides of the connector.

vLLM makes the worker side first (it has the KV memory), then the scheduler side. In an
engine of one rank both live in one process and share the session, which keeps the order of
what they say: a transfer is announced before its blocks are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.engine.vllm.hotline import CoreEnd
from services.kvd.client import KvdClient

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from splitwise.rpc.v1.kvd_pb2 import Attached, KvGeometry


@dataclass(slots=True)
class Session:
    """What the two sides of the connector share."""

    client: KvdClient
    hotline: CoreEnd
    model: str  # identity
    geometry: KvGeometry | None = None  # of what is attached
    attached: Attached | None = None


_sessions: dict[str, Session] = {}


def session_of(config: VllmConfig) -> Session:
    """Return this process's session for the engine, making it first; it still has to be attached."""
    transfer = config.kv_transfer_config
    if config.parallel_config.world_size != 1:
        raise ValueError(
            f"engine {transfer.engine_id}: {config.parallel_config.world_size} ranks; only one is supported "
            "(tensor_parallel_size=1, pipeline_parallel_size=1)"
        )
    if transfer.engine_id not in _sessions:
        options = transfer.kv_connector_extra_config
        client = KvdClient(options["kvd_socket"], transfer.engine_id)
        _sessions[transfer.engine_id] = Session(client, CoreEnd(options["folder"], client), options["model"])
    return _sessions[transfer.engine_id]
