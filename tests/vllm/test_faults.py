"""Whatever breaks, no wrong token comes and every block goes back."""

from __future__ import annotations

import asyncio
import secrets
import signal
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from services.engine.interface import TransferFailedError
from tests.vllm.harness import PATIENCE, Node, Split, collect, greedy, prompt, take

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from services.engine.interface import TokenOutput

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

NEVER_MS = 3_600_000  # a lease that no test outlives
MOMENTS = (0.002, 0.02, 0.1, 0.5, 1.5)  # seconds: queued, in the first pass, between chunks, token phase


async def leave_after(outputs: AsyncIterator[TokenOutput], seconds: float) -> list[TokenOutput]:
    """Consume until a cancellation after `seconds`."""
    task = asyncio.create_task(collect(outputs))
    await asyncio.sleep(seconds)
    task.cancel()
    with suppress(asyncio.CancelledError, TransferFailedError):
        return await task
    return []


async def still_right(split: Split) -> None:
    """Another request, over blocks that were just given back, is answered right."""
    tokens = prompt(300, seed=secrets.randbelow(1000) + 50)
    both = await split.run(tokens, greedy(4))
    alone = await Split(split.token, split.token).run(tokens, greedy(4))
    assert both.tokens == alone.tokens


@pytest.mark.parametrize("seconds", MOMENTS)
async def test_token_side_leaves(split: Split, seconds: float) -> None:
    """The prompt side holds nothing after that, although nobody told it."""
    prompt_work, token_work = split.works(prompt(1500, seed=int(100 + seconds * 100)), greedy(200))
    first, _ = await asyncio.gather(
        collect(split.prompt.engine.run_prompt(prompt_work)),
        leave_after(split.token.engine.run_token(token_work), seconds),
    )
    assert len(first) == 1
    await split.until_empty()
    await still_right(split)


@pytest.mark.parametrize("seconds", MOMENTS[:4])
async def test_prompt_side_leaves(split: Split, seconds: float) -> None:
    prompt_work, token_work = split.works(prompt(1500, seed=int(300 + seconds * 100)), greedy(20))
    token_task = asyncio.create_task(collect(split.token.engine.run_token(token_work)))
    await leave_after(split.prompt.engine.run_prompt(prompt_work), seconds)
    with pytest.raises(TransferFailedError):
        await asyncio.wait_for(token_task, 60)
    await split.until_empty()
    await still_right(split)


async def test_both_leave_in_the_same_moment(split: Split) -> None:
    for seconds in MOMENTS[:4]:
        prompt_work, token_work = split.works(prompt(900, seed=int(500 + seconds * 100)), greedy(50))
        await asyncio.gather(
            leave_after(split.prompt.engine.run_prompt(prompt_work), seconds),
            leave_after(split.token.engine.run_token(token_work), seconds),
        )
    await split.until_empty()
    await still_right(split)


async def test_held_blocks_are_given_up_when_the_iterator_is_closed(split: Split) -> None:
    """First token out, token side never comes: leaving the iterator frees the blocks at once."""
    prompt_work, _ = split.works(prompt(200, seed=9), greedy(5))
    assert len(await take(split.prompt.engine.run_prompt(prompt_work), 1)) == 1
    await split.until_empty()


async def test_token_side_never_comes(split: Split) -> None:
    """The lease ends what nobody fetches."""
    prompt_work, _ = split.works(prompt(200, seed=10), greedy(5), lease_ms=500)
    assert len(await collect(split.prompt.engine.run_prompt(prompt_work))) == 1
    await split.until_empty()


async def test_prompt_side_never_comes(split: Split) -> None:
    _, token_work = split.works(prompt(200, seed=11), greedy(5), lease_ms=500)
    with pytest.raises(TransferFailedError):
        await collect(split.token.engine.run_token(token_work))
    await split.until_empty()


async def test_source_that_does_not_exist(split: Split) -> None:
    _, token_work = split.works(prompt(200, seed=12), greedy(5), lease_ms=5000)
    with pytest.raises(TransferFailedError):
        await collect(split.token.engine.run_token(replace(token_work, source_kvd_address="127.0.0.1:1")))
    await split.until_empty()


async def test_a_transfer_is_never_used_twice(split: Split) -> None:
    prompt_work, token_work = split.works(prompt(64), greedy(3))
    await asyncio.gather(
        collect(split.prompt.engine.run_prompt(prompt_work)),
        collect(split.token.engine.run_token(token_work)),
    )
    with pytest.raises(TransferFailedError):
        await collect(split.token.engine.run_token(token_work))


@pytest.mark.parametrize("seconds", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("side", ["prompt", "token"])
async def test_a_daemon_is_killed(split: Split, side: str, seconds: float) -> None:
    """Open transfers fail at once, long before their lease, and the next daemon serves its first transfer."""
    node: Node = getattr(split, side)
    tokens = prompt(1500, seed=1300 + int(10 * seconds) + len(side))
    prompt_work, token_work = split.works(tokens, greedy(20), lease_ms=NEVER_MS)
    first = asyncio.create_task(collect(split.prompt.engine.run_prompt(prompt_work)))
    later = asyncio.create_task(collect(split.token.engine.run_token(token_work)))
    await asyncio.sleep(seconds)
    await node.daemon.kill(signal.SIGKILL)
    with pytest.raises(TransferFailedError):
        await asyncio.wait_for(later, PATIENCE)
    first.cancel()  # as the router does: a daemon that died before its grant will never send one
    with suppress(asyncio.CancelledError):
        await first
    await split.until_empty()
    await node.daemon.start()
    await node.until_able()
    await still_right(split)
