"""vLLM's outputs in the engine interface's terms."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.interface import TokenOutput

if TYPE_CHECKING:
    import vllm

_ENDS = ("stop", "length", None)


def is_error(output: vllm.RequestOutput) -> bool:
    """Whether vLLM ended the request by itself: a failed KV load, a stopped engine."""
    return output.outputs[0].finish_reason not in _ENDS


def token_output(output: vllm.RequestOutput, *, last: bool) -> TokenOutput:
    """Convert one output. `last`: reaching the token limit ends the request, not only its prompt phase."""
    made = output.outputs[0]
    finish = made.finish_reason
    if finish == "length" and not last:
        finish = None
    stop_token_id = None
    if finish == "stop":
        stop_token_id = made.stop_reason if isinstance(made.stop_reason, int) else made.token_ids[-1]
    return TokenOutput(
        token_ids=list(made.token_ids),
        logprobs=[{token: entry.logprob for token, entry in row.items()} for row in made.logprobs or ()],
        finish=finish,
        stop_token_id=stop_token_id,
        cached_prompt_tokens=output.num_cached_tokens or 0,
    )
