"""Clients of the routers under test: the same requests over gRPC, over HTTP, and to a machine itself."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from splitwise.config import Address
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.common_pb2 import SamplingParams, TokenIds
from splitwise.rpc.v1.machine_pb2_grpc import PromptServiceStub
from splitwise.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse

if TYPE_CHECKING:
    from collections.abc import Awaitable

MODEL = "instant"
PROMPT = [7] * 16


class Client(Protocol):
    """One way to ask for tokens."""

    async def ask(self, tokens: int) -> int:
        """Run one request to its end; return the tokens that came."""

    async def close(self) -> None:
        """Give the connection back."""


class GrpcClient:
    """`Router.Generate`. Messages are read as bytes, so that the client costs little."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(Address.parse(address))
        self._generate: Any = self._channel.unary_stream("/splitwise.v1.Router/Generate")

    async def ask(self, tokens: int) -> int:
        """Run one request."""
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        request = GenerateRequest(model=MODEL, token_ids=TokenIds(ids=PROMPT), sampling=sampling)
        last = b""
        async for message in self._generate(request.SerializeToString()):
            last = message
        return GenerateResponse.FromString(last).finished.output_tokens

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close(None)


class HttpClient:
    """``POST /v1/completions`` with a stream, as OpenAI's client asks."""

    def __init__(self, address: str) -> None:
        self._url = f"http://{address}/v1/completions"
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    async def ask(self, tokens: int) -> int:
        """Run one request."""
        body = {"model": MODEL, "prompt": "x" * 16, "max_tokens": tokens, "stream": True, "temperature": 0}
        async with self._session.post(self._url, json=body) as response:
            text = await response.text()
        if response.status != 200:
            raise RuntimeError(f"{self._url}: {response.status}: {text[:300]}")
        events = [line[6:] for line in text.split("\n") if line.startswith("data: {")]
        return sum(len(choice["text"]) for one in events for choice in json.loads(one)["choices"])

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


class MachineClient:
    """A machine's own control stream: what a request costs without a router. One token per request."""

    def __init__(self, address: str) -> None:
        self._channel = open_channel(Address.parse(address))
        self._call: Any = PromptServiceStub(self._channel).Run()  # type: ignore[call-arg]
        self._count = 0

    async def ask(self, tokens: int) -> int:
        """Run one request; `tokens` must be 1."""
        if not self._count:
            await self._call.write(pb.PromptCommand(hello=pb.Hello(router_id="bench")))
            await self._call.read()
        self._count += 1
        work = pb.WorkRef(request_id=f"r{self._count}", attempt=1)
        start = pb.StartPrompt(work=work, token_ids=PROMPT, sampling=SamplingParams(max_tokens=tokens))
        await self._call.write(pb.PromptCommand(start=start))
        while True:
            for event in (await self._call.read()).events:
                if event.HasField("tokens"):
                    return len(event.tokens.ids)

    async def close(self) -> None:
        """Close the channel."""
        self._call.cancel()
        await self._channel.close(None)


async def latencies(client: Client, count: int) -> list[float]:
    """Ask for one token `count` times, one after the other; return seconds."""
    times = []
    for _ in range(count):
        began = time.perf_counter()
        await client.ask(1)
        times.append(time.perf_counter() - began)
    return times


async def throughput(client: Client, *, streams: int, requests: int, tokens: int) -> float:
    """Run `requests` requests, `streams` at a time; return the seconds that it took."""
    left = iter(range(requests))

    async def stream() -> None:
        for _ in left:
            came = await client.ask(tokens)
            if came != tokens:
                raise RuntimeError(f"{came} of {tokens} tokens came")

    began = time.perf_counter()
    workers: list[Awaitable[None]] = [stream() for _ in range(streams)]
    await asyncio.gather(*workers)
    return time.perf_counter() - began
