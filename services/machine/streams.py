"""The control streams that are open now, and what all of them are told.

Both servicers use one `Streams`: it greets a router, feeds commands to the work table,
sends events and load reports, and cancels what came on a stream when that breaks.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, TypeVar

from services.machine.outbox import Outbox
from splitwise.errors import InvalidRequestError, UnavailableError
from splitwise.rpc.status import abort
from splitwise.rpc.v1.machine_pb2 import (
    FAILURE_CAUSE_DRAINING,
    Draining,
    MachineEvent,
    MachineEvents,
    PromptCommand,
    TokenCommand,
)
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from typing import Any

    import grpc.aio

    from services.machine.power import PowerHold
    from services.machine.works import WorkTable
    from splitwise.rpc.v1.common_pb2 import MachineDescription
    from splitwise.rpc.v1.machine_pb2 import Hello, PowerOrder
    from splitwise.scheduling.events import Phase

    Context = grpc.aio.ServicerContext[Any, MachineEvents]

HELLO_TIMEOUT_S = 10.0
Command = TypeVar("Command", PromptCommand, TokenCommand)


class Streams:
    """All routers' streams of this machine. `description` is None until the engine is loaded."""

    def __init__(self, works: WorkTable, power: PowerHold, *, grace_s: float) -> None:
        self._works = works
        self._power = power
        self.grace_s = grace_s
        self._open: set[Outbox] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._none_open = asyncio.Event()
        self._none_open.set()
        self._over = False
        self.description: MachineDescription | None = None

    @property
    def open(self) -> int:
        """Control streams of both services that are open."""
        return len(self._open)

    def tell_draining(self, reason: str, *, over: bool = False, paused: bool = False) -> None:
        """Say on every stream that no new work is taken, or that it is again (`over`).

        `paused`: not by intention, so that requests may wait until it passes.
        """
        for outbox in self._open:
            outbox.add(MachineEvent(draining=Draining(reason=reason, over=over, paused=paused)))

    def order_power(self, outbox: Outbox, order: PowerOrder) -> None:
        """Take what a stream's router says about this machine's power."""
        if outbox in self._open:
            self._power.order(outbox, order)

    async def close(self) -> None:
        """End every stream after what is queued on it, and take no other."""
        self._over = True
        for outbox in list(self._open):
            outbox.close()
        for task in list(self._closing):
            task.cancel()
        await self._none_open.wait()

    async def run(
        self,
        phase: Phase,
        commands: AsyncIterator[Command],
        context: Context,
        execute: Callable[[Outbox, Command], None],
    ) -> AsyncIterator[MachineEvents]:
        """Serve one control stream of either service until one end closes it."""
        # Read before refused, or the router gets an internal error of grpc's in place of the status.
        hello = await self._hello(commands, context)
        if self.description is None or self._over:
            await abort(context, UnavailableError("the machine is loading or stops", retry_after=1.0))
        outbox = Outbox()
        ready = MachineEvent(ready=self.description)
        ready.ready.takes_several = True
        outbox.add(ready)
        if self._works.refusal is not None:
            cause, reason = self._works.refusal
            paused = cause != FAILURE_CAUSE_DRAINING
            outbox.add(MachineEvent(draining=Draining(reason=reason, paused=paused)))
        self._open.add(outbox)
        self._none_open.clear()
        log = get_logger().bind(router=hello.router_id, phase=phase.value)
        log.info("stream.opened")
        tasks = [asyncio.create_task(_read(commands, outbox, execute))]
        if hello.load_report_ms:
            tasks.append(asyncio.create_task(self._report_load(outbox, hello.load_report_ms / 1000)))
        try:
            async for batch in outbox.batches():
                yield batch
        finally:
            outbox.close()
            self._open.discard(outbox)
            self._power.drop(outbox)
            if not self._open:
                self._none_open.set()
            for task in tasks:
                task.cancel()
            log.info("stream.closed", overflowed=outbox.overflowed)
            self._drop_later(outbox)

    async def _hello(self, commands: AsyncIterator[Command], context: Context) -> Hello:
        try:
            first = await asyncio.wait_for(anext(commands), HELLO_TIMEOUT_S)
        except (StopAsyncIteration, TimeoutError):
            first = None
        if first is None or first.WhichOneof("command") != "hello":
            await abort(context, InvalidRequestError("command: the first on a stream must be hello"))
        return first.hello

    async def _report_load(self, outbox: Outbox, every_s: float) -> None:
        while True:
            load = self._works.load()
            self._power.add_to(load, outbox)
            outbox.add(MachineEvent(load=load))
            await asyncio.sleep(every_s)

    def _drop_later(self, outbox: Outbox) -> None:
        """Cancel a broken stream's work after the grace period; its router starts it elsewhere."""

        async def drop() -> None:
            await asyncio.sleep(self.grace_s)
            self._works.drop(outbox, "the router's stream broke")

        task = asyncio.create_task(drop())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)


async def _read(
    commands: AsyncIterator[Command], outbox: Outbox, execute: Callable[[Outbox, Command], None]
) -> None:
    """Execute commands until the router closes its half; then the stream ends."""
    try:
        async for command in commands:
            execute(outbox, command)
            for further in command.more:
                execute(outbox, further)
    finally:
        outbox.close()
