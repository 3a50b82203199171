"""`splitwise up` with the real model, as a user starts it, and what can be seen of it from outside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import grpc
import psutil
from prometheus_client.parser import text_string_to_metric_families

from splitwise.client import AsyncClient
from splitwise.config import Address
from splitwise.errors import RemoteError
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1.kvd_pb2 import DescribeKvdRequest
from splitwise.rpc.v1.kvd_pb2_grpc import KvdStub
from tests.vllm.shared_memory import orphans, until_only

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from splitwise.client import Cluster
    from splitwise.models import ModelFolder

PATIENCE_S = 240
ENGINE = ("dtype=float32", "max_model_len=4224", "max_batch_tokens=512", "kv_bytes=402653184")
# How each process is told apart by its command line; an engine's core is a child of its machine.
MARKS = {
    "router": ("services.router",),
    "prompt": ("services.prompt",),
    "token": ("services.token",),
    "kvd-prompt": ("services.kvd", "node-prompt"),
    "kvd-token": ("services.kvd", "node-token"),
}
CORE = "-core"


class Up:
    """One `up` with a gateway. `stop` is Ctrl-C, and checks that nothing is left."""

    def __init__(self, folder: Path, model: ModelFolder) -> None:
        self._folder = folder
        self._log = folder / "log"
        options = [word for option in ENGINE for word in ("--engine-option", option)]
        self._arguments = ["up", "--model", str(model.path), "--http", "127.0.0.1:0", *options]
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        self.router = self.http = ""

    async def start(self) -> None:
        self._orphans = orphans()
        with self._log.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "splitwise.cli.main", *self._arguments),
                stdout=log,
                stderr=log,
                env=self.environment,
            )
        state = self._folder / "splitwise" / "cluster.json"
        await self._until(state.exists)
        found = json.loads(state.read_text())
        self.router, self.http = found["router"], found["http"]

    async def stop(self) -> None:
        family = psutil.Process(self._process.pid).children(recursive=True)
        self._process.send_signal(signal.SIGINT)
        assert await asyncio.wait_for(self._process.wait(), PATIENCE_S) == 0
        assert not psutil.wait_procs(family, timeout=10)[1], "processes outlived `up`"
        await until_only(self._orphans)

    async def kill(self) -> None:
        """Make sure that it is gone, whatever has failed; its processes die with it."""
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()

    def find(self, name: str) -> psutil.Process | None:
        """Return a running process by its name in `MARKS`, or an engine core (``prompt-core``)."""
        if name.endswith(CORE):
            machine = self.find(name.removesuffix(CORE))
            children = machine.children() if machine is not None else []
            return max(children, key=lambda child: int(child.memory_info().rss), default=None)
        for process in psutil.Process(self._process.pid).children():
            words = process.cmdline()
            if all(mark in words for mark in MARKS[name]):
                return process
        return None

    async def until_serving(self) -> None:
        """Wait until both machines serve and their daemons know them."""
        async with AsyncClient(self.router) as client:

            async def serves() -> bool:
                machines = (await client.cluster()).machines
                return [m.state for m in machines] == ["serving", "serving"] and all(
                    [engine.engine_id for engine in kvd.engines] for kvd in await self._kvds(machines)
                )

            await self._until(serves)

    async def until_computing(self) -> None:
        """Wait until a prompt is on a machine and not computed yet."""
        async with AsyncClient(self.router) as client:

            async def computes() -> bool:
                return any(machine.pending_prompt_tokens for machine in (await client.cluster()).machines)

            await self._until(computes)

    async def until_free(self) -> None:
        """Wait until every count of what requests hold is back to 0, at whoever keeps one."""
        held: dict[str, Any] = {}

        async def free() -> bool:
            held.clear()
            held.update(await self.held())
            return not any(held.values())

        try:
            await self._until(free)
        except TimeoutError:
            raise AssertionError(f"still held: {held}") from None

    async def held(self) -> dict[str, float]:
        """Return what router, gateway, machines and daemons say that is in use."""
        counts: dict[str, float] = {}
        async with AsyncClient(self.router) as client:
            cluster = await client.cluster()
        counts |= {"running": cluster.running, "queued": cluster.queued}
        for machine in cluster.machines:
            for name in ("prompt_requests", "token_requests", "pending_prompt_tokens", "kv_blocks_used"):
                counts[f"{machine.machine_id} {name}"] = getattr(machine, name)
        for kvd in await self._kvds(cluster.machines):
            counts[f"{kvd.node} transfers_open"] = kvd.transfers_open
            counts[f"{kvd.node} blocks_granted"] = sum(engine.blocks_granted for engine in kvd.engines)
        counts["gateway streams"] = await self._gateway_streams()
        return counts

    async def _gateway_streams(self) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"http://{self.http}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
            (sample,) = (s for f in families for s in f.samples if s.name == "splitwise_gateway_streams_open")
        return float(sample.value)

    @staticmethod
    async def _kvds(machines: Cluster.machines) -> list[Any]:  # type: ignore[name-defined]
        answers = []
        for address in sorted({machine.kvd_address for machine in machines}):
            async with open_channel(Address.parse(address)) as channel:
                answers.append(await KvdStub(channel).Describe(DescribeKvdRequest(), timeout=5))
        return answers

    async def _until(self, condition: Callable[[], Any]) -> None:
        """Wait for a condition; a call that fails meanwhile is one that does not hold yet."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                assert self._process.returncode is None, self._log.read_text()
                try:
                    holds = condition()
                    if await holds if asyncio.iscoroutine(holds) else holds:
                        return
                except (RemoteError, grpc.RpcError, OSError, aiohttp.ClientError):
                    pass
                await asyncio.sleep(0.05)
