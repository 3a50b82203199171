"""Power agents as real processes."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from splitwise.config import Address
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1 import common_pb2, power_pb2
from splitwise.rpc.v1.power_pb2_grpc import PowerAgentStub
from tests.services.gateway.live_cluster import PATIENCE, Process

if TYPE_CHECKING:
    from pathlib import Path

    import grpc.aio

    from tests.support.emulated_gpus import GpuNode

MODULE = "services.power.emulated_nvml"


class AgentProcess:
    """One agent after the other on one node, with the same state file."""

    def __init__(self, folder: Path, node: GpuNode) -> None:
        self.folder = folder
        self.node = node
        self.state = folder / "limits.json"
        self.process: Process
        self.channel: grpc.aio.Channel
        self.address = "127.0.0.1:0"
        self._starts = 0

    def arguments(self, *settings: str) -> list[str]:
        own = ["-m", "services.power", "--nvml", MODULE, "--state", str(self.state), "--period_s", "0.1"]
        return [*own, "--telemetry.log_format", "json", "--telemetry.log_level", "debug", *settings]

    async def launch(self, *settings: str) -> Process:
        """Start a process of the agent's module; it may end by itself."""
        self._starts += 1
        process = Process(self.folder / f"agent-{self._starts}.log")
        await process.start(*self.arguments(*settings))
        return process

    async def start(self, *settings: str) -> None:
        """Start the agent where the last one was, and wait until it is ready."""
        self.process = await self.launch("--listen", self.address, *settings)
        self.address = (await self.process.ready())["address"]
        self.channel = open_channel(Address.parse(self.address))
        self.stub = PowerAgentStub(self.channel)

    async def stop(self) -> int:
        await self.channel.close()
        return await self.process.stop()

    async def kill(self) -> None:
        await self.channel.close()
        self.process.process.kill()
        await self.process.process.wait()

    async def hold(self, **fields: Any) -> power_pb2.HoldResponse:
        request = power_pb2.HoldRequest(
            identity=common_pb2.MachineIdentity(machine_id="m", incarnation=1),
            home_pool=common_pb2.POOL_TOKEN,
            pool=common_pb2.POOL_TOKEN,
            lease_ms=60_000,
        )
        request.MergeFrom(power_pb2.HoldRequest(**fields))
        return await self.stub.Hold(request)

    async def until_limits(self, *watts: float) -> None:
        """Wait until the GPUs have these limits."""
        end = time.monotonic() + PATIENCE
        while self.node.limits != list(watts):
            assert time.monotonic() < end, self.node.limits
            await asyncio.sleep(0.02)


async def ended(process: Process) -> int:
    """Return the exit code of a process that ends by itself."""
    code = await asyncio.wait_for(process.process.wait(), PATIENCE)
    await process.stop()
    return code
