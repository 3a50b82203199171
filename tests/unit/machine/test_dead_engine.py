"""A machine whose engine died ends its process, so that whoever supervises it starts a new one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from services.engine.interface import EngineError, EngineLoad
from services.machine.service import Machine
from splitwise.config import Address, MachineSettings, Settings
from splitwise.rpc.v1.common_pb2 import MachineDescription

if TYPE_CHECKING:
    from services.engine.interface import Engine
    from splitwise.launch.service import Lifecycle


class BrittleEngine:
    """Takes no work; fails and dies as the test says."""

    def __init__(self) -> None:
        self.problem: str | None = None
        self.for_good = False
        self.closed = False

    async def start(self) -> MachineDescription:
        return MachineDescription(model="m", engine_id="e", kv_blocks=1, block_tokens=1, max_model_len=9)

    def load(self) -> EngineLoad:
        return EngineLoad(0, 1, 0)

    def failure(self) -> str | None:
        return self.problem

    def dead(self) -> bool:
        return self.for_good

    async def close(self) -> None:
        self.closed = True


class QuietLifecycle:
    def loading(self, what: str, **fields: object) -> None:
        """Nobody listens."""

    def ready(self, address: Address | None, **fields: object) -> None:
        """Nobody listens."""


async def started(engine: BrittleEngine) -> Machine:
    settings = Settings(machine=MachineSettings(routers=(), kvd_address=Address("127.0.0.1", 1)))
    machine = Machine(settings, "prompt", cast("Engine", engine))
    await machine.start(cast("Lifecycle", QuietLifecycle()))
    return machine


async def refusal(machine: Machine, wanted: bool) -> Any:
    async with asyncio.timeout(30):
        while (machine._works.refusal is not None) is not wanted:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return machine._works.refusal


async def test_an_engine_that_died_ends_the_machine() -> None:
    engine = BrittleEngine()
    machine = await started(engine)
    serving = asyncio.create_task(machine.serve_until(asyncio.Event()))
    engine.problem, engine.for_good = "the core died", True
    with pytest.raises(EngineError, match="the core died"):
        await asyncio.wait_for(serving, 30)
    assert machine._works.refusal is not None, "nothing more is taken while it ends"
    await machine.close()
    assert engine.closed


async def test_a_daemon_that_is_away_is_waited_for() -> None:
    engine, stop = BrittleEngine(), asyncio.Event()
    machine = await started(engine)
    serving = asyncio.create_task(machine.serve_until(stop))
    engine.problem = "the KV daemon is away"
    assert "away" in (await refusal(machine, wanted=True))[1]
    engine.problem = None
    await refusal(machine, wanted=False)
    assert not serving.done()
    stop.set()
    await asyncio.wait_for(serving, 30)
    await machine.close()
    assert engine.closed
