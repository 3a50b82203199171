"""The router's connection to one machine: a control stream per service, kept open.

Commands are queued and written in order; events are handed on as they come. Whichever
stream breaks first, the whole link is lost, once, with a reason.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import grpc.aio

from splitwise.errors import RemoteError, UnavailableError
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.status import to_exception
from splitwise.rpc.v1.machine_pb2 import (
    CancelWork,
    Hello,
    MachineEvents,
    PowerOrder,
    PromptCommand,
    StartPrompt,
    StartToken,
    TokenCommand,
)
from splitwise.rpc.v1.machine_pb2_grpc import PromptServiceStub, TokenServiceStub
from splitwise.scheduling.events import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from splitwise.config import Address, TlsSettings
    from splitwise.rpc.v1.common_pb2 import LoadReport, MachineDescription

Command = TypeVar("Command", PromptCommand, TokenCommand)
CONNECT_TIMEOUT_S = 3.0
TOGETHER_BYTES = 1 << 20


class _Stream(Generic[Command]):
    """One control stream: a queue of commands, a writer, a reader."""

    def __init__(self, call: Any, hello: Command) -> None:
        self.call: grpc.aio.StreamStreamCall[Command, MachineEvents] = call
        self._commands: list[Command] = [hello]
        self.takes_several = False
        self._wake = asyncio.Event()
        self._wake.set()

    def send(self, command: Command) -> None:
        self._commands.append(command)
        self._wake.set()

    async def write(self) -> None:
        """Write what is queued, in order, as few messages as may be: each costs a system call."""
        while True:
            await self._wake.wait()
            await asyncio.sleep(0)  # the others that are ready in this turn of the event loop
            self._wake.clear()
            commands, self._commands = self._commands, []
            for message in together(commands) if self.takes_several else commands:
                await self.call.write(message)

    async def greet(self) -> MachineDescription:
        """Return the machine's description from its first event."""
        first = await self.call.read()
        if not isinstance(first, MachineEvents):
            await self.call.code()  # raises nothing; waits for the status
            raise UnavailableError(await self.call.details() or "the stream ended before it was ready")
        if not first.events or first.events[0].WhichOneof("event") != "ready":
            raise UnavailableError("the first event of its stream is not ready")
        self.takes_several = first.events[0].ready.takes_several
        return first.events[0].ready


def together(commands: list[Command]) -> Iterator[Command]:
    """Put commands into fewer messages, in order, of about `TOGETHER_BYTES` at most if not of one command."""
    head: Command | None = None
    room = 0
    for command in commands:
        size = command.ByteSize()
        if head is not None and size <= room:
            head.more.append(command)
            room -= size
            continue
        if head is not None:
            yield head
        head, room = command, TOGETHER_BYTES - size
    if head is not None:
        yield head


class MachineLink:
    """Both streams of one machine. `open` it, then `start`; `on_events` and `on_lost` follow."""

    def __init__(
        self, address: Address, tls: TlsSettings, hello: Hello, *, ping_timeout_ms: int | None = None
    ) -> None:
        self.address = address
        self.description: MachineDescription | None = None
        self.load: LoadReport | None = None
        self.load_at = 0.0
        self.heard_at = 0.0
        self.accepted_serial = 0
        self.lost = False
        self._hello = hello
        self._channel = open_channel(address, tls=tls, role=Role.MACHINE, ping_timeout_ms=ping_timeout_ms)
        self._tasks: list[asyncio.Task[None]] = []
        self._prompt: _Stream[PromptCommand]
        self._token: _Stream[TokenCommand]

    async def open(self) -> MachineDescription:
        """Connect and be greeted on both streams; raises `RemoteError`. To be closed in any case."""
        silent = Hello(router_id=self._hello.router_id)  # one stream carries the load reports
        self._prompt = _Stream(
            _without_requests(PromptServiceStub(self._channel).Run)(), PromptCommand(hello=self._hello)
        )
        self._token = _Stream(
            _without_requests(TokenServiceStub(self._channel).Run)(), TokenCommand(hello=silent)
        )
        writers = [asyncio.create_task(stream.write()) for stream in (self._prompt, self._token)]
        self._tasks += writers
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self.description = await self._prompt.greet()
                await self._token.greet()
        except TimeoutError:
            raise UnavailableError(f"no answer from {self.address} in {CONNECT_TIMEOUT_S} s") from None
        except (grpc.aio.AioRpcError, RemoteError) as error:
            known = to_exception(error) if isinstance(error, grpc.aio.AioRpcError) else error
            raise UnavailableError(f"cannot reach the machine at {self.address}: {known.message}") from None
        return self.description

    def start(
        self,
        on_events: Callable[[MachineLink, Phase, MachineEvents], None],
        on_lost: Callable[[MachineLink, str], None],
    ) -> None:
        """Read both streams until one breaks."""

        async def read(phase: Phase, stream: _Stream[Any]) -> None:
            try:
                # The greeting was taken with read(), and one call allows only one way of reading.
                while isinstance(batch := await stream.call.read(), MachineEvents):
                    on_events(self, phase, batch)
                reason = "the machine closed its stream"
            except grpc.aio.AioRpcError as error:
                reason = error.details() or error.code().name
            self._lose(reason, on_lost)

        self._tasks.append(asyncio.create_task(read(Phase.PROMPT, self._prompt)))
        self._tasks.append(asyncio.create_task(read(Phase.TOKEN, self._token)))

    def _lose(self, reason: str, on_lost: Callable[[MachineLink, str], None]) -> None:
        if not self.lost:
            self.lost = True
            on_lost(self, reason)

    def start_prompt(self, start: StartPrompt) -> None:
        """Command a prompt phase."""
        self._prompt.send(PromptCommand(start=start))

    def start_token(self, start: StartToken) -> None:
        """Command a token phase."""
        self._token.send(TokenCommand(start=start))

    def order_power(self, order: PowerOrder) -> None:
        """Say where the machine serves now, and its share of the power budget."""
        self._prompt.send(PromptCommand(power=order))

    def cancel(self, phase: Phase, cancel: CancelWork) -> None:
        """Command the end of one phase of one attempt."""
        if phase is Phase.PROMPT:
            self._prompt.send(PromptCommand(cancel=cancel))
        else:
            self._token.send(TokenCommand(cancel=cancel))

    async def close(self) -> None:
        """Close both streams; the machine cancels what is left on them."""
        self.lost = True
        current = asyncio.current_task()
        tasks = [task for task in self._tasks if task is not current]
        for task in tasks:
            task.cancel()
        self._prompt.call.cancel()
        self._token.call.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.close(None)


def _without_requests(method: Any) -> Callable[[], Any]:
    """Return a stream method to be called without an iterator: commands are written to the call.

    grpc.aio takes that; the stubs' types do not say so.
    """
    run: Callable[[], Any] = method
    return run
