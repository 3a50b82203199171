"""Daemons and engines as real processes, for tests of one pair."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE = 60.0  # seconds; a loaded machine is slow, not wrong
ENVIRONMENT = {
    **os.environ,
    "NUMBA_DISABLE_JIT": "1",
    "OMP_NUM_THREADS": "1",
    "SPLITWISE_DIE_WITH_PARENT": str(os.getpid()),
}


class Daemon:
    """One KV daemon; `start` again after `kill` keeps its socket and address."""

    def __init__(self, folder: Path, node: str) -> None:
        self.socket = folder / f"{node}.sock"
        self.node = node
        self.address = "127.0.0.1:0"
        self.process: asyncio.subprocess.Process | None = None
        self.log = folder / f"{node}.log"
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.kvd"),
            *("--node", self.node, "--socket", str(self.socket), "--listen", self.address),
            *("--telemetry.log_format", "json"),
            stderr=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            limit=1 << 20,
        )
        assert self.process.stderr is not None
        while line := await asyncio.wait_for(self.process.stderr.readline(), PATIENCE):
            self._keep(line)
            if b"service.ready" in line:
                self.address = json.loads(line)["address"]
                self._reader = asyncio.create_task(self._drain(self.process.stderr))
                return
        raise AssertionError(f"the daemon of {self.node} did not start: {self.log.read_text()}")

    def _keep(self, line: bytes) -> None:
        with self.log.open("ab") as log:
            log.write(line)

    async def _drain(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            self._keep(line)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)
            await asyncio.wait_for(self.process.wait(), PATIENCE)
        if self._reader is not None:
            await self._reader


class EngineProcess:
    """One emulated engine; `work` starts a phase, `ends` waits for it."""

    def __init__(self, name: str, daemon: Daemon, options: dict[str, Any]) -> None:
        self.name = name
        self.daemon = daemon
        self.options = options
        self.texts: dict[str, list[int]] = {}
        self.finish: dict[str, str | None] = {}
        self.cached: dict[str, int] = {}
        self.ready: dict[str, Any] = {}
        self._ends: dict[str, asyncio.Future[dict[str, Any]]] = {}
        self._answers: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._progress = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.services.emulated.engine_process"),
            *(self.name, str(self.daemon.socket), json.dumps(self.options)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=ENVIRONMENT,
            limit=1 << 24,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), PATIENCE)
        self.ready = json.loads(line)
        self._reader = asyncio.create_task(self._read(self.process.stdout))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while line := await stream.readline():
            event = json.loads(line)
            kind = event["event"]
            if kind == "tokens":
                self.texts[event["name"]].extend(event["ids"])
                self.finish[event["name"]] = event["finish"]
                self.cached.setdefault(event["name"], event["cached"])
            elif kind in ("load", "flipped"):
                self._answers.put_nowait(event)
            else:
                self._ends[event["name"]].set_result(event)
            self._progress.set()

    def tell(self, **command: Any) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    def work(self, do: str, name: str, **command: Any) -> None:
        self.texts[name] = []
        self._ends[name] = asyncio.get_running_loop().create_future()
        self.tell(do=do, name=name, **command)

    async def end(self, name: str) -> dict[str, Any]:
        return await asyncio.wait_for(asyncio.shield(self._ends[name]), PATIENCE)

    async def has_tokens(self, name: str, count: int) -> None:
        async def wait() -> None:
            while len(self.texts[name]) < count and not self._ends[name].done():
                self._progress.clear()
                await self._progress.wait()

        await asyncio.wait_for(wait(), PATIENCE)

    async def ask(self, **command: Any) -> dict[str, Any]:
        self.tell(**command)
        return await asyncio.wait_for(self._answers.get(), PATIENCE)

    async def until_empty(self) -> None:
        """Wait until no block and no transfer is held; the test times out when some never come back."""

        async def wait() -> None:
            while True:
                load = await self.ask(do="load")
                if load["used"] == 0 and load["open"] == 0:
                    return
                await asyncio.sleep(0.05)

        await asyncio.wait_for(wait(), PATIENCE)

    async def until_attached(self) -> None:
        async def wait() -> None:
            load = await self.ask(do="load")
            while load["failure"] is not None:
                await asyncio.sleep(0.05)
                load = await self.ask(do="load")

        await asyncio.wait_for(wait(), PATIENCE)

    async def stop(self) -> None:
        if self.process is None or self.process.stdin is None:
            return
        self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), PATIENCE)
        finally:
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()
        if self._reader is not None:
            await self._reader


class Pair:
    """A prompt and a token engine, each with the daemon of its node (which may be the same)."""

    def __init__(self, prompt: EngineProcess, token: EngineProcess) -> None:
        self.prompt = prompt
        self.token = token

    def start(
        self,
        name: str,
        tokens: list[int],
        *,
        transfer: str | None = None,
        lease_ms: int = 60_000,
        **sampling: Any,
    ) -> None:
        """Start both phases of one request."""
        sampling.setdefault("temperature", 0.0)
        token_sampling = dict(sampling)
        if "seed" in sampling:
            from splitwise.requests import derive_seed

            token_sampling["seed"] = derive_seed(sampling["seed"], 1)
        transfer = transfer or secrets.token_hex(16)
        self.prompt.work(
            "prompt", name, tokens=tokens, sampling=sampling, transfer=transfer, lease_ms=lease_ms
        )
        self.token.work(
            "token",
            name,
            tokens=tokens,
            sampling=token_sampling,
            transfer=transfer,
            source_kvd=self.prompt.daemon.address,
            source_engine=self.prompt.name,
            lease_ms=lease_ms,
        )

    async def text(self, name: str) -> list[int]:
        """Wait for the end of both phases; returns all tokens."""
        ends = await asyncio.gather(self.prompt.end(name), self.token.end(name))
        assert [end["event"] for end in ends] == ["over", "over"], ends
        return self.prompt.texts[name] + self.token.texts[name]

    async def until_empty(self) -> None:
        await asyncio.gather(self.prompt.until_empty(), self.token.until_empty())
