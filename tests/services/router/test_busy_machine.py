"""A machine whose Python stands still for a while is busy, not dead: it is not taken for lost."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import pytest

from tests.services.router.cluster import request
from tests.services.router.instant import instant_cluster
from tests.support.instant_machine import STALL_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(120)


async def test_a_stall_of_several_ping_timeouts_loses_nothing(tmp_path: Path) -> None:
    """Load reports stop for so long, too; pings are answered by threads that need no Python."""
    async with instant_cluster(tmp_path, ["--pace", "0.01"]) as cluster:
        asked = request([7] * 16, model="instant", max_tokens=200)
        answer = asyncio.create_task(cluster.ask(asked))
        await cluster.until_cluster(lambda state: state.running)
        stalled = cluster.processes["token"]
        stalled.send_signal(signal.SIGUSR1)
        assert stalled.stdout is not None
        assert (await stalled.stdout.readline()).decode().strip() == f"stalled for {STALL_S} s"
        finished = (await answer).finished
        assert (finished.output_tokens, finished.restarts) == (200, 0)
        assert {line["event"] for line in cluster.router.lines}.isdisjoint({"machine.lost"})
