"""The KV connector that vLLM loads by this module's path; its hooks, in the order of one step.

Scheduler side, in `Scheduler.schedule`: `get_num_new_matched_tokens` and
`update_state_after_alloc` for a token request that is admitted, `build_connector_meta` for
the whole step. Worker side: `bind_connector_metadata` before the pass, `save_kv_layer` after
each layer, `get_transfer_results` and `build_connector_worker_meta` after the last.
Scheduler side again, in `update_from_output`: `request_finished_all_groups` for what ended,
then `update_connector_output`.

Every notice of the KV daemon is taken in `update_connector_output`: there a complete KV
cache can be reported for the very next step, without waiting for one more pass.
"""

from __future__ import annotations

import atexit
import os
import select
import time
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from services.engine.vllm import leftovers
from services.engine.vllm.geometry import facts
from services.engine.vllm.hotline import CoreEnd, say_problem
from services.engine.vllm.plan import StepDone, StepPlan
from services.engine.vllm.prompt_side import PromptSide
from services.engine.vllm.session import scheduler_client
from services.engine.vllm.token_side import TokenSide, token_params
from services.engine.vllm.transfer import from_vllm
from services.engine.vllm.worker_side import AttachedRank, WorkerSide
from services.kvd.client import Failed, Received, Released
from splitwise.rpc.v1.kvd_pb2 import TRANSFER_FAILURE_REFUSED, KvGeometry

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AbstractContextManager

    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from services.kvd.client import Notice

# An engine with nothing to compute waits so long for its KV daemon before it looks around.
IDLE_WAIT_MS = 250
# After a ring, the request is in vLLM's queue within this time; until then it looks more often.
RING_S = 0.025
RUNG_WAIT_MS = 2


class SplitwiseConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """One instance per side; `role` says which."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._config = vllm_config
        self._started = False  # the scheduler side, by `set_xfer_handshake_metadata`
        if role == KVConnectorRole.WORKER:
            self._worker = WorkerSide(vllm_config, kv_cache_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, _extra_config: dict[str, Any]) -> bool:
        """Whole CUDA graphs skip `save_kv_layer`."""
        return True

    def shutdown(self) -> None:
        """Detach from the daemon; this process ends next, which shall not take seconds."""
        if self.role == KVConnectorRole.WORKER:
            self._worker.close()
        elif self._started:
            self._client.close()
            self._hotline.close()
        # Runs before all other exit handlers: taking torch's and vLLM's modules apart one by one
        # costs 2 s, and what they hold (memory, sockets) goes with the process.
        atexit.register(os._exit, 0)

    # ---- scheduler side

    def set_xfer_handshake_metadata(self, metadata: dict[int, AttachedRank]) -> None:
        """Start the scheduler side: every rank has handed its KV memory to the daemon, or says why not."""
        folder = self._config.kv_transfer_config.kv_connector_extra_config["folder"]
        for rank, attached in sorted(metadata.items()):
            if attached.problem:
                say_problem(folder, attached.problem)
                raise RuntimeError(f"rank {rank}: {attached.problem}")
        leftovers.remove(metadata[0].meeting)
        geometry = KvGeometry.FromString(metadata[0].geometry)
        block_tokens = geometry.block_tokens
        self._client = scheduler_client(self._config)
        self._hotline = CoreEnd(folder, self._client)
        self._started = True
        self._prompts = PromptSide(self._client, block_tokens)
        self._tokens = TokenSide(self._client, block_tokens)
        self._failed: set[str] = set()  # to be reported with the next step
        self._preemptions = 0
        self._notices = select.poll()
        self._notices.register(self._client.fileno(), select.POLLIN)
        self._waits = select.poll()
        self._waits.register(self._client.fileno(), select.POLLIN)
        self._waits.register(self._hotline.fileno(), select.POLLIN)
        self._hotline.hello(
            fingerprint=metadata[0].fingerprint,
            facts=facts(geometry),
            kv_blocks=geometry.num_blocks - 1,  # vLLM keeps block 0 for itself
            block_tokens=block_tokens,
            block_bytes=geometry.block_bytes_per_layer * geometry.layers * geometry.tp_size,
            max_model_len=self._config.model_config.max_model_len,
            vocab_size=self._config.model_config.get_vocab_size(),
        )

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Remember the pool, for the figures."""
        self._pool = gpu_block_pool

    def on_new_request(self, request: Request) -> None:
        """Announce a prompt request's transfer to the daemon."""
        params = from_vllm(request.kv_transfer_params)
        if params is not None and params.phase == "prompt":
            why = self._prompts.accept(request, params)
            if why is not None:
                self._hotline.ended("prompt", params.key, why)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Say how many tokens' KV comes from the prompt machine."""
        if token_params(request) is None:
            return 0, False
        external = self._tokens.external_tokens(request, num_computed_tokens)
        return external, external > 0

    def get_loaded_kv_cache_group_ids(self, _request: Request) -> tuple[int, ...]:
        """All groups of a token request are filled from outside."""
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """Reserve a token request's blocks at the daemon."""
        params = token_params(request)
        if params is None:
            return
        why = self._tokens.reserve(request, params, blocks.get_block_ids()[0], num_external_tokens)
        if why is not None:
            self._fail(request.request_id, Failed(params.key, TRANSFER_FAILURE_REFUSED, why))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepPlan:
        """Plan this step's pushes; when nothing is computed, wait here for the daemon instead of spinning."""
        self._preemptions += len(scheduler_output.preempted_req_ids or ())
        self._tokens.add_first_tokens(scheduler_output)
        plan = StepPlan(self._prompts.plan(scheduler_output), self._failed)
        self._failed = set()
        tokens = scheduler_output.total_num_scheduled_tokens
        if tokens:
            self._publish(len(scheduler_output.num_scheduled_tokens), tokens)
        elif not plan.failed:
            self._wait()
        return plan

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Take the daemon's notices; what ended is added to what vLLM is about to handle."""
        received, sent = self._take(self._client.poll())
        connector_output.finished_recving = received.union(connector_output.finished_recving or ())
        connector_output.finished_sending = sent.union(connector_output.finished_sending or ())
        self._publish()

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Say whether a request's blocks must be kept although it ended."""
        params = from_vllm(request.kv_transfer_params)
        if params is None:
            return False, None
        if params.phase == "prompt":
            return self._prompts.finish(request), None
        # vLLM itself holds the blocks of a request that waits for its KV cache.
        self._tokens.finish(request, params)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while a notice is due that no request in vLLM's queues waits for."""
        self._publish()
        return self._client.open_transfers() > 0 or bool(self._notices.poll(0))

    def _take(self, notices: Iterable[Notice]) -> tuple[set[str], set[str]]:
        """Return the requests whose blocks are theirs again: (token phase, prompt phase)."""
        received: set[str | None] = set()
        sent: set[str | None] = set()
        for notice in notices:
            if isinstance(notice, Received):
                received.add(self._tokens.received(notice))
                self._hotline.ended("token", notice.key)
            elif isinstance(notice, Released):
                sent.add(self._prompts.released(notice))
                self._hotline.ended("prompt", notice.key, None if notice.delivered else notice.message)
            else:
                request_id, waits = self._tokens.failed(notice)
                if waits and request_id is not None:
                    self._fail(request_id, notice)
                else:
                    received.add(request_id)
                    self._hotline.ended("token", notice.key, notice.message, corrupt=notice.corrupt)
        return {r for r in received if r is not None}, {s for s in sent if s is not None}

    def _fail(self, request_id: str, notice: Failed) -> None:
        self._hotline.ended("token", notice.key, notice.message, corrupt=notice.corrupt)
        self._failed.add(request_id)

    def _wait(self) -> None:
        """Sleep until the daemon has something to say or the adapter rings."""
        if self._client.open_transfers() == 0:
            return
        self._hotline.answer()
        if time.monotonic() - self._hotline.rung_at < RING_S:
            self._notices.poll(RUNG_WAIT_MS)
        else:
            self._waits.poll(IDLE_WAIT_MS)

    def _publish(self, batch_requests: int = 0, batch_tokens: int = 0) -> None:
        pool = self._pool
        self._hotline.publish(
            blocks_used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            preemptions=self._preemptions,
            transfers_open=self._client.open_transfers(),
            batch=(batch_requests, batch_tokens),
        )

    # ---- worker side

    def get_mem_pool_context(self) -> AbstractContextManager[object]:
        """Put the KV cache where the daemon can map it."""
        return self._worker.allocation()

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Attach to the daemon."""
        self._worker.attach(kv_caches)

    def get_handshake_metadata(self) -> AttachedRank:
        """Say what became of this rank's KV memory; vLLM gathers it from all ranks for the scheduler side."""
        return self._worker.attached

    def bind_connector_metadata(self, connector_metadata: StepPlan) -> None:
        """Announce the pass; `start_load_kv` would be too late, vLLM calls it after the pass."""
        super().bind_connector_metadata(connector_metadata)
        self._worker.begin(connector_metadata)

    def start_load_kv(self, forward_context: object, **kwargs: Any) -> None:
        """Nothing: the daemon fills the blocks."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only when all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: object, **kwargs: Any
    ) -> None:
        """Tell the daemon that one more layer is written."""
        self._worker.layer_done()

    def wait_for_save(self) -> None:
        """Nothing: blocks are held until the daemon has read them."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Report requests whose KV cache will not come; vLLM takes failures from the worker only."""
        failed = self._get_connector_metadata().failed
        return KVConnectorTransferResults(finished_recving=set(failed), failed_recving=set(failed))

    def build_connector_worker_meta(self) -> StepDone:
        """Make vLLM call `update_connector_output` after every step."""
        return StepDone()
