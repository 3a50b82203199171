"""What killed processes left in /dev/shm: segments that no living process has mapped or open."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SHARED = Path("/dev/shm")
PATIENCE_S = 30


def orphans() -> set[str]:
    """Return the names of all segments that nobody uses; other programs' segments are in use."""
    there = {entry.name for entry in SHARED.iterdir()}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            for line in (process / "maps").read_text().splitlines():
                there.discard(line.partition(f"{SHARED}/")[2])
        with suppress(OSError):
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    there.discard(link.readlink().name)
    return there


@asynccontextmanager
async def nothing_left() -> AsyncIterator[None]:
    """Wait at the end until there are no more orphans than at the beginning."""
    before = orphans()
    yield
    await until_only(before)


async def until_only(known: set[str]) -> None:
    """Wait until there are no orphans but the `known` ones."""
    async with asyncio.timeout(PATIENCE_S):
        while orphans() - known:  # noqa: ASYNC110 - nobody tells of another process's end
            await asyncio.sleep(0.2)
