"""Scheduler side of the token phase: blocks are reserved, filled by the daemon, then read.

A request waits in vLLM as ``WAITING_FOR_REMOTE_KVS`` with its blocks allocated. Whatever
happens to it, those blocks go back only after the daemon's last notice: until then a peer
may still write into them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.engine.vllm.first_token import PromptAndFirstToken
from services.engine.vllm.transfer import from_vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from services.engine.vllm.ranks import TransferClient
    from services.engine.vllm.transfer import TransferParams
    from services.kvd.client import Failed, Received
    from splitwise.kv.identity import TransferKey


@dataclass(slots=True)
class _Incoming:
    request: Request
    aborted: bool = False


class TokenSide:
    """Incoming transfers of one engine. Called from the scheduler only."""

    def __init__(self, client: TransferClient, block_tokens: int) -> None:
        self._client = client
        self._block_tokens = block_tokens
        self._by_key: dict[TransferKey, _Incoming] = {}
        self._asked: set[str] = set()  # requests whose transfer began: never again, also after preemption
        self._first_tokens: dict[str, int] = {}

    def external_tokens(self, request: Request, computed: int) -> int:
        """Return how many prompt tokens come from outside, beyond `computed` that are cached here."""
        if request.request_id in self._asked:
            return 0
        return int(request.num_prompt_tokens - computed)

    def reserve(
        self, request: Request, params: TransferParams, block_ids: Sequence[int], external: int
    ) -> str | None:
        """Give the blocks of the last `external` prompt tokens to the daemon; returns why it cannot be."""
        if external == 0 or request.request_id in self._asked:
            return None
        self._asked.add(request.request_id)
        first = (request.num_prompt_tokens - external) // self._block_tokens
        end = -(-request.num_prompt_tokens // self._block_tokens)
        try:
            self._ask(params, first, block_ids[first:end])
        except ValueError as error:
            return str(error)
        self._by_key[params.key] = _Incoming(request)
        return None

    def finish(self, request: Request, params: TransferParams) -> None:
        """Take the end of a request, whether it ran, waits or was never admitted."""
        self._first_tokens.pop(request.request_id, None)
        incoming = self._by_key.get(params.key)
        if request.request_id not in self._asked:
            # The prompt machine holds blocks for a transfer that will never be asked for: ask
            # and take it back, so that it learns of it before its lease runs out.
            try:
                self._ask(params, 0, ())
            except ValueError:
                return
            self._client.cancel(params.key, "the token phase was aborted before it was admitted")
        elif incoming is not None:
            incoming.aborted = True
            self._client.cancel(params.key, "the token phase was aborted")
        self._asked.discard(request.request_id)

    def received(self, notice: Received) -> str | None:
        """Take a complete KV cache; returns the request that has it."""
        incoming = self._by_key.pop(notice.key, None)
        if incoming is None:
            return None
        request = incoming.request
        if not incoming.aborted:
            request.append_output_token_ids(notice.first_token)
            self._first_tokens[request.request_id] = notice.first_token
        return str(request.request_id)

    def failed(self, notice: Failed) -> tuple[str | None, bool]:
        """Take a failure; returns the request, if it is known, and whether it still waits."""
        incoming = self._by_key.pop(notice.key, None)
        if incoming is None:
            return None, False
        return incoming.request.request_id, not incoming.aborted

    def add_first_tokens(self, scheduled: SchedulerOutput) -> None:
        """Tell the model runner about first tokens of requests that it sees for the first time."""
        if not self._first_tokens:
            return
        for new in scheduled.scheduled_new_reqs:
            token = self._first_tokens.pop(new.req_id, None)
            if token is not None:
                new.prompt_token_ids = PromptAndFirstToken([*new.prompt_token_ids, token])

    def _ask(self, params: TransferParams, first: int, block_ids: Sequence[int]) -> None:
        self._client.reserve(
            params.key,
            first,
            block_ids,
            source_kvd_address=params.source_kvd_address,
            source_engine_id=params.source_engine_id,
            lease_ms=params.lease_ms,
            traceparent=params.traceparent,
        )


def token_params(request: Request) -> TransferParams | None:
    """Return a token request's transfer, None for every other request."""
    params = from_vllm(request.kv_transfer_params)
    return params if params is not None and params.phase == "token" else None
