"""Scheduler side of the prompt phase: which blocks become complete in which pass, and who holds them.

A request's KV blocks are pushed from block 0 on, each once it is full, the last one with
the prompt's last pass. Blocks that came from the prefix cache are part of the same plan:
another request of the same batch may be computing them right now, so they too may only be
read behind each layer's notice. A request that was preempted starts again from block 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.request import RequestStatus

from services.engine.vllm.plan import Push

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from services.engine.vllm.ranks import TransferClient
    from services.engine.vllm.transfer import TransferParams
    from services.kvd.client import Released
    from splitwise.kv.identity import TransferKey


@dataclass(slots=True)
class _Outgoing:
    request_id: str
    key: TransferKey
    prompt_tokens: int
    next_block: int = 0
    planned: bool = False  # a pass of it was announced
    released: bool = False  # the daemon reads no more, so no more is announced
    finished: bool = False  # vLLM is done with it; its blocks are held for the daemon


class PromptSide:
    """Outgoing transfers of one engine. Called from the scheduler only."""

    def __init__(self, client: TransferClient, block_tokens: int) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._by_request: dict[str, _Outgoing] = {}
        self._by_key: dict[TransferKey, _Outgoing] = {}

    def accept(self, request: Request, params: TransferParams) -> str | None:
        """Announce a request that is in vLLM's queue now; returns why it has no transfer.

        Without one the prompt is computed all the same, and the token phase will miss it.
        """
        out = _Outgoing(request.request_id, params.key, request.num_prompt_tokens)
        try:
            self._client.expect(params.key, out.prompt_tokens, params.mode, params.lease_ms)
        except ValueError as error:
            return str(error)
        self._by_request[out.request_id] = out
        self._by_key[out.key] = out
        return None

    def plan(self, scheduled: SchedulerOutput) -> list[Push]:
        """Return what the pass that was scheduled just now completes."""
        if not self._by_request:
            return []
        pushes = []
        for request_id, computed, fresh in _passes(scheduled):
            out = self._by_request.get(request_id)
            if out is None or out.released:
                continue
            block_ids = scheduled.kv_connector_block_state.resolve_block_ids(request_id)[0]
            restart = fresh and out.planned
            if fresh:
                out.next_block = 0
            first, out.planned = out.next_block, True
            end = computed + scheduled.num_scheduled_tokens[request_id]
            final = end >= out.prompt_tokens
            out.next_block = (
                -(-out.prompt_tokens // self._block_tokens) if final else end // self._block_tokens
            )
            if out.next_block > first or final or restart:
                pushes.append(Push(out.key, first, block_ids[first : out.next_block], final, restart))
        return pushes

    def finish(self, request: Request) -> bool:
        """Take the end of a request; True when its blocks must be held until `released`."""
        out = self._by_request.pop(request.request_id, None)
        if out is None or out.released:
            return False
        out.finished = True
        if request.status == RequestStatus.FINISHED_LENGTH_CAPPED and request.num_output_tokens:
            self._client.first_token(out.key, request.output_token_ids[0])
        elif request.status == RequestStatus.FINISHED_STOPPED:
            self._client.cancel(out.key, "the first token ended the request")
        else:
            self._client.cancel(out.key, "the prompt phase was aborted")
        return True

    def released(self, notice: Released) -> str | None:
        """Take the daemon's last word; returns the request whose blocks go back now."""
        out = self._by_key.pop(notice.key, None)
        if out is None:
            return None
        out.released = True
        return out.request_id if out.finished else None


def _passes(scheduled: SchedulerOutput) -> Iterator[tuple[str, int, bool]]:
    """Yield (request id, tokens computed before, begins from the start) of all scheduled requests."""
    for new in scheduled.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, True
    cached = scheduled.scheduled_cached_reqs
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        yield request_id, computed, request_id in cached.resumed_req_ids
