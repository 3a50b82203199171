"""The dashboard over HTTP, and the page itself in a headless Chromium."""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import pytest

from services.router.dashboard import dashboard_routes
from services.router.gateway import GatewayOptions, serve_gateway
from splitwise.config import Address, SloSettings
from tests.services.gateway.scripted import ScriptedBackend
from tests.services.gateway.scripted_cluster import ScriptedCluster
from tests.support.browser import CHROMIUM, Browser, start_browser

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium; on Debian: apt-get install chromium"
)
ROOT = Path(__file__).resolve().parents[3]
SHOWN = "document.querySelectorAll('.machine').length"


# Where on the page the first green pixel of the timeline is.
FIRST_TOKEN_BAR = """(() => { const canvas = document.querySelector('#timeline');
  const pen = canvas.getContext('2d');
  const box = canvas.getBoundingClientRect();
  const data = pen.getImageData(140, 0, canvas.width - 140, canvas.height);
  for (let i = 0; i < data.data.length; i += 4) {
    const [r, g, b, a] = data.data.slice(i, i + 4);
    if (a > 200 && g > r + 60 && g > b) {
      const pixel = i / 4;
      return [box.x + 140 + pixel % data.width + 2, box.y + Math.floor(pixel / data.width) + 1];
    } }
  return null; })()"""


@asynccontextmanager
async def dashboard(cluster: ScriptedCluster, *keys: str) -> AsyncIterator[Address]:
    routes = dashboard_routes(cluster, lambda: SloSettings(ttft_ms=300, tbt_ms=40))
    options = GatewayOptions(api_keys=keys, drain_s=1)
    async with serve_gateway(ScriptedBackend(), Address("127.0.0.1", 0), options, routes) as gateway:
        yield gateway.address


async def test_state_and_requests_over_http() -> None:
    cluster = ScriptedCluster()
    cluster.fill(50, 30)
    async with dashboard(cluster) as address, aiohttp.ClientSession(f"http://{address}") as http:
        async with http.get("/dashboard/state") as response:
            state = await response.json()
        assert len(state["machines"]) == 4
        assert len(state["requests"]) == 52
        assert state["latency"][0]["count"] > 40
        async with http.get("/dashboard/requests/request-1") as response:
            assert (await response.json())["decisions"][0]["reason"] == "jsq:prompt-pool"
        async with http.get("/dashboard/requests/gone-1") as response:
            assert response.status == 404
            assert (await response.json())["error"]["code"] == "unknown_request"


async def test_the_page_is_open_and_what_it_shows_is_not() -> None:
    async with dashboard(ScriptedCluster(), "secret") as address, aiohttp.ClientSession() as http:
        for path in ("", "/page.css", "/page.js", "/timeline.js"):
            async with http.get(f"http://{address}/dashboard{path}") as response:
                assert response.status == 200
                assert "default-src 'none'" in response.headers["Content-Security-Policy"]
                assert "http://" not in (await response.text())  # nothing is fetched from elsewhere
        async with http.get(f"http://{address}/") as response:
            assert (response.status, str(response.url)) == (200, f"http://{address}/dashboard")
        for path in ("/state", "/requests/request-1"):
            async with http.get(f"http://{address}/dashboard{path}") as response:
                assert response.status == 401
            headers = {"Authorization": "Bearer secret"}
            async with http.get(f"http://{address}/dashboard{path}", headers=headers) as response:
                assert response.status == 200


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with start_browser(tmp_path / "profile") as browser:
        yield browser


def text_of(selector: str) -> str:
    return f"document.querySelector({selector!r}).innerText"


@needs_browser
async def test_forty_machines_are_shown_in_their_pools(browser: Browser) -> None:
    cluster = ScriptedCluster(25, 15)
    cluster.fill(400, 60)
    async with dashboard(cluster) as address:
        await browser.open(f"http://{address}/dashboard", width=1600, height=1000)
        await browser.until(f"{SHOWN} === 40")
        counts = await browser.evaluate(
            "[...document.querySelectorAll('.pool')].map(pool => pool.querySelectorAll('.machine').length)"
        )
        assert counts == [23, 3, 14]
        assert "from the prompt pool: prompt-queues-over-threshold" in await browser.evaluate(
            text_of('.pool[data-pool="mixed"]')
        )
        assert "40 machines" in await browser.evaluate(text_of("#cluster"))
        assert await browser.evaluate(text_of("#status")) == "live"
        heights = await browser.evaluate(
            "[...document.querySelectorAll('.pool')].map(pool => pool.getBoundingClientRect().height)"
        )
        assert heights[0] < 25 * 24  # twenty machines and more stand in columns
        assert "182" in await browser.evaluate(text_of("#figures"))  # of 200 kW may be drawn
        title = await browser.evaluate("document.querySelector('.machine .name').title")
        assert "GPUs draw" in title
        assert "(token-cap)" in title
        assert await browser.evaluate("document.querySelectorAll('#latency tbody tr').length") == 4
        assert await browser.evaluate("document.querySelector('#latency td.missed').innerText") != ""
        assert await browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
        drawing = "document.querySelector('canvas').height"
        await browser.until(f"{drawing} > 600")
    assert browser.problems == []


