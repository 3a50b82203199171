"""A router with machines that have no engine (`tests.support.instant_machine`)."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from tests.services.router.cluster import RouterCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path


class InstantCluster(RouterCluster):
    """`processes`: the machines, by their home, which is their name as well."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.processes: dict[str, asyncio.subprocess.Process] = {}


@asynccontextmanager
async def instant_cluster(
    folder: Path, machine: Sequence[str], *settings: str
) -> AsyncIterator[InstantCluster]:
    """A router with a prompt machine and a token machine that cost nothing; `machine`: their options."""
    pipe = asyncio.subprocess.PIPE
    addresses = []
    found = InstantCluster(folder)
    try:
        for home in ("prompt", "token"):
            command = ["-m", "tests.support.instant_machine", "--name", home, "--home", home, *machine]
            process = await asyncio.create_subprocess_exec(sys.executable, *command, stdin=pipe, stdout=pipe)
            found.processes[home] = process
            assert process.stdout is not None
            addresses.append((await process.stdout.readline()).decode().strip())
        await found.start_router("--machines", json.dumps(addresses), *settings)
        await found.until_serving(2)
        yield found
    finally:
        await found.stop()
        for process in found.processes.values():
            process.kill()
            await process.wait()
