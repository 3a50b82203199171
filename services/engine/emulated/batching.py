"""Chooses what runs in an iteration, by the machine scheduler's rules (Splitwise paper, section IV-B).

Prompts first, in order of arrival, up to the batch's tokens; one that is longer than a
batch is computed in chunks. Token phases take the room that is left, those that sat out
most often first. One that sat out `max_sat_out` iterations in its life never does again:
it is counted before the prompts. Without prompts every token phase runs.
"""

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
    sat_out: int = 0  # token phases that found no room


def form_batch(running: Iterable[Sequence], max_tokens: int, max_sat_out: int) -> Batch:
    """Choose among the running sequences, which are in order of arrival."""
    batch = Batch()
    prompts: list[Sequence] = []
    decoding: list[Sequence] = []
    for sequence in running:
        (decoding if sequence.decoding else prompts).append(sequence)
    decoding.sort(key=lambda sequence: -sequence.sat_out)  # stable: then by arrival
    if not prompts:
        _add(batch, decoding)
        return batch
    must = sum(sequence.sat_out >= max_sat_out for sequence in decoding)
    room = max_tokens - must
    for sequence in prompts:
        count = min(sequence.pending, room) if batch.prompt_sequences == 0 else sequence.pending
        if not 0 < count <= room:
            break
        batch.parts.append((sequence, count))
        batch.prompt_tokens += count
        batch.prompt_sequences += 1
        room -= count
    places = must + max(room, 0)
    _add(batch, decoding[:places])
    for sequence in decoding[places:]:
        sequence.sat_out += 1
        batch.sat_out += 1
    return batch


def _add(batch: Batch, decoding: list[Sequence]) -> None:
    for sequence in decoding:
        batch.parts.append((sequence, 1))
        batch.context += sequence.computed
    batch.sequences += len(decoding)
