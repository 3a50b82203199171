"""The asyncio client against a real server."""

from __future__ import annotations

import asyncio

import pytest

from splitwise import errors
from splitwise.client import AsyncClient
from tests.support.scripted_router import ServerThread, eventually


@pytest.fixture
async def client(server: ServerThread):
    async with AsyncClient(server.address) as client:
        yield client


async def idle(server: ServerThread) -> bool:
    return await asyncio.to_thread(eventually, lambda: server.router.running == 0)


async def test_iterating_gives_the_text_and_result_the_whole(client: AsyncClient):
    stream = client.generate("one two three")
    assert [piece async for piece in stream] == ["one ", "two ", "three "]
    assert (await stream.result()).text == "one two three "


async def test_many_at_once(client: AsyncClient):
    results = await asyncio.gather(*(client.generate(f"word{n} end").result() for n in range(50)))
    assert [result.text for result in results] == [f"word{n} end " for n in range(50)]


async def test_leaving_the_loop_cancels(client: AsyncClient, server: ServerThread):
    async for _piece in client.generate("endless"):
        break
    assert await idle(server)


async def test_leaving_the_block_cancels(client: AsyncClient, server: ServerThread):
    async with client.generate("endless") as stream:
        await anext(stream.chunks())
    assert await idle(server)


async def test_cancelling_the_task_cancels_the_request(client: AsyncClient, server: ServerThread):
    task = asyncio.ensure_future(client.generate("silent").result())
    assert await asyncio.to_thread(eventually, lambda: server.router.running == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await idle(server)


async def test_cancel_by_another_task_is_our_error(client: AsyncClient, server: ServerThread):
    stream = client.generate("silent")
    task = asyncio.ensure_future(stream.result())
    assert await asyncio.to_thread(eventually, lambda: server.router.running == 1)
    stream.cancel()
    with pytest.raises(errors.CancelledError):
        await task
    assert await idle(server)


async def test_a_deadline_ends_the_call(client: AsyncClient, server: ServerThread):
    with pytest.raises(errors.DeadlineError):
        await client.generate("silent", timeout=0.3).result()
    assert await idle(server)


async def test_it_retries_before_the_first_message(client: AsyncClient, server: ServerThread):
    assert (await client.generate("fail unavailable 2").result()).output_tokens == 3
    assert len(server.router.requests) == 3


async def test_it_never_retries_after_the_first_message(client: AsyncClient, server: ServerThread):
    stream = client.generate("break unavailable")
    with pytest.raises(errors.UnavailableError, match="scripted break"):
        await stream.result()
    assert len(server.router.requests) == 1


async def test_waiting_for_a_retry_can_be_cancelled(client: AsyncClient, server: ServerThread):
    server.router.retry_after = 3600
    stream = client.generate("fail overloaded 1")
    task = asyncio.ensure_future(stream.result())
    assert await asyncio.to_thread(eventually, lambda: len(server.router.requests) == 1)
    await asyncio.sleep(0.2)
    stream.cancel()
    with pytest.raises(errors.CancelledError):
        await asyncio.wait_for(task, 20)
    assert len(server.router.requests) == 1


async def test_operators_calls(client: AsyncClient, server: ServerThread):
    server.router.describe_failures = 1
    assert (await client.cluster()).policy == "jsq"
    assert (await client.models())[0].max_model_len == 64
    assert (await client.explain("r1"))[0].reason == "jsq:prompt-pool"
    assert await client.drain("p0") == "draining"


async def test_chat(client: AsyncClient, server: ServerThread):
    await client.chat([{"role": "user", "content": "hi"}]).result()
    assert server.router.requests[0].chat.messages[0].content == "hi"
