"""Sampling parameters mean the same across the hand-over as in one engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.interface import PromptWork, WorkKey, WorkRefusedError
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED, SamplingParams
from tests.vllm.harness import Split, collect, greedy, prompt, take

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

EOS = 2


def biased(token: int, **more: Any) -> SamplingParams:
    """Greedy, with one token that is sure to come."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 6, "logit_bias": {token: 100.0}, **more})


def seeded(seed: int) -> SamplingParams:
    return SamplingParams(temperature=1.0, seed=seed, max_tokens=10, ignore_eos=True)


@pytest.mark.parametrize("length", [40, 1500])
async def test_a_seed_gives_the_same_tokens(split: Split, length: int) -> None:
    """However often, whichever way the KV cache goes, from whichever side, and whatever else runs."""
    tokens = prompt(length, seed=3)
    await split.forget_prefixes()
    wanted = (await split.run(tokens, seeded(11))).tokens
    for mode in (TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED):
        assert (await split.run(tokens, seeded(11), mode)).tokens == wanted  # found in the caches
    for other in (Split(split.token, split.prompt), Split(split.token, split.token)):
        assert (await other.run(tokens, seeded(11))).tokens == wanted
    several = await asyncio.gather(*(split.run(tokens, seeded(seed)) for seed in [*range(8), *[11] * 8]))
    assert [outcome.tokens for outcome in several[8:]] == [wanted] * 8
    assert all(outcome.tokens != wanted for outcome in several[:8])


async def test_log_probabilities_include_the_first_token(split: Split) -> None:
    outcome = await split.run(prompt(40), greedy(3, logprobs=2))
    assert len(outcome.logprobs) == 3
    for token, row in zip(outcome.tokens, outcome.logprobs, strict=True):
        assert next(iter(row)) == token
        assert row[token] == max(row.values()) <= 0.0
        assert len(row) == 2


async def test_first_token_ends_the_request(split: Split) -> None:
    prompt_work, token_work = split.works(prompt(64), biased(EOS))
    later = asyncio.create_task(take(split.token.engine.run_token(token_work), 1))
    (first,) = await collect(split.prompt.engine.run_prompt(prompt_work))
    assert (first.token_ids, first.finish, first.stop_token_id) == ([EOS], "stop", EOS)
    # The router gives the token phase up; until then it has made nothing.
    assert not later.done() or later.exception() is not None
    later.cancel()
    await asyncio.gather(later, return_exceptions=True)


async def test_stop_token_id_on_either_side(split: Split) -> None:
    tokens = (await split.run(prompt(50), greedy(4))).tokens
    outcome = await split.run(prompt(50), greedy(8, stop_token_ids=[tokens[2]]))
    assert outcome.tokens == tokens[:3]
    assert (outcome.later[-1].finish, outcome.later[-1].stop_token_id) == ("stop", tokens[2])


async def test_min_tokens_counts_the_first(split: Split) -> None:
    """The end token is sure to come as soon as it may: exactly after `min_tokens`."""
    outcome = await split.run(prompt(20), biased(EOS, min_tokens=4, max_tokens=9))
    assert EOS not in outcome.tokens[:4]
    assert outcome.tokens[4:] == [EOS]
    assert outcome.later[-1].finish == "stop"


async def test_without_transfer_one_token_is_all(split: Split) -> None:
    work = PromptWork(WorkKey("single", 1), prompt(40), greedy(1), None, TRANSFER_MODE_LAYERWISE)
    (output,) = await collect(split.prompt.engine.run_prompt(work))
    assert output.finish == "length"


async def test_exactly_the_limit(split: Split) -> None:
    limit = split.prompt.description.max_model_len
    outcome = await split.run(prompt(limit - 2), greedy(2))
    assert len(outcome.tokens) == 2


@pytest.mark.parametrize(
    ("tokens", "sampling", "named"),
    [
        ([], greedy(2), "token_ids"),
        (prompt(4224), greedy(2), "token_ids"),
        ([5, 49_152], greedy(2), r"token_ids\[1\]"),
        ([5], greedy(2, temperature=-1.0), "temperature"),
        ([5], greedy(2, min_tokens=3), "min_tokens"),
    ],
)
async def test_refusals_name_the_field(
    split: Split, tokens: list[int], sampling: SamplingParams, named: str
) -> None:
    _, token_work = split.works(tokens, sampling)
    with pytest.raises(WorkRefusedError, match=named):
        await collect(split.token.engine.run_token(token_work))
