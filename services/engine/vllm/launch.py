"""Starting vLLM: its environment, its arguments, and how long to wait for the KV daemon."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from typing import TYPE_CHECKING, Any

from services.engine.interface import EngineError

if TYPE_CHECKING:
    from pathlib import Path

    from vllm.v1.engine.async_llm import AsyncLLM

    from services.engine.vllm.settings import VllmSettings
    from splitwise.models import ModelFolder

CONNECTOR = "services.engine.vllm.connector"
DAEMON_WAIT_S = 30.0


def set_environment(settings: VllmSettings, folder: Path) -> None:
    """Set what vLLM reads from the environment; must precede its import."""
    for name, value in {
        # One rank runs inside the engine core's process: both sides of the connector meet there.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A forked core would share the service's listening sockets and keep them open.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_RPC_BASE_PATH": str(folder),
    }.items():
        os.environ[name] = value
    if settings.eager:
        # vLLM compiles a few helpers even so, at first use: log probabilities would stop all for 20 s.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
    for name, value in {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }.items():
        os.environ.setdefault(name, value)


async def wait_for_daemon(path: Path) -> None:
    """Wait until the KV daemon listens, so that a missing one is named before a model is loaded."""
    deadline = asyncio.get_running_loop().time() + DAEMON_WAIT_S
    while (error := _probe(path)) is not None:
        if asyncio.get_running_loop().time() > deadline:
            raise EngineError(f"KV daemon: nothing listens at {path} ({error}); start the node's kvd first")
        await asyncio.sleep(0.1)


def _probe(path: Path) -> str | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        try:
            probe.connect(str(path))
        except OSError as error:
            return error.strerror or str(error)
    return None


def engine_arguments(settings: VllmSettings, model: ModelFolder, transfer: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of vLLM's ``AsyncEngineArgs``, but for the connector's."""
    return {
        **settings.extra,
        "model": str(model.path),
        "served_model_name": settings.model_name or model.name,
        "dtype": settings.dtype,
        "block_size": settings.block_tokens,
        "kv_cache_memory_bytes": settings.kv_bytes,
        "max_model_len": settings.max_model_len or -1,  # -1: the largest that fits
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.max_batch_tokens,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.eager,
        "disable_log_stats": True,
        "tensor_parallel_size": settings.tensor_parallel,
        "pipeline_parallel_size": 1,
        "kv_transfer_config": transfer,
    }


def create_engine(
    settings: VllmSettings, model: ModelFolder, machine_id: str, kvd_socket: Path, folder: Path
) -> AsyncLLM:
    """Make the engine and its core process; takes as long as loading the model does."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    transfer = KVTransferConfig(
        kv_connector="SplitwiseConnector",
        kv_connector_module_path=CONNECTOR,
        kv_role="kv_both",
        engine_id=machine_id,
        # A request whose KV cache did not come must make no token: the router starts it again.
        kv_load_failure_policy="fail",
        kv_connector_extra_config={
            "kvd_socket": str(kvd_socket),
            "folder": str(folder),
            "model": model.identity,
            # One for all sessions of this engine: a later start replaces them all.
            "incarnation": time.time_ns(),
        },
    )
    arguments = engine_arguments(settings, model, transfer)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
