"""The split makes the tokens that one plain engine makes, however it comes by them.

The crossed cases: prompts in chunks of 512 tokens and in one pass; layer-wise and serialized;
one request and 16 at a time; computed, and found in the prefix caches of both sides.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED
from tests.vllm.conftest import settings
from tests.vllm.harness import Node, Split, greedy, prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from splitwise.models import ModelFolder
    from tests.vllm.reference import PlainEngine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

LENGTHS = (1, 15, 16, 17, 31, 32, 33, 500, 1500, 4000)
SIXTEEN = (*LENGTHS, 34, 64, 65, 100, 200, 501)
MODES = {"layerwise": TRANSFER_MODE_LAYERWISE, "serialized": TRANSFER_MODE_SERIALIZED}
BLOCK = 32
MADE = 8
# Each depends on what was made before, the first token included.
PENALTIES: tuple[dict[str, Any], ...] = (
    {"presence_penalty": 1.5},
    {"frequency_penalty": 1.5},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 2.0, "logit_bias": {700: 60.0, 800: 59.5, 900: 59.0}},
    {"min_tokens": 5, "ignore_eos": False, "logit_bias": {2: 100.0}},
)


def tokens_of(length: int) -> list[int]:
    """Return a prompt that shares no prefix with those of other lengths."""
    return prompt(length, seed=length)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def whole(model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Node]:
    """A node whose engine computes the longest prompt in one pass."""
    node = Node(tmp_path_factory.mktemp("whole"), "whole", settings(model, max_batch_tokens=4224))
    try:
        await node.start()
        yield node
    finally:
        await node.stop()


@pytest.fixture(params=["chunked", "whole"])
def crossed(request: pytest.FixtureRequest, pair: tuple[Node, Node]) -> Split:
    """A prompt machine of either kind before the same token machine."""
    left, right = pair
    return Split(left if request.param == "chunked" else request.getfixturevalue("whole"), right)


def cached(length: int) -> int:
    """Return how many tokens of a prompt a prefix cache that knows it gives: whole blocks, not the last."""
    return (length - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", LENGTHS)
async def test_alone(crossed: Split, plain: PlainEngine, mode: str, length: int) -> None:
    """Computed first, then found in the prefix caches of both sides."""
    wanted = await plain.answer(tokens_of(length), max_tokens=MADE)
    await crossed.forget_prefixes()
    for known in (0, cached(length)):
        outcome = await crossed.run(tokens_of(length), greedy(MADE), MODES[mode])
        assert outcome.first.cached_prompt_tokens == known
        assert outcome.tokens == wanted
        assert outcome.later[-1].finish == "length"


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_sixteen_at_a_time(crossed: Split, plain: PlainEngine, mode: str) -> None:
    prompts = [tokens_of(length) for length in SIXTEEN]
    wanted = await plain.answers(prompts, max_tokens=MADE)
    await crossed.forget_prefixes()
    for hits in (False, True):
        outcomes = await asyncio.gather(*(crossed.run(p, greedy(MADE), MODES[mode]) for p in prompts))
        known = [cached(length) if hits else 0 for length in SIXTEEN]
        assert [outcome.first.cached_prompt_tokens for outcome in outcomes] == known
        assert [outcome.tokens for outcome in outcomes] == wanted


@pytest.mark.parametrize("mode", MODES)
async def test_hits_between_requests_of_one_batch(crossed: Split, plain: PlainEngine, mode: str) -> None:
    """Prompts that begin alike, at once: a block that one computes is pushed for the others as well."""
    lengths = [length for length in LENGTHS if length <= 500] * 2
    wanted = await plain.answers([prompt(length) for length in lengths], max_tokens=MADE)
    await crossed.forget_prefixes()
    outcomes = await asyncio.gather(
        *(crossed.run(prompt(length), greedy(MADE), MODES[mode]) for length in lengths)
    )
    assert [outcome.tokens for outcome in outcomes] == wanted
    assert any(outcome.first.cached_prompt_tokens for outcome in outcomes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["prompt", "token"])
async def test_hits_on_one_side_only(split: Split, plain: PlainEngine, side: str, mode: str) -> None:
    """All blocks must reach a token side that has none of them, also those found in the cache."""
    tokens = tokens_of(1500)
    await split.forget_prefixes()
    node: Node = getattr(split, side)
    await Split(node, node).run(tokens, greedy(2))
    outcome = await split.run(tokens, greedy(MADE), MODES[mode])
    assert outcome.first.cached_prompt_tokens == (cached(1500) if side == "prompt" else 0)
    assert outcome.tokens == await plain.answer(tokens, max_tokens=MADE)


@pytest.mark.parametrize("penalty", PENALTIES, ids=lambda penalty: next(iter(penalty)))
async def test_penalties_and_limits(split: Split, plain: PlainEngine, penalty: dict[str, Any]) -> None:
    outcome = await split.run(prompt(48, seed=5), greedy(12, **penalty))
    assert outcome.tokens == await plain.answer(prompt(48, seed=5), max_tokens=12, **penalty)


async def test_both_phases_on_one_engine(pair: tuple[Node, Node], plain: PlainEngine) -> None:
    outcome = await Split(pair[1], pair[1]).run(tokens_of(1500), greedy(MADE))
    assert outcome.tokens == await plain.answer(tokens_of(1500), max_tokens=MADE)


async def test_the_other_way_round(pair: tuple[Node, Node], plain: PlainEngine) -> None:
    left, right = pair
    outcomes = await asyncio.gather(
        Split(left, right).run(tokens_of(500), greedy(MADE)),
        Split(right, left).run(tokens_of(33), greedy(MADE)),
    )
    wanted = await plain.answers([tokens_of(500), tokens_of(33)], max_tokens=MADE)
    assert [outcome.tokens for outcome in outcomes] == wanted
