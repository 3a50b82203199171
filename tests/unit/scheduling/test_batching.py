"""The machine scheduler's rules, case by case."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.batching import (
    BLOCKS,
    COLUMNS,
    KNOWN,
    MOST,
    PENDING,
    PREEMPTED,
    TAKEN,
    form_batch,
    missing_blocks,
    pick_victim,
    wanted_blocks,
)

Table = np.ndarray[tuple[int, ...], np.dtype[np.int32]]


def table(pending: list[int], preempted: list[int]) -> Table:
    works = np.zeros((len(pending), COLUMNS), np.int32)
    works[:, PENDING], works[:, PREEMPTED] = pending, preempted
    return works


def form(works: Table, room: int, most: int = 4) -> tuple[int, int]:
    rows = np.arange(len(works), dtype=np.int32)
    prompts, phases = rows[works[:, PENDING] > 0], rows[works[:, PENDING] == 0]
    return form_batch(works, prompts, len(prompts), phases, len(phases), room, most)


@pytest.mark.parametrize(
    ("pending", "preempted", "take"),
    [
        ([], [], []),
        ([4, 6], [0, 0], [4, 6]),
        ([4, 7], [0, 0], [4, 0]),  # whole or not at all
        ([4, 7, 1], [0, 0, 0], [4, 0, 0]),  # nobody overtakes
        ([25], [0], [10]),  # longer than a batch: in chunks
        ([0] * 12, [0] * 12, [1] * 12),  # without prompts all run
        ([0, 8], [0, 0], [1, 8]),
        ([0, 0, 9], [0, 0, 0], [1, 0, 9]),  # the first to come first
        ([0, 0, 9], [0, 1, 0], [0, 1, 9]),  # the oldest in preemptions before them
        ([0, 0, 0, 8], [0, 2, 1, 0], [0, 1, 1, 8]),
        ([0, 10], [3, 0], [1, 9]),  # at the limit (one is left for an eviction) it goes before prompts
        ([0, 5, 5], [3, 0, 0], [1, 5, 0]),
        ([0, 0, 0, 20], [4, 3, 0, 0], [1, 1, 0, 8]),
    ],
)
def test_who_runs(pending: list[int], preempted: list[int], take: list[int]) -> None:
    works = table(pending, preempted)
    prompts, sat_out = form(works, 10)
    assert works[:, TAKEN].tolist() == take
    assert prompts == sum(p > 0 and t > 0 for p, t in zip(pending, take, strict=True))
    assert sat_out == sum(p == 0 and t == 0 for p, t in zip(pending, take, strict=True))
    again = works[:, PREEMPTED] - np.array(preempted, np.int32)
    assert again.tolist() == [int(p == 0 and t == 0) for p, t in zip(pending, take, strict=True)]


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 8), st.integers(1, 4))
def test_under_endless_prompts_every_token_phase_goes_on(sizes: list[int], count: int, most: int) -> None:
    """After `most` - 1 iterations in its life, a token phase runs in each iteration."""
    works = table([0] * count + sizes, [0] * (count + len(sizes)))
    for iteration in range(40):
        works[:, TAKEN] = 0
        works[count:, PENDING] = sizes
        prompts, _ = form(works, 10, most)
        assert prompts >= 1
        assert works[:, TAKEN].sum() <= 10
        assert (works[:count, PREEMPTED] < most).all()
        if iteration >= (most - 1) * count:
            assert works[:count, TAKEN].all()


def test_the_victim_is_the_least_preempted_and_newest() -> None:
    works = table([0] * 5, [0, 1, 0, 0, 2])
    rows = np.arange(5, dtype=np.int32)
    assert pick_victim(works, rows, 5, 4) == 3
    assert pick_victim(works, rows[[1, 4]], 2, 4) == 0
    assert pick_victim(works, rows, 5, 1) == 3
    assert pick_victim(works, rows[[1, 4]], 2, 1) == NONE  # neither may be preempted any more


def test_blocks_are_wanted_as_the_output_grows_and_all_of_them_after_the_last_preemption() -> None:
    works = table([0, 0], [0, 2])
    works[:, KNOWN], works[:, MOST], works[:, BLOCKS] = 8, 30, 2
    rows = np.arange(2, dtype=np.int32)
    assert [wanted_blocks(works, row, 4, 2) for row in rows] == [2, 8]
    assert missing_blocks(works, rows, 2, 4, 0) == 0
    assert missing_blocks(works, rows, 2, 4, 1) == 2
    assert missing_blocks(works, rows, 1, 4, 5) == 2
