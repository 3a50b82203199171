"""Chooses what runs in an iteration: token phases first, then prompts in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from services.engine.emulated.sequence import Sequence


@dataclass(slots=True)
class Batch:
    """One iteration: per sequence how many positions it computes."""

    parts: list[tuple[Sequence, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    prompt_sequences: int = 0
    sequences: int = 0  # in the token phase
    context: int = 0  # tokens of context that the token phase reads


def form_batch(running: Iterable[Sequence], max_prompt_tokens: int) -> Batch:
    """Every sequence in the token phase, and prompt tokens up to `max_prompt_tokens`, chunked."""
    batch = Batch()
    for sequence in running:
        if sequence.decoding:
            batch.parts.append((sequence, 1))
            batch.sequences += 1
            batch.context += sequence.computed
            continue
        count = min(sequence.pending, max_prompt_tokens - batch.prompt_tokens)
        if count > 0:
            batch.parts.append((sequence, count))
            batch.prompt_tokens += count
            batch.prompt_sequences += 1
    return batch
