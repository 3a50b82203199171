"""What routers say about this machine's power, put together and told to its node's power agent.

The agent holds the machine's GPUs for it while it hears of it: a machine that dies is silent,
and its GPUs get their previous limits. A machine whose agent is away goes on serving, and
counts with what its GPUs may draw without caps.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc.aio

from splitwise.power import Role as PowerRole
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.status import to_exception
from splitwise.rpc.v1.common_pb2 import POOL_MIXED, Pool, PowerReport
from splitwise.rpc.v1.power_pb2 import HoldRequest, ReleaseRequest
from splitwise.rpc.v1.power_pb2_grpc import PowerAgentStub
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable

    from splitwise.config import MachineSettings, TlsSettings
    from splitwise.rpc.v1.common_pb2 import LoadReport, MachineDescription
    from splitwise.rpc.v1.machine_pb2 import PowerOrder
    from splitwise.rpc.v1.power_pb2_grpc import PowerAgentAsyncStub

HOLD_S = 1.0
LEASE_MS = 5_000
CALL_TIMEOUT_S = 5.0


class PowerHold:
    """One machine's hold on its GPUs. Every router is named by what it ordered on: its stream."""

    def __init__(self, settings: MachineSettings, tls: TlsSettings | None) -> None:
        """`settings.power_agent` None: orders are heard and nothing comes of them."""
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        self._gpus = settings.gpus or tuple(word.strip() for word in visible.split(",") if word.strip())
        self._agent = settings.power_agent
        self._tls = tls
        self._orders: dict[Hashable, PowerOrder] = {}
        self._obeyed: dict[Hashable, int] = {}
        self._last_share = 0.0
        self._report: PowerReport | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._release: ReleaseRequest | None = None

    # ---- what routers say

    def order(self, router: Hashable, order: PowerOrder) -> None:
        """Take what a router says about this machine."""
        self._orders[router] = order
        self._last_share = smallest_share(self._orders.values())
        self._wake.set()

    def drop(self, router: Hashable) -> None:
        """A router is gone. The share that the last one gave stays until another says otherwise."""
        self._obeyed.pop(router, None)
        if self._orders.pop(router, None) is not None:
            if self._orders:
                self._last_share = smallest_share(self._orders.values())
            self._wake.set()

    def add_to(self, load: LoadReport, router: Hashable) -> None:
        """Put the GPUs' power into a load report for one router."""
        if self._report is not None:
            load.power.CopyFrom(self._report)
            load.power.order_serial = self._obeyed.get(router, 0)
            load.power_watts = self._report.draw_watts

    # ---- the agent

    def start(self, description: MachineDescription) -> None:
        """Hold the GPUs from now on."""
        if self._agent is not None:
            self._release = ReleaseRequest(identity=description.identity)
            self._task = asyncio.create_task(self._run(description), name="power")

    async def close(self) -> None:
        """Give the GPUs back."""
        if self._task is None or self._agent is None or self._release is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        async with open_channel(self._agent, tls=self._tls, role=Role.POWER) as channel:
            with suppress(grpc.aio.AioRpcError):  # it is gone, or the lease ends it
                await PowerAgentStub(channel).Release(self._release, timeout=CALL_TIMEOUT_S)

    async def _run(self, description: MachineDescription) -> None:
        if self._agent is None:
            return
        log, said = get_logger().bind(agent=str(self._agent)), "not held yet"
        async with open_channel(self._agent, tls=self._tls, role=Role.POWER) as channel:
            while True:
                self._wake.clear()
                serials = {router: order.serial for router, order in self._orders.items()}
                problem = await self._hold(PowerAgentStub(channel), description, serials)
                if problem != said:
                    if problem:
                        log.warning("power.problem", error=problem)
                    else:
                        log.info("power.held")
                    said = problem
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), HOLD_S)

    async def _hold(
        self, agent: PowerAgentAsyncStub, description: MachineDescription, serials: dict[Hashable, int]
    ) -> str:
        """Tell the agent once; returns what is wrong, if anything."""
        request = HoldRequest(
            identity=description.identity,
            gpus=self._gpus,
            home_pool=description.home_pool,
            pool=serving_pool(description.home_pool, self._orders.values()),
            share_watts=self._last_share,
            lease_ms=LEASE_MS,
        )
        try:
            answer = await agent.Hold(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            problem = f"{self._agent}: {to_exception(error).message}"
            self._report = None if self._report is None else unlimited(self._report, problem)
            return problem
        self._report = answer.power
        self._obeyed = {router: serial for router, serial in serials.items() if router in self._orders}
        return answer.power.problem


def serving_pool(home: Pool.ValueType, orders: Iterable[PowerOrder]) -> Pool.ValueType:
    """Return the machine's pool; where routers differ it is the mixed one, which caps least."""
    pools = {order.pool for order in orders} or {home}
    return pools.pop() if len(pools) == 1 else POOL_MIXED


def smallest_share(orders: Iterable[PowerOrder]) -> float:
    """Return the smallest share of a budget, in watts; 0 when no router has one."""
    return min((order.share_watts for order in orders if order.share_watts > 0), default=0.0)


def unlimited(last: PowerReport, problem: str) -> PowerReport:
    """Return what is known without the agent: that the GPUs may draw what they could before it."""
    watts = last.borrowed_watts
    report = PowerReport(
        gpus=last.gpus, floor_watts=watts, wanted_watts=watts, enforced_watts=watts, problem=problem
    )
    for role in PowerRole:
        setattr(report, f"{role.value}_watts", watts)
    return report
