"""A headless Chromium, driven over its DevTools socket: open a page, evaluate, click, picture."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import shutil
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
START_S = 60.0


class Browser:
    """One page. `problems` collects what it wrote to the console as warning or error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session = ""
        self.problems: list[str] = []

    async def attach(self) -> None:
        """Open an empty page and listen to it."""
        target = (await self.send("Target.createTarget", url="about:blank"))["targetId"]
        attached = await self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            await self.send(f"{domain}.enable")

    async def listen(self) -> None:
        """Read answers and console messages until the socket closes."""
        async for message in self._socket:
            content = json.loads(message.data)
            if "id" in content:
                self._answers.pop(content["id"]).set_result(content)
            elif content.get("method") == "Log.entryAdded":
                entry = content["params"]["entry"]
                if entry["level"] in ("warning", "error"):
                    self.problems.append(f"{entry['text']} {entry.get('url', '')}")
            elif content.get("method") == "Runtime.exceptionThrown":
                details = content["params"]["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one DevTools command; returns its result."""
        number = next(self._numbers)
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        command = {"id": number, "method": method, "params": params}
        await self._socket.send_json(command | ({"sessionId": self._session} if self._session else {}))
        content = await asyncio.wait_for(answer, 60)
        if "error" in content:
            raise RuntimeError(f"{method}: {content['error']['message']}")
        result: dict[str, Any] = content["result"]
        return result

    async def open(self, url: str, *, width: int, height: int, dark: bool = False) -> None:
        """Load a page in a window of this size; `url` as the browser would write it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])
        await self.send("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def evaluate(self, expression: str) -> Any:
        """Return the JSON value of a JavaScript expression (or of the promise that it is)."""
        result = await self.send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    async def until(self, expression: str, seconds: float = 60) -> Any:
        """Wait until an expression is true; returns its value."""
        async with asyncio.timeout(seconds):
            while not (value := await self.evaluate(expression)):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        return value

    async def click(self, x: float, y: float) -> None:
        """Click with the mouse."""
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def screenshot(self, path: Path) -> None:
        """Write a PNG of the whole page."""
        shot = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))  # noqa: ASYNC240 - nothing else runs


@asynccontextmanager
async def start_browser(folder: Path) -> AsyncIterator[Browser]:
    """Start Chromium with its profile in `folder`; it is gone afterwards."""
    if CHROMIUM is None:
        raise RuntimeError("no Chromium is installed; on Debian: apt-get install chromium")
    arguments = [
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
    ]
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE
    )
    try:
        url = await asyncio.wait_for(_socket_url(process), START_S)
        async with aiohttp.ClientSession() as session, session.ws_connect(url, max_msg_size=0) as socket:
            browser = Browser(socket)
            listener = asyncio.create_task(browser.listen())
            await browser.attach()
            yield browser
            listener.cancel()
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _socket_url(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = ""
    async for line in process.stderr:
        seen += line.decode(errors="replace")
        if "DevTools listening on " in seen:
            return seen.rsplit("DevTools listening on ", 1)[1].strip()
    raise RuntimeError(f"Chromium ended before it listened:\n{seen}")
