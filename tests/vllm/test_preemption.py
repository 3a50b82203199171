"""KV memory that is too small for everything at once: requests wait, are preempted, and end right."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.vllm.conftest import settings
from tests.vllm.harness import Node, Split, greedy, prompt

if TYPE_CHECKING:
    from pathlib import Path

    from splitwise.models import ModelFolder

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.asyncio(loop_scope="session"),
]


async def test_preemption_on_the_token_side(
    pair: tuple[Node, Node], model: ModelFolder, tmp_path: Path
) -> None:
    """27 blocks for six requests that need nine each: a preempted one computes, never fetches, again."""
    small = Node(tmp_path, "small", settings(model, kv_bytes=40 << 20, max_model_len=512))
    prompts = [prompt(150, seed=seed) for seed in range(20, 26)]
    try:
        await small.start()
        alone = await asyncio.gather(*(Split(*pair).run(tokens, greedy(120)) for tokens in prompts))
        outcomes = await asyncio.gather(
            *(Split(pair[0], small).run(tokens, greedy(120)) for tokens in prompts)
        )
        assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in alone]
        assert small.engine.load().preemptions > 0
        await small.until_empty()
    finally:
        await small.stop()


async def test_preemption_on_the_prompt_side(
    pair: tuple[Node, Node], model: ModelFolder, tmp_path: Path
) -> None:
    """Three prompts of 47 blocks, interleaved, in 70: a preempted one pushes again from block 0."""
    small = Node(
        tmp_path,
        "small",
        settings(
            model,
            kv_bytes=100 << 20,
            max_model_len=1600,
            max_batch_tokens=200,
            extra={"scheduler_reserve_full_isl": False, "long_prefill_token_threshold": 60},
        ),
    )
    prompts = [prompt(1500, seed=seed) for seed in (31, 32, 33)]
    try:
        await small.start()
        alone = await asyncio.gather(*(Split(*pair).run(tokens, greedy(8)) for tokens in prompts))
        outcomes = await asyncio.gather(*(Split(small, pair[1]).run(tokens, greedy(8)) for tokens in prompts))
        assert [outcome.tokens for outcome in outcomes] == [outcome.tokens for outcome in alone]
        assert small.engine.load().preemptions > 0
        await small.until_empty()
    finally:
        await small.stop()
