"""The split makes the tokens that one engine makes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED
from tests.vllm.harness import Node, Split, greedy, prompt, reference

if TYPE_CHECKING:
    from splitwise.models import ModelFolder

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 500, 1500, 4000)
MADE = 12
# Each depends on what was made before, the first token included.
PENALTIES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 2.0, "logit_bias": {700: 60.0, 800: 59.5, 900: 59.0}},
    {"min_tokens": 5, "ignore_eos": False, "logit_bias": {2: 100.0}},
)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def one_engine(model: ModelFolder) -> dict[int, list[int]]:
    """Token ids that a plain engine makes after prompts of each length; -1 and on: `PENALTIES`."""
    requests: list[dict[str, Any]] = [
        {"tokens": prompt(length), "sampling": {"max_tokens": MADE}} for length in LENGTHS
    ]
    requests += [
        {"tokens": prompt(48, seed=5), "sampling": {"max_tokens": MADE, **penalty}} for penalty in PENALTIES
    ]
    answers = await reference(
        model.path,
        requests,
        dtype="float32",
        block_size=32,
        max_model_len=4224,
        max_num_batched_tokens=4224,
        kv_cache_memory_bytes=512 << 20,
    )
    numbers = (-1 - at for at in range(len(PENALTIES)))
    return dict(zip((*LENGTHS, *numbers), answers, strict=True))


@pytest.mark.parametrize("length", LENGTHS)
async def test_layerwise(split: Split, one_engine: dict[int, list[int]], length: int) -> None:
    """Prompts of 1,500 and 4,000 tokens are computed in several chunks, the others in one."""
    outcome = await split.run(prompt(length), greedy(MADE), TRANSFER_MODE_LAYERWISE)
    assert outcome.tokens == one_engine[length]
    assert outcome.later[-1].finish == "length"


@pytest.mark.parametrize("length", [1, 31, 32, 33, 500, 1500])
async def test_serialized_with_hits(split: Split, one_engine: dict[int, list[int]], length: int) -> None:
    """The same prompts again: both prefix caches hold them."""
    outcome = await split.run(prompt(length), greedy(MADE), TRANSFER_MODE_SERIALIZED)
    assert outcome.tokens == one_engine[length]
    if length > 32:
        assert outcome.first.cached_prompt_tokens >= (length - 1) // 32 * 32


@pytest.mark.parametrize("number", range(len(PENALTIES)))
async def test_penalties_and_limits(split: Split, one_engine: dict[int, list[int]], number: int) -> None:
    outcome = await split.run(prompt(48, seed=5), greedy(MADE, **PENALTIES[number]))
    assert outcome.tokens == one_engine[-1 - number]


async def test_hits_on_the_prompt_side_only(
    pair: tuple[Node, Node], one_engine: dict[int, list[int]]
) -> None:
    """The first request fills the left cache alone; all its blocks must still reach the right."""
    left, right = pair
    tokens = prompt(500, seed=7)
    alone = await Split(left, left).run(tokens, greedy(MADE))
    outcome = await Split(left, right).run(tokens, greedy(MADE))
    assert outcome.first.cached_prompt_tokens == 480
    assert outcome.tokens == alone.tokens


async def test_hits_on_the_token_side_only(pair: tuple[Node, Node]) -> None:
    left, right = pair
    tokens = prompt(500, seed=8)
    alone = await Split(right, right).run(tokens, greedy(MADE))
    outcome = await Split(left, right).run(tokens, greedy(MADE))
    assert outcome.first.cached_prompt_tokens == 0
    assert outcome.tokens == alone.tokens


async def test_both_phases_on_one_engine(pair: tuple[Node, Node], one_engine: dict[int, list[int]]) -> None:
    outcome = await Split(pair[1], pair[1]).run(prompt(1500), greedy(MADE))
    assert outcome.tokens == one_engine[1500]


async def test_the_other_way_round(pair: tuple[Node, Node], one_engine: dict[int, list[int]]) -> None:
    left, right = pair
    outcomes = await asyncio.gather(
        Split(left, right).run(prompt(500), greedy(MADE)), Split(right, left).run(prompt(33), greedy(MADE))
    )
    assert [outcome.tokens for outcome in outcomes] == [one_engine[500], one_engine[33]]


@pytest.mark.slow
async def test_sixteen_at_a_time(split: Split, one_engine: dict[int, list[int]]) -> None:
    lengths = [length for length in LENGTHS if length < 1500] * 2
    outcomes = await asyncio.gather(*(split.run(prompt(length), greedy(MADE)) for length in lengths))
    assert [outcome.tokens for outcome in outcomes] == [one_engine[length] for length in lengths]
