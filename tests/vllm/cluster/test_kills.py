"""kill -9 of each process of a running cluster in turn, while the real model streams.

A client sees the plain engine's tokens, or their beginning and an error of a type that says
what to do; never another token. What died is started again, and nothing stays held.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from splitwise.client import AsyncClient
from splitwise.errors import RemoteError, UnavailableError
from tests.vllm.cluster.up import PATIENCE_S
from tests.vllm.harness import prompt

if TYPE_CHECKING:
    from tests.vllm.cluster.up import Up
    from tests.vllm.reference import PlainEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]
VICTIMS = ("kvd-token", "kvd-prompt", "token", "prompt", "token-core", "prompt-core", "router")
LENGTHS = (20, 33, 700, 64)
LONG = 1500  # takes seconds to compute: each test has another one, which no prefix cache knows
MADE = 40
BEFORE_THE_KILL = 4


@dataclass
class Seen:
    """What a client saw of one stream."""

    ids: list[int] = field(default_factory=list)
    restarts: int = 0
    error: RemoteError | None = None


async def follow(client: AsyncClient, tokens: list[int], begun: asyncio.Event) -> Seen:
    """Read one stream to its end; its fourth token sets `begun`."""
    seen = Seen()
    stream = client.generate(tokens, temperature=0.0, ignore_eos=True, max_tokens=MADE, timeout=PATIENCE_S)
    try:
        async for chunk in stream.chunks():
            seen.ids += chunk.token_ids
            if len(seen.ids) >= BEFORE_THE_KILL:
                begun.set()
        seen.restarts = (await stream.result()).restarts
    except RemoteError as error:
        seen.error = error
    return seen


@pytest.mark.parametrize("victim", VICTIMS)
async def test_a_killed_process_costs_no_token(up: Up, plain: PlainEngine, victim: str) -> None:
    """At the kill some streams are in the token phase, and a long prompt is being computed."""
    prompts = [prompt(length, seed=60 + length) for length in LENGTHS]
    prompts.append(prompt(LONG, seed=3000 + VICTIMS.index(victim)))
    wanted = await plain.answers(prompts, max_tokens=MADE)
    await up.until_serving()
    async with AsyncClient(up.router) as client:
        begun = asyncio.Event()
        streams = [asyncio.create_task(follow(client, tokens, begun)) for tokens in prompts[:-1]]
        await asyncio.wait_for(begun.wait(), PATIENCE_S)
        streams.append(asyncio.create_task(follow(client, prompts[-1], begun)))
        await up.until_computing()
        process = up.find(victim)
        assert process is not None
        process.kill()
        seen = await asyncio.gather(*streams)
        for one, tokens in zip(seen, wanted, strict=True):
            if victim == "router":  # the stream itself is cut
                assert isinstance(one.error, UnavailableError)
                assert one.ids == tokens[: len(one.ids)]
            else:
                assert one.error is None
                assert one.ids == tokens
        if victim != "router":
            assert any(one.restarts for one in seen)
        await up.until_serving()
        assert up.find(victim) not in (None, process)
        await up.until_free()
        again = await asyncio.gather(*(follow(client, tokens, asyncio.Event()) for tokens in prompts))
        assert [(one.ids, one.error) for one in again] == [(tokens, None) for tokens in wanted]
        await up.until_free()
