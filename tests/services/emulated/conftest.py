"""Pairs of emulated engines over real KV daemons."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.services.emulated.cluster import Daemon, EngineProcess, Pair

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    StartPair = Callable[..., Awaitable[Pair]]


@pytest.fixture
async def start_pair(tmp_path: Path) -> AsyncIterator[StartPair]:
    """Return a function that starts a pair; `nodes` 1: one daemon for both engines, 2: one each."""
    daemons: list[Daemon] = []
    engines: list[EngineProcess] = []

    async def start(nodes: int = 2, **options: Any) -> Pair:
        options.setdefault("time_scale", 0.0)
        daemons.extend(Daemon(tmp_path, f"node{index}") for index in range(nodes))
        await asyncio.gather(*(daemon.start() for daemon in daemons))
        engines.append(EngineProcess("p", daemons[0], options))
        engines.append(EngineProcess("t", daemons[-1], options))
        await asyncio.gather(*(engine.start() for engine in engines))
        return Pair(*engines)

    yield start
    await asyncio.gather(*(engine.stop() for engine in engines), return_exceptions=True)
    await asyncio.gather(*(daemon.kill() for daemon in daemons), return_exceptions=True)
