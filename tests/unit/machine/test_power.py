"""What several routers say about one machine's power, put together, and told to an agent."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from services.machine.power import PowerHold, serving_pool, smallest_share, unlimited
from splitwise.config import Address, MachineSettings
from splitwise.errors import PreconditionError
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.status import abort
from splitwise.rpc.v1.common_pb2 import (
    POOL_MIXED,
    POOL_PROMPT,
    POOL_TOKEN,
    LoadReport,
    MachineDescription,
    MachineIdentity,
    PowerReport,
)
from splitwise.rpc.v1.machine_pb2 import PowerOrder
from splitwise.rpc.v1.power_pb2 import HoldRequest, HoldResponse, ReleaseRequest, ReleaseResponse
from splitwise.rpc.v1.power_pb2_grpc import PowerAgentServicer, add_PowerAgentServicer_to_server

PATIENCE = 30.0
DESCRIPTION = MachineDescription(
    identity=MachineIdentity(machine_id="t", incarnation=7), home_pool=POOL_TOKEN
)


def order(pool: Any = POOL_TOKEN, share: float = 0.0, serial: int = 0) -> PowerOrder:
    return PowerOrder(pool=pool, share_watts=share, serial=serial)


@pytest.mark.parametrize(
    ("pools", "serving"),
    [
        ([], POOL_TOKEN),
        ([POOL_TOKEN], POOL_TOKEN),
        ([POOL_MIXED], POOL_MIXED),
        ([POOL_TOKEN, POOL_MIXED], POOL_MIXED),
        ([POOL_PROMPT, POOL_PROMPT], POOL_PROMPT),
    ],
)
def test_the_pool_that_caps_least(pools: list[Any], serving: Any) -> None:
    assert serving_pool(POOL_TOKEN, [order(pool) for pool in pools]) == serving


def test_the_smallest_share() -> None:
    assert smallest_share([]) == 0
    assert smallest_share([order(share=0)]) == 0
    assert smallest_share([order(share=500), order(share=0), order(share=300)]) == 300


def test_without_an_agent_the_gpus_count_with_all_they_may_draw() -> None:
    last = PowerReport(gpus=2, floor_watts=400, borrowed_watts=1400, wanted_watts=700, enforced_watts=700)
    now = unlimited(last, "gone")
    assert (now.floor_watts, now.wanted_watts, now.enforced_watts, now.token_watts) == (1400,) * 4
    assert (now.gpus, now.problem) == (2, "gone")


class Agent(PowerAgentServicer):
    """An agent that writes down what it hears."""

    def __init__(self) -> None:
        self.heard: deque[HoldRequest] = deque()
        self.news = asyncio.Event()
        self.released: list[ReleaseRequest] = []
        self.refuses = False

    async def Hold(self, request: HoldRequest, context: Any) -> HoldResponse:
        self.heard.append(request)
        self.news.set()
        if self.refuses:
            await abort(context, PreconditionError("gpus[0]: no"))
        power = PowerReport(gpus=1, enforced_watts=350, draw_watts=90, borrowed_watts=700)
        return HoldResponse(power=power)

    async def Release(self, request: ReleaseRequest, context: Any) -> ReleaseResponse:
        self.released.append(request)
        return ReleaseResponse()

    async def until(self, condition: Any) -> HoldRequest:
        """Return the first request that is so; earlier ones are forgotten."""
        async with asyncio.timeout(PATIENCE):
            while True:
                while self.heard:
                    if condition(request := self.heard.popleft()):
                        return request
                self.news.clear()
                await self.news.wait()


async def serve(agent: Agent) -> tuple[RpcServer, Address]:
    server = RpcServer(Address("127.0.0.1", 0), ["splitwise.v1.PowerAgent"])
    add_PowerAgentServicer_to_server(agent, server.grpc)
    return server, await server.start()


async def report_when(hold: PowerHold, condition: Any, router: str = "a") -> LoadReport:
    async with asyncio.timeout(PATIENCE):
        while True:
            load = LoadReport()
            hold.add_to(load, router)
            if condition(load):
                return load
            await asyncio.sleep(0.01)


async def test_an_agent_hears_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0, 3")
    agent = Agent()
    server, address = await serve(agent)
    hold = PowerHold(MachineSettings(power_agent=address), None)
    hold.start(DESCRIPTION)
    try:
        first = await agent.until(lambda request: True)
        assert (first.identity, list(first.gpus)) == (DESCRIPTION.identity, ["0", "3"])
        assert (first.home_pool, first.pool, first.share_watts) == (POOL_TOKEN, POOL_TOKEN, 0)
        hold.order("a", order(POOL_MIXED, 600, serial=4))
        request = await agent.until(lambda request: request.pool == POOL_MIXED)
        assert request.share_watts == 600
        load = await report_when(hold, lambda load: load.power.order_serial == 4)
        assert (load.power_watts, load.power.enforced_watts) == (90, 350)
        other = LoadReport()
        hold.add_to(other, "b")  # another router's orders have their own numbers
        assert other.power.order_serial == 0
        hold.order("b", order(POOL_TOKEN, 500, serial=1))
        assert (await agent.until(lambda request: request.share_watts == 500)).pool == POOL_MIXED
        hold.drop("a")
        assert (await agent.until(lambda request: request.pool == POOL_TOKEN)).share_watts == 500
        hold.drop("b")  # without any router the share stays: the budget is not over
        agent.heard.clear()
        assert (await agent.until(lambda request: True)).share_watts == 500
        hold.order("a", order(POOL_TOKEN, 0, serial=1))
        assert (await agent.until(lambda request: request.share_watts == 0)).pool == POOL_TOKEN
    finally:
        await hold.close()
        await server.stop(0)
    assert agent.released == [ReleaseRequest(identity=DESCRIPTION.identity)]


async def test_an_agent_that_is_away_and_comes_back() -> None:
    agent = Agent()
    server, address = await serve(agent)
    hold = PowerHold(MachineSettings(power_agent=address, gpus=("GPU-1",)), None)
    hold.start(DESCRIPTION)
    try:
        assert list((await agent.until(lambda request: True)).gpus) == ["GPU-1"]
        hold.order("a", order(serial=3))
        await report_when(hold, lambda load: load.power.order_serial == 3)
        await server.stop(0)
        hold.order("a", order(serial=4))
        load = await report_when(hold, lambda load: load.power.problem)
        assert load.power.enforced_watts == 700
        assert load.power.order_serial == 3
        server = RpcServer(address, ["splitwise.v1.PowerAgent"])
        add_PowerAgentServicer_to_server(agent, server.grpc)
        await server.start()
        load = await report_when(hold, lambda load: load.power.order_serial == 4)
        assert load.power.problem == ""
    finally:
        await hold.close()
        await server.stop(0)


async def test_a_refusal_is_a_problem_and_no_end() -> None:
    agent = Agent()
    agent.refuses = True
    server, address = await serve(agent)
    hold = PowerHold(MachineSettings(power_agent=address), None)
    hold.start(DESCRIPTION)
    try:
        for _ in range(2):
            await agent.until(lambda request: True)
            hold.order("a", order())
        load = LoadReport()
        hold.add_to(load, "a")
        assert not load.HasField("power")  # nothing is known: the router does not count with it
        agent.refuses = False
        hold.order("a", order(serial=2))
        await report_when(hold, lambda load: load.power.order_serial == 2)
    finally:
        await hold.close()
        await server.stop(0)


async def test_without_an_agent_nothing_is_held() -> None:
    hold = PowerHold(MachineSettings(), None)
    hold.start(DESCRIPTION)
    hold.order("a", order(POOL_MIXED))
    hold.drop("a")
    load = LoadReport()
    hold.add_to(load, "a")
    assert load == LoadReport()
    await hold.close()
