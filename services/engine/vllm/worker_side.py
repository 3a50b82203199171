"""Worker side: the KV cache inside shared memory, push plans before a pass, a notice after each layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from services.engine.vllm import first_token
from services.engine.vllm.geometry import UnsupportedModelError, geometry_of
from services.engine.vllm.leftovers import meeting_name
from services.engine.vllm.memory import kv_allocation
from services.engine.vllm.session import check_ranks, rank_client
from services.kvd.client import AttachError, push_entry
from splitwise.kv.identity import part_key

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from services.engine.vllm.plan import StepPlan
    from splitwise.rpc.v1.kvd_pb2 import KvGeometry


@dataclass(frozen=True, slots=True)
class AttachedRank(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """What vLLM carries from each rank to the scheduler side once, after the start.

    `problem` says why the rank is not attached; `geometry` is serialized; `meeting` is what
    `leftovers.remove` takes.
    """

    fingerprint: str = ""
    geometry: bytes = b""
    problem: str = ""
    meeting: str = ""


class WorkerSide:
    """One rank's part; called from the model runner only."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig) -> None:
        check_ranks(config)
        self._config = config
        self._kv_cache = kv_cache
        self._ranks = config.parallel_config.tensor_parallel_size
        self._rank = get_tensor_model_parallel_rank()
        self._client = rank_client(config, self._rank)
        self.attached = AttachedRank(problem="the KV cache was not allocated")
        self._allocation = kv_allocation(config.device_config.device_type)
        self._announced = False  # this pass's layers are being counted
        if not config.use_v2_model_runner:
            first_token.install()

    def allocation(self) -> AbstractContextManager[object]:
        """Return the context in which vLLM shall allocate the KV cache."""
        return self._allocation

    def attach(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Hand the KV cache's memory to the daemon; `attached` says what became of it."""
        try:
            geometry = self._checked_geometry(kv_caches)
            answer = self._client.attach(geometry, self._allocation.memory)
        except (AttachError, UnsupportedModelError, RuntimeError) as error:
            self.attached = AttachedRank(problem=str(error))
        else:
            self.attached = AttachedRank(
                answer.fingerprint, geometry.SerializeToString(), meeting=meeting_name()
            )

    def _checked_geometry(self, kv_caches: dict[str, torch.Tensor]) -> KvGeometry:
        """Describe the KV cache, after making sure that it is in the shared memory."""
        tensor = self._kv_cache.kv_cache_tensors[0]
        geometry = geometry_of(
            self._kv_cache,
            block_tokens=self._config.cache_config.block_size,
            dtype=str(kv_caches[tensor.layers[0]].dtype).removeprefix("torch."),
            model=self._config.kv_transfer_config.kv_connector_extra_config["model"],
            backend=self._backend(tensor.layers[0]),
            tp_rank=self._rank,
            tp_size=self._ranks,
        )
        for number, name in enumerate(tensor.layers):
            place = self._allocation.base + tensor.offset + number * tensor.layer_stride
            if self._allocation.memory is None or kv_caches[name].data_ptr() != place:
                raise RuntimeError(
                    f"layer {name}: its KV cache is not in the shared memory; this vLLM version "
                    "allocates it in another way than this connector knows"
                )
        return geometry

    def close(self) -> None:
        """Detach; the scheduler side closes a session that both share."""
        if self._ranks > 1:
            self._client.close()

    def begin(self, plan: StepPlan) -> None:
        """Announce what the coming pass completes."""
        if self._ranks > 1:
            self._client.poll()  # the scheduler side, in another process, hears the notices
        self._announced = bool(plan.pushes)
        if self._announced:
            self._allocation.begin_pass()
            self._client.push_plan(
                [
                    push_entry(
                        part_key(push.key, self._rank),
                        push.first_block,
                        push.block_ids,
                        final=push.final,
                        restart=push.restart,
                    )
                    for push in plan.pushes
                ]
            )

    def layer_done(self) -> None:
        """Tell the daemon, once it is true, that the running pass has written the next layer's KV."""
        if self._announced:
            self._allocation.after_kernels(self._client.layer_done)

    def _backend(self, layer: str) -> str:
        """Name what decides how bytes lie inside a block: the attention code and its instruction set."""
        attention = self._config.compilation_config.static_forward_context[layer]
        name = attention.get_attn_backend().get_name()
        return f"{name}/{getattr(attention, 'isa', self._config.device_config.device_type)}"
