"""Make docs/images/dashboard.png: ``python tools/readme_picture.py``. Takes half a minute.

Starts a router, a KV daemon and eight emulated machines, puts more requests on them than the
prompt machines like, and takes the picture. Needs Chromium.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import aiohttp

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.services.gateway.live_cluster import LiveCluster  # noqa: E402 - after the path is set

PICTURE = ROOT / "docs" / "images" / "dashboard.png"
TARGETS = ("--slo.ttft_ms", "200", "--slo.second_ms", "50", "--slo.tbt_ms", "40")
RATE = 14  # requests per second
SEED = 1


async def load(address: str) -> None:
    """Send requests at random moments until cancelled."""
    numbers = random.Random(SEED)  # noqa: S311 - load, not secrets

    async def one(session: aiohttp.ClientSession) -> None:
        prompt = [numbers.randrange(256) for _ in range(numbers.randrange(50, 3000))]
        body = {"prompt": prompt, "max_tokens": numbers.randrange(20, 250), "stream": True}
        with suppress(aiohttp.ClientError, RuntimeError):  # the cluster ends before the last answers
            async with session.post("/v1/completions", json=body) as response:
                await response.read()

    async with aiohttp.ClientSession(address) as session, asyncio.TaskGroup() as group:
        while True:
            group.create_task(one(session))
            await asyncio.sleep(numbers.expovariate(RATE))


async def main() -> None:
    """Run the cluster and the load, and take the picture."""
    with tempfile.TemporaryDirectory() as folder:
        cluster = LiveCluster(Path(folder))
        try:
            await cluster.start_router(*TARGETS)
            await cluster.start_machines("4xH100:prompt", "4xH100:token", kv_blocks=2048)
            sending = asyncio.create_task(load(cluster.http))
            command = (str(ROOT / "tools" / "dashboard_screenshot.py"), cluster.http, str(PICTURE))
            taken = await asyncio.create_subprocess_exec(sys.executable, *command, "--pick", "--after", "22")
            if await taken.wait():
                raise SystemExit("no picture was taken")
            sending.cancel()
        finally:
            await cluster.stop()


if __name__ == "__main__":
    asyncio.run(main())
