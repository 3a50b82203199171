"""A real Prometheus: its tools, and a server that scrapes what a test starts."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from tests.services.router.cluster import free_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy" / "observability" / "prometheus"
UNPACKED = ROOT / ".venv" / "opt" / "prometheus" / "usr" / "bin"
PATIENCE = 120.0


def find(tool: str) -> str | None:
    """Return the path of ``prometheus`` or ``promtool``."""
    return shutil.which(tool) or shutil.which(tool, path=str(UNPACKED))


needs_prometheus = pytest.mark.skipif(
    find("prometheus") is None or find("promtool") is None,
    reason="no prometheus and promtool here; scripts/get_prometheus.sh unpacks Debian's",
)


class Prometheus:
    """A running server."""

    def __init__(self, http: aiohttp.ClientSession, address: str) -> None:
        self._http = http
        self._url = f"http://{address}/api/v1"

    async def get(self, path: str, **parameters: str) -> Any:
        """Ask its HTTP interface; returns `data`."""
        async with self._http.get(f"{self._url}/{path}", params=parameters) as answer:
            content = await answer.json()
            assert content["status"] == "success", (path, parameters, content)
            return content["data"]

    async def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Evaluate an expression now."""
        result = (await self.get("query", query=expression))["result"]
        return [(sample["metric"], float(sample["value"][1])) for sample in result]

    async def until(self, expression: str, seconds: float = PATIENCE) -> None:
        """Wait until an expression has a result."""
        end = time.monotonic() + seconds
        while not await self.query(expression):
            assert time.monotonic() < end, expression
            await asyncio.sleep(0.2)


@asynccontextmanager
async def scraping(folder: Path, targets: list[str]) -> AsyncIterator[Prometheus]:
    """Run a Prometheus with our configuration, which scrapes `targets` every second."""
    config = folder / "prometheus"
    shutil.copytree(CONFIG, config)
    (config / "targets" / "test.json").write_text(json.dumps([{"targets": targets}]))
    settings = (config / "prometheus.yml").read_text()
    assert settings.count("_interval: ") == 2
    settings = settings.replace("scrape_interval: 5s", "scrape_interval: 1s")
    (config / "prometheus.yml").write_text(settings.replace("interval: 15s", "interval: 1s"))
    address = free_address()
    program = find("prometheus")
    assert program is not None
    with (folder / "prometheus.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(program, f"--config.file={config / 'prometheus.yml'}", f"--web.listen-address={address}"),
            *(f"--storage.tsdb.path={folder / 'data'}", "--log.level=warn"),
            stdout=log,
            stderr=log,
        )
        try:
            async with aiohttp.ClientSession() as http:
                end = time.monotonic() + PATIENCE
                while True:
                    assert process.returncode is None, (folder / "prometheus.log").read_text()
                    assert time.monotonic() < end
                    try:
                        async with http.get(f"http://{address}/-/ready") as answer:
                            if answer.status == 200:
                                break
                    except aiohttp.ClientConnectionError:
                        pass
                    await asyncio.sleep(0.1)
                yield Prometheus(http, address)
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
