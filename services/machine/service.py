"""The life of a machine's process: listen, load the engine, register, serve, drain."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from services.engine.interface import EngineError
from services.machine.engines import create_engine
from services.machine.metrics import export
from services.machine.power import PowerHold
from services.machine.registrar import keep_registered
from services.machine.streams import Streams
from services.machine.transfers import TransferWatch
from services.machine.works import WorkTable
from services.prompt.servicer import PromptServicer
from services.token.servicer import TokenServicer
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.v1.common_pb2 import POOL_PROMPT, POOL_TOKEN, MachineDescription, MachineIdentity
from splitwise.rpc.v1.machine_pb2 import FAILURE_CAUSE_DRAINING, FAILURE_CAUSE_ENGINE
from splitwise.rpc.v1.machine_pb2_grpc import (
    add_PromptServiceServicer_to_server,
    add_TokenServiceServicer_to_server,
)
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from services.engine.interface import Engine
    from splitwise.config import Address, MachineSettings, Settings
    from splitwise.launch.service import Lifecycle

SERVICES = ("splitwise.v1.PromptService", "splitwise.v1.TokenService")
WATCH_S = 0.1
STOP_GRACE_S = 2.0
POOLS = {"prompt": POOL_PROMPT, "token": POOL_TOKEN}


def serve_machine(
    home: str, create: Callable[[MachineSettings], Engine] = create_engine
) -> Callable[[Settings, Lifecycle], Awaitable[None]]:
    """Return the coroutine of a machine whose home pool is `home` (prompt or token)."""

    async def serve(settings: Settings, lifecycle: Lifecycle) -> None:
        machine = Machine(settings, home, create(settings.machine))
        try:
            machine.export_metrics()
            lifecycle.on_reload(lambda changed: machine.use(changed.machine))
            await machine.start(lifecycle)
            await machine.serve_until(lifecycle.stop)
            await machine.drain()
        finally:
            await machine.close()

    return serve


def check(settings: Settings) -> None:
    """Raise `ConfigError` for what the schema cannot see: the engine's own options."""
    create_engine(settings.machine)


class Machine:
    """One engine, both services, and what keeps them known and watched."""

    def __init__(self, settings: Settings, home: str, engine: Engine) -> None:
        self._all_settings = settings
        self._settings = settings.machine
        self._home = home
        self._engine = engine
        self._transfers = TransferWatch(self._settings.kvd_address, settings.tls)
        self._works = WorkTable(engine, self._transfers, max_waiting=self._settings.max_waiting)
        self._power = PowerHold(self._settings, settings.tls)
        self._streams = Streams(self._works, self._power, grace_s=self._settings.reconnect_grace_s)
        self._server = RpcServer(self._settings.listen, SERVICES, tls=settings.tls)
        self._tasks: list[asyncio.Task[None]] = []

    def export_metrics(self) -> None:
        """Put this machine's metrics into the process's registry, once in a process."""
        export(self._works, self._streams, self._transfers)

    def use(self, settings: MachineSettings) -> None:
        """Count by these settings from now on."""
        self._settings = settings
        self._works.max_waiting = settings.max_waiting
        self._streams.grace_s = settings.reconnect_grace_s

    async def start(self, lifecycle: Lifecycle) -> None:
        """Listen first, so that a bad address fails at once; then load; then register."""
        add_PromptServiceServicer_to_server(PromptServicer(self._streams, self._works), self._server.grpc)
        add_TokenServiceServicer_to_server(TokenServicer(self._streams, self._works), self._server.grpc)
        bound = await self._server.start()
        lifecycle.loading("engine", kind=self._settings.engine.kind.value)
        description = self._describe(await self._engine.start(), bound)
        self._streams.description = description
        self._transfers.start(description.engine_id, max(1, description.tensor_parallel))
        self._power.start(description)
        self._tasks.append(asyncio.create_task(self._watch_engine(), name="engine-watch"))
        for router in self._settings.routers:
            registration = keep_registered(router, description, self._works.load, self._all_settings.tls)
            self._tasks.append(asyncio.create_task(registration, name=f"register-{router}"))
        await self._server.set_serving(True)
        lifecycle.ready(bound, home=self._home, model=description.model, engine=description.engine)

    def _describe(self, engine: MachineDescription, bound: Address) -> MachineDescription:
        """Add to the engine's own facts what only this process knows."""
        settings = self._settings
        description = MachineDescription()
        description.CopyFrom(engine)
        identity = MachineIdentity(machine_id=settings.id, incarnation=time.time_ns())
        description.identity.CopyFrom(identity)
        description.address = str(settings.advertise or settings.listen.with_port(bound.port))
        description.home_pool = POOLS[self._home]
        description.node = settings.node
        description.kvd_address = str(settings.kvd_address)
        description.engine_id = engine.engine_id or settings.id
        if settings.model is not None:
            description.tokenizer = engine.tokenizer or str(settings.model.absolute())
            description.model = settings.model_name or engine.model or settings.model.name
        elif settings.model_name is not None:
            description.model = settings.model_name
        return description

    async def serve_until(self, stop: asyncio.Event) -> None:
        """Return at `stop`; raises `EngineError` when the engine died, which a new process cures."""
        stopped = asyncio.create_task(stop.wait())
        watch = self._tasks[0]
        await asyncio.wait([stopped, watch], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if watch.done():
            watch.result()

    async def _watch_engine(self) -> None:
        """Stop taking work while the engine cannot do any, and take it again when it can."""
        while True:
            problem = self._engine.failure()
            if problem is not None and self._engine.dead():
                self._works.refusal = (FAILURE_CAUSE_ENGINE, problem)
                raise EngineError(problem)
            failing = self._works.refusal is not None
            if problem is not None and not failing:
                get_logger().error("engine.unavailable", error=problem)
                self._works.refusal = (FAILURE_CAUSE_ENGINE, problem)
                self._streams.tell_draining(problem, paused=True)
                await self._server.set_serving(False)
            elif problem is None and failing:
                get_logger().info("engine.available")
                self._works.refusal = None
                self._streams.tell_draining("", over=True, paused=True)
                await self._server.set_serving(True)
            await asyncio.sleep(WATCH_S)

    async def drain(self) -> None:
        """Take no new work; let what runs finish and leases end, up to the limit."""
        self._tasks[0].cancel()  # the engine's state no longer decides
        self._works.refusal = (FAILURE_CAUSE_DRAINING, f"{self._settings.id} is draining")
        self._streams.tell_draining("stopping")
        await self._server.set_serving(False)
        try:
            await asyncio.wait_for(self._works.wait_empty(), self._settings.drain_s)
        except TimeoutError:
            get_logger().warning("drain.cut", open=self._works.open, after_s=self._settings.drain_s)

    async def close(self) -> None:
        """Take everything down, whatever state it is in."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with suppress(asyncio.CancelledError, EngineError):  # `serve_until` has raised it
                await task
        await self._streams.close()
        await self._server.stop(STOP_GRACE_S)
        await self._works.cancel_all("the machine stops")
        await self._transfers.close()
        await self._engine.close()
        await self._power.close()
