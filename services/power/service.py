"""The agent's process: listening, reading once a period, and every limit given back at the end."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from services.power.agent import PowerAgent
from services.power.limits_file import LimitsFile
from services.power.metrics import export
from services.power.nvml import Nvml
from services.power.servicer import Servicer
from splitwise.errors import UnavailableError
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.v1.power_pb2_grpc import add_PowerAgentServicer_to_server
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitwise.config import PowerSettings, Settings
    from splitwise.launch.service import Lifecycle

P = ParamSpec("P")
T = TypeVar("T")
SERVICES = ("splitwise.v1.PowerAgent",)
STOP_GRACE_S = 1.0
ANSWER_S = 4.0
MAX_WAITING = 256  # calls; a driver that hangs must not let them pile up


class Worker:
    """The one thread that speaks to the driver, whose calls may take long."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="nvml")
        self._waiting = 0

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run it there; raises `UnavailableError` when the driver does not come back in time."""
        if self._waiting >= MAX_WAITING:
            raise UnavailableError(f"{self._waiting} calls wait for the driver", retry_after=ANSWER_S)
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        self._waiting += 1
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), ANSWER_S)
        except TimeoutError:
            future.add_done_callback(_take_result)
            raise UnavailableError(
                f"the driver has not answered for {ANSWER_S:g} s", retry_after=1.0
            ) from None

    def _done(self, _future: asyncio.Future[T]) -> None:
        self._waiting -= 1

    def later(self, function: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have it run there when its turn comes."""
        asyncio.get_running_loop().run_in_executor(
            self._pool, lambda: function(*args, **kwargs)
        ).add_done_callback(_take_result)

    async def to_the_end(self, function: Callable[[], T]) -> T:
        """Run it there, however long it takes: limits are given back even when this is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, function)
        try:
            return await asyncio.shield(future)
        finally:
            while not future.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait((future,))


def _take_result(future: asyncio.Future[T]) -> None:
    """Read what a call that nobody waits for any more came to, so that it is not called unread."""
    with suppress(asyncio.CancelledError):
        error = future.exception()
        if error is not None:
            get_logger().warning("power.late_failure", error=str(error))


async def serve(settings: Settings, lifecycle: Lifecycle) -> None:
    """Run the agent until it is told to stop."""
    options = settings.power
    lifecycle.loading("driver", module=options.nvml)
    worker = Worker()
    kept = LimitsFile(options.state)
    agent = PowerAgent(options, Nvml(options.nvml), kept)
    server = RpcServer(options.listen, SERVICES, tls=settings.tls)
    add_PowerAgentServicer_to_server(Servicer(agent, worker), server.grpc)
    async with AsyncExitStack() as stack:
        kept.open()
        stack.callback(kept.close)
        address = await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        await worker.to_the_end(agent.start)
        stack.push_async_callback(worker.to_the_end, agent.close)
        export(agent)
        lifecycle.on_reload(lambda changed: worker.later(agent.use, changed.power))
        ticks = asyncio.create_task(_tick(worker, agent, options.period_s), name="ticks")
        stopped = asyncio.create_task(lifecycle.stop.wait(), name="stop")
        stack.callback(ticks.cancel)
        stack.callback(stopped.cancel)
        await server.set_serving(True)
        power = agent.description
        lifecycle.ready(address, gpus=len(power.gpus), driver=power.driver, problem=power.problem or None)
        await asyncio.wait((ticks, stopped), return_when=asyncio.FIRST_COMPLETED)
        await server.set_serving(False)
        if ticks.done():
            ticks.result()  # raises: the agent is of no more use, and ends


async def _tick(worker: Worker, agent: PowerAgent, period_s: float) -> None:
    slow = False
    while True:
        try:
            await worker.run(agent.tick)
            slow = False
        except UnavailableError as error:
            if not slow:
                get_logger().error("power.driver_slow", error=error.message)
            slow = True
        await asyncio.sleep(period_s)


def check(settings: Settings) -> None:
    """Raise `ConfigError` for what the schema cannot see: the driver's Python module is missing."""
    Nvml(settings.power.nvml)


def restore(options: PowerSettings) -> int:
    """Give back what a dead agent's state file owes, and nothing else; returns how many are left."""
    kept = LimitsFile(options.state)
    kept.open()
    try:
        if len(kept):
            agent = PowerAgent(options, Nvml(options.nvml), kept)
            agent.start()
            agent.close()
        return len(kept)
    finally:
        kept.close()
