"""A user's requests through `splitwise up` with the real model: same tokens and text as one engine."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import tokenizers

from splitwise.client import AsyncClient
from tests.vllm.harness import prompt, reference

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.models import ModelFolder

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
READY = re.compile(r"serving after [\d.]+ s at (\S+)")
PATIENCE_S = 240
TEXTS = [
    "The capital of France is",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag: describe these emoji 🙂",
    "请用中文写一句话,今天天气",
    "e\u0301a\u0300o\u0302 combining marks, नमस्ते दुनिया, and tabs\t\tend",
]
OUTPUT = 24
SHARED = Path("/dev/shm")


@pytest.fixture(scope="module")
def cluster(model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Yield the router's address and the pid of `up`."""
    log = tmp_path_factory.mktemp("up") / "log"
    shared = set(SHARED.iterdir())
    options = ["dtype=float32", "max_model_len=4224", "max_batch_tokens=512"]
    arguments = [word for option in options for word in ("--engine-option", option)]
    with log.open("wb") as file:
        up = subprocess.Popen(
            [sys.executable, "-m", "splitwise.cli.main", "up", "--model", str(model.path), *arguments],
            stdout=file,
            stderr=file,
            env={**os.environ, "XDG_RUNTIME_DIR": str(log.parent)},
        )
    try:
        end = time.monotonic() + PATIENCE_S
        while (found := READY.search(log.read_text())) is None:
            assert time.monotonic() < end, log.read_text()
            assert up.poll() is None, log.read_text()
            time.sleep(0.1)
        yield found[1], up.pid
        family = psutil.Process(up.pid).children(recursive=True)
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
        assert not psutil.wait_procs(family, timeout=10)[1], "processes outlived `up`"
        assert set(SHARED.iterdir()) <= shared, "shared memory outlived `up` or a killed machine"
    finally:
        up.kill()
        up.wait()


def greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": OUTPUT, "timeout": PATIENCE_S, **more}


async def test_same_tokens_alone_and_together(cluster: tuple[str, int], model: ModelFolder) -> None:
    ids = [prompt(length, seed=40) for length in (1, 16, 33, 500, 1500)]
    encode = tokenizers.Tokenizer.from_file(str(model.path / "tokenizer.json")).encode
    ids += [list(encode(text).ids) for text in TEXTS]
    wanted = await reference(
        model.path,
        [{"tokens": tokens, "sampling": {"max_tokens": OUTPUT}} for tokens in ids],
        dtype="float32",
        max_model_len=4224,
        block_size=32,
        kv_cache_memory_bytes=512 << 20,
    )
    async with AsyncClient(cluster[0]) as client:

        async def ask(tokens: list[int]) -> list[int]:
            answer = await client.generate(tokens, **greedy()).result()
            assert answer.transfer is not None
            assert answer.transfer.transport == "ucx"
            return list(answer.token_ids)

        assert [await ask(tokens) for tokens in ids] == wanted
        assert await asyncio.gather(*map(ask, ids)) == wanted


async def test_text_is_the_decoding_of_all_tokens(cluster: tuple[str, int], model: ModelFolder) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(model.path / "tokenizer.json"))
    async with AsyncClient(cluster[0]) as client:
        for text in TEXTS:
            stream = client.generate(text, **greedy())
            pieces = [piece async for piece in stream]
            answer = await stream.result()
            assert "".join(pieces) == answer.text == tokenizer.decode(list(answer.token_ids))


async def test_a_stop_string_over_the_hand_over(cluster: tuple[str, int]) -> None:
    async with AsyncClient(cluster[0]) as client:
        whole = await client.generate(TEXTS[0], **greedy()).result()
        first = await client.generate(TEXTS[0], **greedy(max_tokens=1)).result()
        at = len(first.text)
        stop = whole.text[at - 1 : at + 2]  # the end of the first token and the beginning of the second
        cut = whole.text.index(stop)
        stopped = await client.generate(TEXTS[0], **greedy(stop=[stop])).result()
        assert stopped.text == whole.text[:cut]
        assert stopped.finish_reason.name == "STOP"


async def test_a_killed_token_machine_is_not_seen(cluster: tuple[str, int]) -> None:
    async with AsyncClient(cluster[0]) as client:
        wanted = (await client.generate(TEXTS[0], **greedy(max_tokens=60)).result()).token_ids
        stream = client.generate(TEXTS[0], **greedy(max_tokens=60))
        pieces = stream.chunks()
        await anext(pieces)
        await anext(pieces)
        family = psutil.Process(cluster[1]).children(recursive=True)
        machine = next(p for p in family if "services.token" in p.cmdline())
        machine.kill()
        assert list((await stream.result()).token_ids) == list(wanted)
