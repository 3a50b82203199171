"""Makes the V1 model runner of vLLM take a token request's first token as *output*.

The first token comes with the KV cache from the prompt machine. vLLM's scheduler can be
told (`Request.append_output_token_ids`), but its V1 model runner starts every new request
with no output. Giving it the token as a last *prompt* token would compute the right KV and
yet make penalties and `min_tokens` forget it. So the new request's prompt is a
`PromptAndFirstToken`, and the model runner's request state, replaced here by a subclass,
splits it. The V2 model runner does this by itself.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class PromptAndFirstToken(list[int]):
    """A prompt with the first output token as its last item."""


class RequestState(CachedRequestState):  # type: ignore[misc]
    """The model runner's state of one request, which may begin with one output token."""

    def __post_init__(self, *args: Any) -> None:
        given: list[int] | None = self.prompt_token_ids
        if isinstance(given, PromptAndFirstToken):
            self.prompt_token_ids: list[int] | None = given[:-1]
            self.output_token_ids = [given[-1]]
        super().__post_init__(*args)


def install() -> None:
    """Let the model runner use `RequestState`; to be called in the worker's process before it runs."""
    gpu_model_runner.CachedRequestState = RequestState
