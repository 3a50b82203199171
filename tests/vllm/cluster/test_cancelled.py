"""200 requests of which a third is left at random moments: afterwards nothing is held by anyone."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from splitwise.client import AsyncClient
from splitwise.errors import DeadlineError
from tests.vllm.cluster.up import PATIENCE_S
from tests.vllm.harness import prompt
from tests.vllm.shared_memory import orphans

if TYPE_CHECKING:
    from tests.vllm.cluster.up import Up
    from tests.vllm.reference import PlainEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]
REQUESTS = 200
AT_A_TIME = 24
LONGEST_ANSWER = 20
LENGTHS = (1, 12, 31, 32, 33, 64, 90, 120, 600)


class Load:
    """Requests with random sizes; those that are left go at a token, at a time, or at a deadline."""

    def __init__(self, up: Up, client: AsyncClient, answers: dict[int, list[int]]) -> None:
        self._up = up
        self._client = client
        self._answers = answers
        self._random = random.Random(20)
        self._slots = asyncio.Semaphore(AT_A_TIME)
        self.ends: Counter[str] = Counter()

    async def run(self) -> None:
        kinds = [self._whole] * (REQUESTS - REQUESTS // 3)
        leaving = [self._left_at_a_token, self._left_at_a_time, self._past_its_deadline, self._left_over_http]
        kinds += [leaving[number % len(leaving)] for number in range(REQUESTS // 3)]
        self._random.shuffle(kinds)
        async with asyncio.TaskGroup() as group:
            for kind in kinds:
                length, count = self._random.choice(LENGTHS), self._random.randint(1, LONGEST_ANSWER)
                group.create_task(self._one(kind, length, count, self._random.random()))

    async def _one(self, kind: Any, length: int, count: int, moment: float) -> None:
        async with self._slots:
            self.ends[await kind(length, count, moment)] += 1

    def _stream(self, length: int, count: int, timeout: float = PATIENCE_S) -> Any:
        tokens = prompt(length, seed=length)
        return self._client.generate(
            tokens, temperature=0.0, ignore_eos=True, max_tokens=count, timeout=timeout
        )

    async def _whole(self, length: int, count: int, _moment: float) -> str:
        answer = await self._stream(length, count).result()
        assert list(answer.token_ids) == self._answers[length][:count]
        return "whole"

    async def _left_at_a_token(self, length: int, count: int, moment: float) -> str:
        ids: list[int] = []
        async with self._stream(length, count + 1) as stream:
            async for chunk in stream.chunks():
                ids += chunk.token_ids
                if len(ids) > moment * count:
                    break
        assert ids == self._answers[length][: len(ids)]
        return "left"

    async def _left_at_a_time(self, length: int, _count: int, moment: float) -> str:
        """Between the call and some way into the answer; most of the time before the first token."""
        async with self._stream(length, LONGEST_ANSWER + 1):
            await asyncio.sleep(moment)
        return "left"

    async def _past_its_deadline(self, length: int, _count: int, moment: float) -> str:
        with pytest.raises(DeadlineError):
            await self._stream(length, 2000, timeout=0.05 + moment).result()
        return "deadline"

    async def _left_over_http(self, length: int, count: int, moment: float) -> str:
        """A browser tab that is closed: the connection ends in the middle of the stream."""
        body = {"prompt": prompt(length, seed=length), "max_tokens": count, "temperature": 0, "stream": True}
        async with aiohttp.ClientSession() as session:
            call = session.post(f"http://{self._up.http}/v1/completions", json=body | {"ignore_eos": True})
            try:
                async with asyncio.timeout(0.05 + 2 * moment), call as answer:
                    async for _ in answer.content:
                        pass
            except TimeoutError:
                return "left"
        return "whole"


async def status(up: Up) -> Any:
    """Return what `splitwise status --json` prints."""
    command = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "splitwise.cli.main", "status", "--json"),
        stdout=asyncio.subprocess.PIPE,
        env=up.environment,
    )
    output, _ = await command.communicate()
    assert command.returncode == 0
    return json.loads(output)


async def test_nothing_is_held_after_two_hundred_requests(up: Up, plain: PlainEngine) -> None:
    answers = {
        length: await plain.answer(prompt(length, seed=length), max_tokens=LONGEST_ANSWER + 1)
        for length in LENGTHS
    }
    await up.until_serving()
    shared, before = orphans(), (await status(up))["counters"]
    async with AsyncClient(up.router) as client:
        load = Load(up, client, answers)
        await load.run()
        await up.until_free()
        assert [model.serving for model in await client.models()] == [True]
    seen = await status(up)
    assert (seen["running"], seen["queued"]) == (0, 0)
    assert [machine["kv_blocks_used"] for machine in seen["machines"]] == [0, 0]
    ended = {name: count - before[name] for name, count in seen["counters"].items()}
    assert ended["rejected"] == 0
    assert ended["failed"] <= load.ends["deadline"], "the router counts a deadline that it saw first"
    # Some are left so early that the router never hears of them.
    assert REQUESTS - REQUESTS // 3 <= load.ends["whole"] <= ended["finished"]
    assert ended["finished"] + ended["cancelled"] + ended["failed"] == ended["received"] <= REQUESTS
    assert ended["cancelled"] + ended["failed"] > REQUESTS // 10
    assert orphans() <= shared
