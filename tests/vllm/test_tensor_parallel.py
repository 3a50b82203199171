"""Engines spread over two ranks each: every rank's part of the KV cache goes its own way.

With a small random model, since the default one's three KV heads cannot be shared by two.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from services.engine.interface import TransferFailedError
from services.engine.vllm import VllmSettings
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED
from tests.support.tokenizers_small import byte_level
from tests.vllm.harness import Node, Split, collect, greedy, prompt, take
from tests.vllm.reference import PlainEngine
from tests.vllm.shared_memory import SHARED, nothing_left, orphans

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900), pytest.mark.asyncio(loop_scope="session")]

RANKS = 2
LENGTHS = (1, 31, 32, 33, 700)
MADE = 10


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of six layers, four heads and two KV heads with random weights."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (the extra `cpu` or `gpu`)")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("small") / "small-llama"
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=40_960,
        max_position_embeddings=2048,
        initializer_range=0.2,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def one_engine(small_model: Path) -> dict[int, list[int]]:
    """What vLLM makes on two ranks without a connector; it leaves shared memory behind."""
    plain = PlainEngine(
        small_model,
        max_model_len=1024,
        max_num_batched_tokens=1024,
        kv_cache_memory_bytes=32 << 20,
        tensor_parallel_size=RANKS,
    )
    try:
        return {length: await plain.answer(prompt(length), max_tokens=MADE) for length in LENGTHS}
    finally:
        await plain.close()
        for name in orphans():
            if name.startswith("vllm_dist_"):
                (SHARED / name).unlink(missing_ok=True)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def two_ranks(
    one_engine: dict[int, list[int]], small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Node, Node]]:
    """Started when the plain engine is gone, so that what is left at the end is ours."""
    settings = VllmSettings(
        model=small_model,
        dtype="float32",
        kv_bytes=32 << 20,
        max_model_len=1024,
        max_batch_tokens=256,
        tensor_parallel=RANKS,
    )
    folder = tmp_path_factory.mktemp("ranks")
    nodes = Node(folder, "left", settings), Node(folder, "right", settings)
    async with nothing_left():
        try:
            for node in nodes:
                await node.start()
            yield nodes
        finally:
            for node in nodes:
                await node.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def split(two_ranks: tuple[Node, Node]) -> AsyncIterator[Split]:
    """Every test must leave the pair without a held block."""
    for node in two_ranks:
        await node.until_able()
    both = Split(*two_ranks)
    yield both
    await both.until_empty()


@pytest.mark.parametrize("mode", [TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED])
async def test_same_tokens(split: Split, one_engine: dict[int, list[int]], mode: int) -> None:
    """The longest prompt is computed in three chunks; all lengths together afterwards."""
    for length in LENGTHS:
        assert (await split.run(prompt(length), greedy(MADE), mode)).tokens == one_engine[length], length
    together = await asyncio.gather(
        *(split.run(prompt(length), greedy(MADE), mode) for length in LENGTHS for _ in range(2))
    )
    assert [outcome.tokens for outcome in together] == [
        one_engine[length] for length in LENGTHS for _ in range(2)
    ]


async def test_the_machine_says_how_many_ranks_it_has(split: Split) -> None:
    description = split.prompt.description
    assert description.tensor_parallel == RANKS
    assert f"tp_size={RANKS}" in description.kv_facts
    assert description.kv_fingerprint == split.token.description.kv_fingerprint


@pytest.mark.parametrize("phase", ["prompt", "token"])
async def test_an_abort_on_either_side_frees_every_ranks_blocks(split: Split, phase: str) -> None:
    """The fixture waits until no block is held."""
    prompt_work, token_work = split.works(prompt(700, seed=3), greedy(200))
    if phase == "token":
        prompts = asyncio.ensure_future(collect(split.prompt.engine.run_prompt(prompt_work)))
        assert len(await take(split.token.engine.run_token(token_work), 2)) == 2
        assert len(await prompts) == 1
    else:
        tokens = asyncio.ensure_future(collect(split.token.engine.run_token(token_work)))
        await take(split.prompt.engine.run_prompt(prompt_work), 0)
        with pytest.raises(TransferFailedError):
            await tokens


async def test_a_daemon_that_dies_fails_all_parts_and_serves_again(
    split: Split, one_engine: dict[int, list[int]]
) -> None:
    prompt_work, token_work = split.works(prompt(700, seed=4), greedy(100))
    phases = [
        asyncio.ensure_future(collect(split.prompt.engine.run_prompt(prompt_work))),
        asyncio.ensure_future(collect(split.token.engine.run_token(token_work))),
    ]
    await asyncio.sleep(0.05)
    await split.prompt.daemon.kill()
    done = await asyncio.gather(*phases, return_exceptions=True)
    assert isinstance(done[1], TransferFailedError) or len(done[1]) > 0
    await split.prompt.daemon.start()
    await split.prompt.until_able()
    assert (await split.run(prompt(33), greedy(MADE))).tokens == one_engine[33]
