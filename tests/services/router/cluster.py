"""A router over gRPC with emulated machines on several nodes, each node with its own daemon."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.config import Address
from splitwise.launch.emulate import FLEET, parse_groups, write_fleet
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1 import common_pb2, router_pb2
from splitwise.rpc.v1.router_pb2_grpc import RouterStub
from splitwise.text import ByteVocabulary
from tests.services.gateway.live_cluster import PATIENCE, LiveCluster, Process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

MODEL = "emulated"
ENGINE: dict[str, Any] = {"time_scale": 0.1, "model": MODEL}
PROMPT = list(range(1, 701))


def expected(count: int, prompt: Sequence[int] = PROMPT, model: str = MODEL, **options: Any) -> list[int]:
    """Return what an intact cluster answers."""
    return expected_tokens(settings_from_options({**ENGINE, "model": model}), prompt, count, **options)


def text_of(tokens: Sequence[int]) -> str:
    detokenizer = ByteVocabulary(32_000).detokenizer()
    return detokenizer.push(tokens) + detokenizer.flush()


def request(prompt: Sequence[int] | str = PROMPT, model: str = MODEL, **sampling: Any) -> Any:
    sampling = {"temperature": 0.0, **sampling}
    made = router_pb2.GenerateRequest(model=model, sampling=common_pb2.SamplingParams(**sampling))
    if isinstance(prompt, str):
        made.text = prompt
    else:
        made.token_ids.ids.extend(prompt)
    return made


def free_address() -> str:
    """Return an address for what is killed and started again at the same place.

    It is below the ports that the kernel hands out, or an outgoing connection might take it
    while nobody listens there.
    """
    while True:
        port = random.randrange(15_000, 32_000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return f"127.0.0.1:{port}"


@dataclass
class Answer:
    """Everything that one stream brought, also when it failed."""

    ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: Any = None
    error: grpc.aio.AioRpcError | None = None

    def add(self, message: Any) -> None:
        self.ids.extend(message.token_ids)
        self.text += message.text
        if message.HasField("finished"):
            assert self.finished is None
            self.finished = message.finished

    @property
    def retry_after_ms(self) -> int:
        assert self.error is not None
        return int(dict(self.error.trailing_metadata() or ()).get("retry-after-ms", -1))


class RouterCluster(LiveCluster):
    """`start_router`, then `start_nodes`; `ask` and `stream` speak gRPC."""

    stub: RouterStub
    channel: grpc.aio.Channel

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.kvds: dict[str, Process] = {}
        self._addresses: dict[str, str] = {}

    async def start_router(self, *settings: str) -> None:
        await super().start_router("--listen", free_address(), *settings)
        self.address = (await self.router.ready())["address"]
        self.channel = open_channel(Address.parse(self.address))
        self.stub = RouterStub(self.channel)

    async def restart_router(self, *settings: str) -> None:
        """Start a router where the one that ended was."""
        await self.channel.close()
        self.router = Process(self.folder / "router-again.log")
        await self.start_router("--listen", self.address, *settings)

    async def start_daemon(self, node: str) -> None:
        """Start a node's daemon, or start it again where it was."""
        process = Process(self.folder / f"{node}.log")
        await process.start(
            *("-m", "services.kvd", "--node", node, "--socket", str(self.folder / f"{node}.sock")),
            *("--listen", self._addresses.setdefault(node, free_address()), "--telemetry.log_format", "json"),
        )
        self.kvds[node] = process
        self._started.append(process)
        await process.ready()

    async def start_nodes(self, nodes: dict[str, list[str]], **by_node: dict[str, Any]) -> None:
        """Start ``{"a": ["1xH100:prompt", ...]}``; `by_node` changes engine options of a node."""
        await asyncio.gather(*(self.start_daemon(node) for node in nodes))
        entries = []
        for node, groups in nodes.items():
            file = self.folder / f"fleet-{node}.json"
            write_fleet(
                file,
                parse_groups(groups),
                routers=[self.address],
                kvd_socket=self.folder / f"{node}.sock",
                kvd_address=self._addresses[node],
                node=node,
                options={**ENGINE, **by_node.get(node, {})},
            )
            for entry in json.loads(file.read_text()):
                entry["arguments"][1] += f"-{node}"
                entries.append(entry)
        file = self.folder / "fleet.json"
        file.write_text(json.dumps(entries))
        self.machines = [entry["arguments"][1] for entry in entries]
        self._started.append(self.fleet)
        await self.fleet.start(*FLEET, str(file))
        await self.until_serving(len(self.machines))

    async def until_serving(self, count: int) -> None:
        await self.until_cluster(lambda c: sum(m.state == "serving" for m in c.machines) == count)

    async def start_machine(self, node: str, name: str, home: str, *settings: str, **engine: Any) -> Process:
        """Start one more machine, whether or not the router will take it."""
        options = json.dumps({**ENGINE, **engine})
        process = Process(self.folder / f"{name}.log")
        self._started.append(process)
        await process.start(
            *("-m", f"services.{home}", "--id", name, "--listen", "127.0.0.1:0", "--node", node),
            *("--routers", json.dumps([self.address]), "--kvd_address", self._addresses[node]),
            *("--kvd_socket", str(self.folder / f"{node}.sock"), "--telemetry.log_format", "json"),
            *("--engine.kind", "emulated", "--engine.options", options, *settings),
        )
        return process

    async def describe(self) -> Any:
        return await self.stub.DescribeCluster(router_pb2.DescribeClusterRequest())

    async def until_cluster(self, condition: Any, seconds: float = PATIENCE) -> Any:
        end = time.monotonic() + seconds
        while not condition(cluster := await self.describe()):
            assert time.monotonic() < end, cluster
            await asyncio.sleep(0.03)
        return cluster

    async def until_free(self, seconds: float = PATIENCE) -> Any:
        """Wait until nothing is open and every machine's own report says that it holds nothing."""

        def free(cluster: Any) -> bool:
            return (
                not cluster.running
                and not cluster.queued
                and all(
                    not (m.load.kv_blocks_used or m.load.prompt_requests or m.load.token_requests)
                    and not (m.pending_prompt_tokens or m.pending_token_requests)
                    for m in cluster.machines
                )
            )

        await asyncio.sleep(0.25)  # a report of what is now
        return await self.until_cluster(free, seconds)

    async def stream(self, asked: Any, timeout: float | None = None) -> AsyncIterator[Any]:  # noqa: ASYNC109
        call = self.stub.Generate(asked, timeout=timeout)
        try:
            async for message in call:
                yield message
        finally:
            call.cancel()

    async def ask(self, asked: Any, timeout: float | None = PATIENCE) -> Answer:  # noqa: ASYNC109
        """Run one request to its end; an error is kept, with the tokens before it."""
        answer = Answer()
        try:
            async for message in self.stream(asked, timeout):
                answer.add(message)
        except grpc.aio.AioRpcError as error:
            answer.error = error
        return answer

    async def signal_machine(self, machine: str, number: signal.Signals = signal.SIGKILL) -> None:
        os.kill(await self.pid(machine), number)

    async def stop(self) -> None:
        if hasattr(self, "channel"):
            await self.channel.close()
        await super().stop()
