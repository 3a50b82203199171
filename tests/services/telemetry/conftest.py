"""Clusters of real processes with all their telemetry on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest

from splitwise.launch.emulated_gpus import FILE_VARIABLE
from tests.services.gateway.live_cluster import ENVIRONMENT
from tests.services.power.agent import AgentProcess
from tests.services.router.cluster import RouterCluster
from tests.support.emulated_gpus import GpuNode
from tests.support.scraping import Scrape, scrape

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

NODES = {"a": ["1xH100:prompt"], "b": ["1xH100:token"]}


class MeasuredCluster(RouterCluster):
    """Two nodes, one machine each; every process serves its metrics on a port of its own."""

    async def start_power_agent(self, patch: pytest.MonkeyPatch) -> None:
        """Start the agent of a node of emulated GPUs, called ``node``."""
        gpus = GpuNode(self.folder)
        patch.setitem(ENVIRONMENT, FILE_VARIABLE, str(gpus.file))
        agent = AgentProcess(self.folder, gpus)
        await agent.start()
        await agent.channel.close()
        self._started.append(agent.process)

    def metric_addresses(self) -> dict[str, str]:
        """Return where each process serves its metrics, by its name in the logs."""
        found = {}
        for process in self._started:
            for line in process.lines:
                if line["event"] == "metrics.listening":
                    found[line["name"]] = line["address"]
        return found

    async def metrics(self, http: aiohttp.ClientSession, without: str = "") -> dict[str, Scrape]:
        """Scrape every process but one."""
        addresses = self.metric_addresses().items()
        return {name: await scrape(http, where) for name, where in addresses if name != without}


@pytest.fixture
async def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[MeasuredCluster]:
    """Not started yet, so that a test may add settings."""
    monkeypatch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__METRICS_LISTEN", "127.0.0.1:0")
    cluster = MeasuredCluster(tmp_path)
    try:
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session
