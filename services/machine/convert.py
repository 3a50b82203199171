"""Between the messages of the control streams and the engine interface's types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.interface import PromptWork, TokenWork, Transfer, WorkKey
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    TRANSFER_MODE_UNSPECIFIED,
    FinishReason,
    TokenAlternative,
    TokenLogprob,
    TransferRef,
)
from splitwise.rpc.v1.machine_pb2 import MachineEvent, Tokens, WorkFailed, WorkRef

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.engine.interface import TokenOutput
    from splitwise.rpc.v1.machine_pb2 import FailureCause, StartPrompt, StartToken

FINISH: dict[str | None, FinishReason.ValueType] = {
    None: FinishReason.FINISH_REASON_UNSPECIFIED,
    "stop": FINISH_REASON_STOP,
    "length": FINISH_REASON_LENGTH,
}


def work_key(ref: WorkRef) -> WorkKey:
    """Return the engine's name for one attempt."""
    return WorkKey(ref.request_id, ref.attempt)


def work_ref(key: WorkKey) -> WorkRef:
    """Return the stream's name for one attempt."""
    return WorkRef(request_id=key.request_id, attempt=key.attempt)


def transfer_of(ref: TransferRef) -> Transfer:
    """Return the engine's name for one transfer attempt; raises `ValueError` when malformed."""
    if len(ref.transfer_id) != 16 or ref.generation < 1:
        raise ValueError("transfer: needs a transfer_id of 16 bytes and a generation of at least 1")
    return Transfer(ref.transfer_id, ref.generation)


def prompt_work(start: StartPrompt) -> PromptWork:
    """Read a StartPrompt; raises `ValueError`."""
    transfer = transfer_of(start.transfer) if start.HasField("transfer") else None
    if transfer is not None and start.mode == TRANSFER_MODE_UNSPECIFIED:
        raise ValueError("mode: needed with a transfer; the router decides it by the prompt's length")
    return PromptWork(
        key=work_key(start.work),
        token_ids=_prompt(start.token_ids),
        sampling=start.sampling,
        transfer=transfer,
        mode=start.mode,
        lease_ms=start.lease_ms,
    )


def token_work(start: StartToken, traceparent: str = "") -> TokenWork:
    """Read a StartToken; raises `ValueError`. `traceparent`: of the span of this work."""
    return TokenWork(
        key=work_key(start.work),
        token_ids=_prompt(start.token_ids),
        sampling=start.sampling,
        transfer=transfer_of(start.transfer),
        source_kvd_address=start.source_kvd_address,
        source_engine_id=start.source_engine_id,
        lease_ms=start.lease_ms,
        traceparent=traceparent,
    )


def _prompt(ids: Iterable[int]) -> list[int]:
    token_ids = list(ids)
    if not token_ids:
        raise ValueError("token_ids: empty")
    return token_ids


def tokens_event(key: WorkKey, output: TokenOutput) -> MachineEvent:
    """Write one engine output."""
    return MachineEvent(
        tokens=Tokens(
            work=work_ref(key),
            ids=output.token_ids,
            logprobs=[_logprob(entry) for entry in output.logprobs],
            finish=FINISH[output.finish],
            cached_prompt_tokens=output.cached_prompt_tokens,
            stop_token_id=output.stop_token_id or 0,
        )
    )


def _logprob(entry: dict[int, float]) -> TokenLogprob:
    """Write one token's log probabilities: the chosen token is the entry's first."""
    chosen = next(iter(entry))
    ranked = sorted(entry.items(), key=lambda item: item[1], reverse=True)
    top = [TokenAlternative(token_id=token_id, logprob=value) for token_id, value in ranked]
    return TokenLogprob(token_id=chosen, logprob=entry[chosen], top=top)


def failed_event(ref: WorkRef, cause: FailureCause.ValueType, message: str) -> MachineEvent:
    """Write the end of an attempt on this machine."""
    return MachineEvent(failed=WorkFailed(work=ref, cause=cause, message=message))
