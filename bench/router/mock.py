"""An OpenAI server without a model, as instant as it gets: what HTTP routers route to.

    python -m bench.router.mock

Answers ``/v1/completions`` with one event per token, of the size and fields that vLLM sends.
One line on stdout names the address.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from aiohttp import web

MODEL = "instant"


def event(text: str, finish: str | None) -> bytes:
    """Return one streamed event as vLLM writes it."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish, "stop_reason": None}
    body = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion", "created": 1700000000}
    return (
        b"data: "
        + json.dumps({**body, "model": MODEL, "choices": [choice], "usage": None}).encode()
        + b"\n\n"
    )


LATER, LAST, DONE = event("b", None), event("b", "length"), b"data: [DONE]\n\n"


async def completions(request: web.Request) -> web.StreamResponse:
    """Stream ``max_tokens`` tokens, giving way after each as an engine's iterations do."""
    asked: dict[str, Any] = await request.json()
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    for _ in range(asked["max_tokens"] - 1):
        await response.write(LATER)
        await asyncio.sleep(0)
    await response.write(LAST + DONE)
    await response.write_eof()
    return response


async def models(_request: web.Request) -> web.Response:
    """Name the model."""
    return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model"}]})


async def health(_request: web.Request) -> web.Response:
    """Be there."""
    return web.Response()


async def main() -> None:
    """Serve until stdin ends."""
    app = web.Application()
    app.add_routes(
        [
            web.post("/v1/completions", completions),
            web.get("/v1/models", models),
            web.get("/health", health),
        ]
    )
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(f"127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
