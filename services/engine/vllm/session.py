"""Who of an engine's processes has which session with the KV daemon.

An engine of one rank is one process: both sides of vLLM's connector share one session, which
keeps the order of what they say: a transfer is announced before its blocks are. With several
tensor-parallel ranks each is a process with the KV memory of its attention heads. The scheduler
side, in the engine core's process, then has one more session for each, without memory: there
it announces transfers and hears of their ends, while the ranks tell how far their layers are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.vllm.ranks import RankClients
from services.kvd.client import KvdClient
from splitwise.kv.identity import part_engine_id

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from services.engine.vllm.ranks import TransferClient

_shared: dict[str, KvdClient] = {}


def rank_client(config: VllmConfig, rank: int) -> KvdClient:
    """Return the client with which a rank attaches its KV memory; it still has to."""
    if config.parallel_config.world_size > 1:
        return _client(config, rank)
    return _shared_client(config)


def scheduler_client(config: VllmConfig) -> TransferClient:
    """Return the scheduler side's client; the ranks have attached by then."""
    ranks = config.parallel_config.tensor_parallel_size
    if config.parallel_config.world_size == 1:
        return _shared_client(config)
    clients = [_client(config, rank) for rank in range(ranks)]
    for client in clients:
        client.attach()
    return RankClients(clients)


def check_ranks(config: VllmConfig) -> None:
    """Raise ValueError for a way of spreading the model that is not served."""
    parallel = config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise ValueError(
            f"engine {config.kv_transfer_config.engine_id}: {parallel.world_size} ranks, of which"
            f" {parallel.tensor_parallel_size} tensor-parallel: no other kind is supported"
            " (pipeline_parallel_size=1)"
        )


def _shared_client(config: VllmConfig) -> KvdClient:
    engine_id = config.kv_transfer_config.engine_id
    if engine_id not in _shared:
        _shared[engine_id] = _client(config, 0)
    return _shared[engine_id]


def _client(config: VllmConfig, rank: int) -> KvdClient:
    transfer = config.kv_transfer_config
    options = transfer.kv_connector_extra_config
    name = part_engine_id(transfer.engine_id, rank)
    return KvdClient(options["kvd_socket"], name, incarnation=options["incarnation"])
