"""Makes the V1 model runner of vLLM take a token request's first token as *output*.

The first token comes with the KV cache from the prompt machine. vLLM's scheduler can be
told (`Request.append_output_token_ids`), but its V1 model runner starts every new request
with no output. Giving it the token as a last *prompt* token would compute the right KV and
yet make penalties and `min_tokens` forget it. So the new request's prompt is a
`PromptAndFirstToken`, and the model runner's request state, replaced here by a subclass,
splits it. The V2 model runner does this by itself.

The same class keeps seeded requests alive on CPUs: after each chunk of a prompt the model
runner takes the draw for the unused token back by the generator's offset, which CPU
generators do not have; the error would end the whole engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import CachedRequestState


class PromptAndFirstToken(list[int]):
    """A prompt with the first output token as its last item."""


class RewindingGenerator(torch.Generator):  # type: ignore[misc]
    """A CPU generator whose draws for a prompt's chunks can be taken back, to where it began.

    A request that was preempted after it made tokens begins again, too: its later tokens are
    as random, but not those of a run without the preemption.
    """

    def __new__(cls, seeded: torch.Generator) -> RewindingGenerator:
        """Make one on the same device."""
        made: RewindingGenerator = super().__new__(cls, seeded.device)
        return made

    def __init__(self, seeded: torch.Generator) -> None:
        self._beginning = seeded.get_state()
        self.set_state(self._beginning)

    def get_offset(self) -> int:
        """Return any number: the model runner only subtracts from it."""
        return 0

    def set_offset(self, _offset: int) -> None:
        """Take the draws back."""
        self.set_state(self._beginning)


class RequestState(CachedRequestState):  # type: ignore[misc]
    """The model runner's state of one request, which may begin with one output token."""

    def __post_init__(self, *args: Any) -> None:
        given: list[int] | None = self.prompt_token_ids
        if isinstance(given, PromptAndFirstToken):
            self.prompt_token_ids: list[int] | None = given[:-1]
            self.output_token_ids = [given[-1]]
        seeded: torch.Generator | None = self.generator
        if seeded is not None and seeded.device.type == "cpu":
            self.generator: torch.Generator | None = RewindingGenerator(seeded)
        super().__post_init__(*args)


def install() -> None:
    """Let the model runner use `RequestState`; to be called in the worker's process before it runs."""
    gpu_model_runner.CachedRequestState = RequestState