@needs_browser
async def test_a_click_on_a_request_says_why_it_ran_there(browser: Browser) -> None:
    cluster = ScriptedCluster(1, 1)
    cluster.fill(15, 15)
    async with dashboard(cluster) as address:
        await browser.open(f"http://{address}/dashboard", width=1400, height=900)
        await browser.until(SHOWN)
        await browser.evaluate("document.querySelector('#pause').click()")
        await browser.evaluate("document.querySelector('#timeline').scrollIntoView()")
        async with asyncio.timeout(60):
            while not await browser.evaluate("!!document.querySelector('#detail tr.chosen')"):
                x, y = await browser.until(FIRST_TOKEN_BAR)  # moves while the page takes its shape
                await browser.click(x, y)
                await asyncio.sleep(0.3)
        detail = await browser.evaluate(text_of("#detail"))
        assert "assign after 1.5 ms: jsq:prompt-pool" in detail
        assert "prompt-0" in detail
    assert [problem for problem in browser.problems if "readback" not in problem] == []  # our own reading


@needs_browser
async def test_arrow_keys_go_from_request_to_request(browser: Browser) -> None:
    cluster = ScriptedCluster(1, 1)
    cluster.fill(3, 3)
    press = "document.querySelector('#timeline').dispatchEvent(new KeyboardEvent('keydown', {{key: '{}'}}))"
    async with dashboard(cluster) as address:
        await browser.open(f"http://{address}/dashboard", width=1400, height=900)
        await browser.until(SHOWN)
        for key, expected in (
            ("ArrowLeft", 2),
            ("ArrowLeft", 1),
            ("ArrowLeft", 0),
            ("ArrowLeft", 0),
            ("ArrowRight", 1),
        ):
            await browser.evaluate(press.format(key))
            await browser.until(f"document.querySelector('#detail h3')?.innerText === 'request-{expected}'")
    assert browser.problems == []


@needs_browser
async def test_a_picture_is_taken_by_a_command(tmp_path: Path) -> None:
    cluster = ScriptedCluster(2, 2)
    cluster.fill(5, 5)
    async with dashboard(cluster, "secret") as address:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "tools/dashboard_screenshot.py",
                f"http://{address}",
                str(tmp_path / "page.png"),
            ),
            *("--pick", "--dark", "--key", "secret", "--after", "1"),
            cwd=ROOT,
        )
        assert await process.wait() == 0
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


@needs_browser
async def test_names_from_the_cluster_are_text_and_never_markup(browser: Browser) -> None:
    cluster = ScriptedCluster(1, 1)
    evil = "<img src=x onerror=alert(1)>"
    cluster.cluster().machines[0].pool_reason = evil
    cluster.cluster().machines[0].state = "draining"
    cluster.cluster().models[0].name = evil
    async with dashboard(cluster) as address:
        await browser.open(f"http://{address}/dashboard", width=1400, height=900)
        await browser.until(SHOWN)
        assert evil in await browser.evaluate(text_of("#pools"))
        assert evil in await browser.evaluate(text_of("#cluster"))
        assert await browser.evaluate("document.images.length") == 0
    assert browser.problems == []


@needs_browser
async def test_the_page_asks_for_the_key_and_uses_it(browser: Browser) -> None:
    async with dashboard(ScriptedCluster(), "secret") as address:
        await browser.open(f"http://{address}/dashboard", width=1400, height=900)
        await browser.until("!document.querySelector('#key-form').hidden")
        assert await browser.evaluate(SHOWN) == 0
        await browser.evaluate(
            "document.querySelector('#key').value = 'secret';"
            "document.querySelector('#key-form').requestSubmit()"
        )
        await browser.until(SHOWN)
        assert await browser.evaluate("document.querySelector('#key-form').hidden")


@needs_browser
async def test_a_silent_router_is_said_to_be_silent(browser: Browser) -> None:
    async with dashboard(ScriptedCluster()) as address:
        await browser.open(f"http://{address}/dashboard", width=1400, height=900)
        await browser.until(SHOWN)
    began = time.monotonic()
    await browser.until("document.querySelector('#status').dataset.status === 'lost'")
    assert time.monotonic() - began > 2
    assert await browser.evaluate("document.querySelector('#main').classList.contains('stale')")
