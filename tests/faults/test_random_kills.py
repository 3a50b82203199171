"""Twelve machines under load, killed and stopped at random, daemons too: every text is compared.

Which process is hit when is drawn from a seed; a failure prints what was done until then. In
the end nothing is held anywhere, and the router's event log replays to the same decisions.
"""

from __future__ import annotations

import asyncio
import random
import signal
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from splitwise.scheduling.eventlog import replay
from tests.services.router.cluster import PROMPT, RouterCluster, expected, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
NODES = {node: ["2xH100:prompt", "1xH100:token"] for node in "abcd"}
MACHINES = 12
FAULTS, STREAMS = 30, 16
SEED = 20


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    folder = tmp_path_factory.mktemp("kills")
    cluster = RouterCluster(folder)
    try:
        log = ["--event-log", str(folder / "events.jsonl")]
        await cluster.start_router("--restart-limit", "30", *log)
        await cluster.start_nodes(NODES)
        yield cluster
    finally:
        await cluster.stop()


class Campaign:
    """The load and the faults; `done` tells what happened."""

    def __init__(self, cluster: RouterCluster) -> None:
        self.cluster = cluster
        self.draw = random.Random(SEED)
        self.done: list[str] = []
        self.over = False
        self.answered = self.restarted = 0

    async def load(self, number: int) -> None:
        """One client: a request after the other, each compared with what one engine says."""
        draw = random.Random(1000 * SEED + number)
        while not self.over:
            length, count = draw.randrange(1, 600), draw.randrange(1, 400)
            answer = await self.cluster.ask(request(PROMPT[:length], max_tokens=count))
            assert answer.error is None, (answer.error, self.done)
            assert answer.ids == expected(count, PROMPT[:length]), self.done
            self.answered += 1
            self.restarted += answer.finished.restarts > 0

    async def fault(self) -> None:
        """Hit one process, and wait until all machines serve again."""
        kind = self.draw.choice(["kill", "kill", "stop", "daemon"])
        node = self.draw.choice(sorted(NODES))
        home = self.draw.choice(["prompt", "token"])
        machine = self.draw.choice([name for name in self.cluster.machines if name.startswith(home)])
        self.done.append(f"{kind} {node if kind == 'daemon' else machine}")
        before = await self.cluster.describe()
        if kind == "daemon":
            daemon = self.cluster.kvds[node].process
            daemon.kill()
            await daemon.wait()
            await self.cluster.start_daemon(node)
        elif kind == "kill":
            await self.cluster.signal_machine(machine, signal.SIGKILL)
            old = incarnation(before, machine)
            await self.cluster.until_cluster(lambda now: incarnation(now, machine) > old)
        else:
            await self.cluster.signal_machine(machine, signal.SIGSTOP)
            await self.cluster.until_cluster(lambda now: incarnation(now, machine) == 0)
            await self.cluster.signal_machine(machine, signal.SIGCONT)
        await self.cluster.until_cluster(
            lambda now: sum(m.state in ("serving", "borrowed") for m in now.machines) == MACHINES
        )


def incarnation(state: object, machine: str) -> int:
    """A machine's incarnation; 0 while the router does not know it."""
    found = [m.description.identity for m in state.machines]  # type: ignore[attr-defined]
    return next((int(one.incarnation) for one in found if one.machine_id == machine), 0)


async def test_no_text_changes_whatever_is_killed(cluster: RouterCluster) -> None:
    campaign = Campaign(cluster)
    clients = [asyncio.create_task(campaign.load(number)) for number in range(STREAMS)]
    try:
        for _ in range(FAULTS):
            await campaign.fault()
            broken = [task.exception() for task in clients if task.done()]
            assert not broken, (broken, campaign.done)
    finally:
        campaign.over = True
        ended = await asyncio.gather(*clients, return_exceptions=True)
    assert ended == [None] * STREAMS, campaign.done
    print(f"{campaign.answered} answers, {campaign.restarted} of them restarted: {campaign.done}")
    assert campaign.restarted > 0
    counters = (await cluster.until_free()).counters
    assert (counters.finished, counters.failed) == (campaign.answered, 0)
    assert await cluster.router.stop() == 0
    lines = (cluster.folder / "events.jsonl").read_text().splitlines()
    assert replay(lines) == len(lines) - 1 > campaign.answered
