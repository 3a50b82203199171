"""Several prompts' answers as one stream of messages, in the order in which they come."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from services.router.gateway.refusals import from_error
from splitwise.errors import RemoteError, ServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from services.router.gateway.backend import PreparedRequest
    from services.router.gateway.refusals import ParamNames
    from splitwise.rpc.v1.router_pb2 import GenerateResponse

    Messages = AsyncGenerator[GenerateResponse, None]


async def run_all(
    prepared: Sequence[PreparedRequest], names: Sequence[ParamNames]
) -> AsyncGenerator[tuple[int, GenerateResponse], None]:
    """Start all requests and yield (which one, message) until each has `finished`.

    The first failure ends them all; it is raised as a `Refusal` with its own prompt's names.
    Closing the generator cancels what still runs.
    """
    if len(prepared) == 1:  # the common case, without a task for each message
        async with aclosing(prepared[0].run()) as only:
            while True:
                message = await _next(only, names[0])
                yield 0, message
                if message.HasField("finished"):
                    return
    streams = [one.run() for one in prepared]
    waiting: dict[asyncio.Task[GenerateResponse], int] = {}

    def ask(index: int) -> None:
        waiting[asyncio.create_task(_next(streams[index], names[index]))] = index

    try:
        for index in range(len(streams)):
            ask(index)
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                index, message = waiting.pop(task), task.result()
                yield index, message
                if not message.HasField("finished"):
                    ask(index)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(messages: Messages, names: ParamNames) -> GenerateResponse:
    try:
        message = await anext(messages, None)
    except RemoteError as error:
        raise from_error(error, names) from error
    if message is None:
        unfinished = ServerError("the answer ended before it was finished", code="INTERNAL")
        raise from_error(unfinished, names)
    return message
