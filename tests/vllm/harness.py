"""Two real engines, each with the real daemon of its node, driven through the engine interface."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.engine.interface import PromptWork, TokenOutput, TokenWork, Transfer, WorkKey
from services.engine.vllm import VllmEngine, VllmSettings
from splitwise.requests import derive_seed
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, SamplingParams
from tests.services.emulated.cluster import Daemon

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

PATIENCE = 120.0  # seconds; a loaded machine is slow, not wrong


def prompt(length: int, seed: int = 1) -> list[int]:
    """Return token ids that are no text; equal prefixes for equal seeds."""
    return [(seed * 7919 + at * 31 + (at * at) % 97) % 40_000 + 100 for at in range(length)]


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **more})


@dataclass
class Outcome:
    """What one split request gave."""

    first: TokenOutput
    later: list[TokenOutput] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return self.first.token_ids + [token for output in self.later for token in output.token_ids]

    @property
    def logprobs(self) -> list[dict[int, float]]:
        return self.first.logprobs + [row for output in self.later for row in output.logprobs]


class Node:
    """A daemon with one engine."""

    def __init__(self, folder: Path, name: str, settings: VllmSettings) -> None:
        self.name = name
        self.daemon = Daemon(folder, name)
        self.settings = settings
        self.engine = VllmEngine(settings, name, self.daemon.socket)

    async def start(self) -> None:
        await self.daemon.start()
        self.description = await self.engine.start()

    async def stop(self) -> None:
        await self.engine.close()
        await self.daemon.kill()

    async def until_empty(self) -> None:
        """Wait until no KV block is held; times out when some never come back."""
        async with asyncio.timeout(PATIENCE):
            while self.engine.load().kv_blocks_used:  # noqa: ASYNC110 - the figures are in shared memory
                await asyncio.sleep(0.02)

    async def forget_prefixes(self) -> None:
        await self.until_empty()
        llm = self.engine._llm
        assert llm is not None
        assert await llm.reset_prefix_cache(), "blocks are still held"

    async def until_able(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.engine.failure() is not None:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


class Split:
    """Prompt phase on one node, token phase on another (or the same)."""

    def __init__(self, prompt_node: Node, token_node: Node) -> None:
        self.prompt = prompt_node
        self.token = token_node
        self._requests = 0

    def works(
        self,
        tokens: list[int],
        sampling: SamplingParams,
        mode: int = TRANSFER_MODE_LAYERWISE,
        lease_ms: int = 60_000,
    ) -> tuple[PromptWork, TokenWork]:
        """Return both phases of a new request."""
        self._requests += 1
        key = WorkKey(f"r{self._requests}", 1)
        transfer = Transfer(secrets.token_bytes(16), 1)
        later = SamplingParams()
        later.CopyFrom(sampling)
        if later.HasField("seed"):
            later.seed = derive_seed(sampling.seed, 1)
        return (
            PromptWork(key, tokens, sampling, transfer, mode, lease_ms),  # type: ignore[arg-type]
            TokenWork(
                key,
                tokens,
                later,
                transfer,
                self.prompt.daemon.address,
                self.prompt.description.engine_id,
                lease_ms,
            ),
        )

    async def run(
        self, tokens: list[int], sampling: SamplingParams, mode: int = TRANSFER_MODE_LAYERWISE
    ) -> Outcome:
        """Run one request through both phases to its end."""
        prompt_work, token_work = self.works(tokens, sampling, mode)
        async with asyncio.timeout(PATIENCE):
            first, later = await asyncio.gather(
                collect(self.prompt.engine.run_prompt(prompt_work)),
                collect(self.token.engine.run_token(token_work)),
            )
        assert len(first) == 1
        return Outcome(first[0], later)

    async def until_empty(self) -> None:
        await asyncio.gather(self.prompt.until_empty(), self.token.until_empty())

    async def forget_prefixes(self) -> None:
        """Empty both sides' prefix caches, so that the next prompt is computed whatever came before."""
        for node in {self.prompt.name: self.prompt, self.token.name: self.token}.values():
            await node.forget_prefixes()


async def collect(outputs: AsyncIterator[TokenOutput]) -> list[TokenOutput]:
    return [output async for output in outputs]


async def take(outputs: AsyncIterator[TokenOutput], count: int) -> list[TokenOutput]:
    """Take `count` outputs, then leave, as a cancelled request does."""
    taken: list[TokenOutput] = []
    async with aclosing(outputs) as stream:  # type: ignore[type-var]
        if count:
            async for output in stream:
                taken.append(output)
                if len(taken) == count:
                    break
    return taken
