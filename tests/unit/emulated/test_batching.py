"""The machine scheduler's rules, case by case."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.emulated.batching import form_batch
from services.engine.emulated.sequence import Sequence
from services.engine.interface import WorkKey
from splitwise.rpc.v1.common_pb2 import SamplingParams


def prompt(name: str, pending: int, computed: int = 0) -> Sequence:
    sequence = Sequence(
        WorkKey(name, 1), [1] * (pending + computed), pending + computed, SamplingParams(), None, False, 0
    )
    sequence.computed = computed
    return sequence


def decoding(name: str, context: int = 10, sat_out: int = 0) -> Sequence:
    sequence = prompt(name, 1, context)
    sequence.made = 1
    sequence.sat_out = sat_out
    return sequence


def names(running: list[Sequence], max_tokens: int = 10, max_sat_out: int = 4) -> list[tuple[str, int]]:
    batch = form_batch(running, max_tokens, max_sat_out)
    return [(sequence.key.request_id, count) for sequence, count in batch.parts]


@pytest.mark.parametrize(
    ("running", "expected"),
    [
        ([], []),
        ([prompt("a", 4), prompt("b", 6)], [("a", 4), ("b", 6)]),
        ([prompt("a", 4), prompt("b", 7)], [("a", 4)]),  # whole or not at all
        ([prompt("a", 4), prompt("b", 7), prompt("c", 1)], [("a", 4)]),  # nobody overtakes
        ([prompt("a", 25)], [("a", 10)]),  # longer than a batch: in chunks
        ([prompt("a", 5, 20), prompt("b", 5)], [("a", 5), ("b", 5)]),  # the last chunk shares
        ([decoding("a"), decoding("b")], [("a", 1), ("b", 1)]),
        ([decoding(str(i)) for i in range(12)], [(str(i), 1) for i in range(12)]),  # no prompt: all
        ([decoding("a"), prompt("b", 8)], [("b", 8), ("a", 1)]),
        ([decoding("a"), decoding("b"), prompt("c", 9)], [("c", 9), ("a", 1)]),
        ([decoding("a"), decoding("b", sat_out=1), prompt("c", 9)], [("c", 9), ("b", 1)]),  # ageing
        ([decoding("a", sat_out=4), prompt("c", 10)], [("c", 9), ("a", 1)]),  # it has given way enough
        ([decoding("a", sat_out=4), prompt("b", 5), prompt("c", 5)], [("b", 5), ("a", 1)]),
    ],
)
def test_who_runs(running: list[Sequence], expected: list[tuple[str, int]]) -> None:
    assert names(running) == expected


def test_sums() -> None:
    batch = form_batch([decoding("a", 7), decoding("b", 30), prompt("c", 5, 3)], 10, 4)
    assert (batch.prompt_tokens, batch.prompt_sequences) == (5, 1)
    assert (batch.sequences, batch.context, batch.sat_out) == (2, 37, 0)


def test_a_token_phase_whose_kv_must_be_recomputed_counts_as_a_prompt() -> None:
    sequence = decoding("a", 20)
    sequence.computed = 0
    assert names([sequence]) == [("a", 10)]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=6),
    st.integers(1, 8),
    st.integers(0, 3),
)
def test_under_endless_prompts_every_token_phase_goes_on(
    sizes: list[int], count: int, max_sat_out: int
) -> None:
    """After `max_sat_out` iterations in its life, a token phase runs in each iteration."""
    phases = [decoding(f"d{i}") for i in range(count)]
    for iteration in range(40):
        prompts = [prompt(f"p{i}", size) for i, size in enumerate(sizes)]
        batch = form_batch([*phases, *prompts], 10, max_sat_out)
        ran = {sequence for sequence, _ in batch.parts}
        assert batch.prompt_sequences >= 1
        assert batch.prompt_tokens + batch.sequences <= 10
        assert all(phase.sat_out <= max_sat_out for phase in phases)
        if iteration >= max_sat_out * count:
            assert ran.issuperset(phases)
