"""A router with its gateway, one KV daemon and emulated machines, as real processes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import aiohttp

from splitwise.launch.emulate import FLEET, parse_groups, write_fleet

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 120.0  # seconds; a loaded host is slow, not wrong
ENVIRONMENT = {
    **os.environ,
    "NUMBA_DISABLE_JIT": "1",
    "OMP_NUM_THREADS": "1",
    "SPLITWISE_DIE_WITH_PARENT": str(os.getpid()),
}


class Process:
    """One process with JSON log lines; `ready` is the line that says so."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.lines: list[dict[str, Any]] = []
        self.process: asyncio.subprocess.Process
        self._reader: asyncio.Task[None]
        self._heard = asyncio.Event()

    async def start(self, *arguments: str) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, *arguments),
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            limit=1 << 20,
        )
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stderr is not None
        with self.log.open("ab") as log:
            while line := await self.process.stderr.readline():
                log.write(line)
                log.flush()
                if line.startswith(b"{"):
                    self.lines.append(json.loads(line))
                self._heard.set()
        self._heard.set()

    async def ready(self, name: str | None = None) -> dict[str, Any]:
        """Wait for ``service.ready`` (of `name`); returns the newest such line."""
        return (await self.said("service.ready", name=name))[-1]

    async def said(self, event: str, count: int = 1, *, name: str | None = None) -> list[dict[str, Any]]:
        """Wait for `count` lines of an event (of the process called `name`); returns all of them."""
        async with asyncio.timeout(PATIENCE):
            while True:
                lines = [
                    line for line in self.lines if line["event"] == event and name in (None, line.get("name"))
                ]
                if len(lines) >= count:
                    return lines
                if self._reader.done():
                    raise AssertionError(f"it ended: {self.log.read_text()[-3000:]}")
                self._heard.clear()
                await self._heard.wait()

    async def stop(self) -> int:
        if self.process.returncode is None:
            self.process.terminate()
        try:
            code = await asyncio.wait_for(self.process.wait(), 30)
        except TimeoutError:
            self.process.kill()
            code = await self.process.wait()
        await self._reader
        return code


class LiveCluster:
    """Start with `start`; `http` is the gateway's address."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.router = Process(folder / "router.log")
        self.kvd = Process(folder / "kvd.log")
        self.fleet = Process(folder / "fleet.log")
        self.machines: list[str] = []
        self.http = ""
        self._started: list[Process] = []

    async def start_router(self, *settings: str) -> None:
        options = (
            "--listen",
            "127.0.0.1:0",
            "--http-listen",
            "127.0.0.1:0",
            "--telemetry.log_format",
            "json",
        )
        self._started.append(self.router)
        await self.router.start("-m", "services.router", *options, *settings)
        self.http = f"http://{(await self.router.ready())['http']}"

    async def start_machines(self, *groups: str, **engine: Any) -> None:
        socket = self.folder / "kvd.sock"
        self._started.append(self.kvd)
        await self.kvd.start(
            *("-m", "services.kvd", "--node", "node", "--socket", str(socket)),
            *("--listen", "127.0.0.1:0", "--telemetry.log_format", "json"),
        )
        file = self.folder / "fleet.json"
        self.machines = write_fleet(
            file,
            parse_groups(groups),
            routers=[(await self.router.ready())["address"]],
            kvd_socket=socket,
            kvd_address=(await self.kvd.ready())["address"],
            options=engine,
        )
        self._started.append(self.fleet)
        await self.fleet.start(*FLEET, str(file))
        await self.until(
            lambda state: sum(m["state"] == "serving" for m in state["machines"]) == len(self.machines)
        )

    async def state(self) -> dict[str, Any]:
        """Return what the dashboard shows."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.http}/dashboard/state") as response,
        ):
            state: dict[str, Any] = await response.json()
            return state

    async def until(self, condition: Any, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for a state of the dashboard; returns it."""
        end = time.monotonic() + seconds
        while not condition(state := await self.state()):
            assert time.monotonic() < end, state
            await asyncio.sleep(0.1)
        return state

    async def until_idle(self, seconds: float = PATIENCE) -> None:
        """Wait until no machine holds anything."""
        await self.until(
            lambda state: not state["running"] and not any(m["kv_used"] for m in state["machines"]), seconds
        )

    async def pid(self, machine: str) -> int:
        return int((await self.fleet.ready(machine))["pid"])

    async def stop(self) -> None:
        for process in reversed(self._started):
            await process.stop()
