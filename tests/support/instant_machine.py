"""A machine without an engine: its control streams are real, its tokens cost nothing.

    python -m tests.support.instant_machine --name t0 --home token

What a router costs is measured against such machines, and how much it can hold. One line on
stdout names the address; list it in ``router.machines``. All running requests get one token
per iteration, in one message, as from a real machine. `--hold-until N`: no request gets its
second token before N requests have asked for theirs. `--pace`: seconds between iterations.
SIGUSR1 makes it stand still for `STALL_S` as busy Python does: nothing of it runs but gRPC's threads.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import signal
import sys
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from splitwise.config import Address
from splitwise.rpc.channels import RpcServer
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_LENGTH,
    POOL_PROMPT,
    POOL_TOKEN,
    LoadReport,
    MachineDescription,
    MachineIdentity,
)
from splitwise.rpc.v1.machine_pb2_grpc import (
    PromptServiceServicer,
    TokenServiceServicer,
    add_PromptServiceServicer_to_server,
    add_TokenServiceServicer_to_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

STALL_S = 2.0
FIRST, LATER = ord("a"), ord("b")
HOMES = {"prompt": POOL_PROMPT, "token": POOL_TOKEN}
SERVICES = ("splitwise.v1.PromptService", "splitwise.v1.TokenService")


@dataclass
class Running:
    """One request in its token phase."""

    work: pb.WorkRef
    left: int


@dataclass
class Stream:
    """One control stream: what is to be said on it, and who gets tokens on it."""

    events: list[pb.MachineEvent] = field(default_factory=list)
    running: dict[tuple[str, int], Running] = field(default_factory=dict)
    wake: asyncio.Event = field(default_factory=asyncio.Event)

    def say(self, **event: Any) -> None:
        self.events.append(pb.MachineEvent(**event))
        self.wake.set()


class InstantMachine(PromptServiceServicer, TokenServiceServicer):
    """Both services of one machine."""

    def __init__(
        self, name: str, home: str, *, hold_until: int = 0, pace: float = 0.0, max_running: int = 1 << 20
    ) -> None:
        self.description = MachineDescription(
            identity=MachineIdentity(machine_id=name, incarnation=time.time_ns()),
            home_pool=HOMES[home], model="instant", kv_fingerprint="instant", kvd_address="127.0.0.1:1",
            engine_id=name, engine="instant", node="node", max_model_len=1 << 20, kv_blocks=1 << 24,
            block_tokens=16, max_running=max_running, vocab_size=256,
            takes_several=True,
        )  # fmt: skip
        self._hold_until = hold_until
        self._asked = 0
        self._pace = pace

    async def serve(self, address: str = "127.0.0.1:0") -> RpcServer:
        """Listen, and return the server; its address is in the description."""
        server = RpcServer(Address.parse(address), SERVICES)
        add_PromptServiceServicer_to_server(self, server.grpc)
        add_TokenServiceServicer_to_server(self, server.grpc)
        self.description.address = str(await server.start())
        return server

    async def Run(self, commands: AsyncIterator[Any], _context: Any) -> AsyncIterator[pb.MachineEvents]:
        """Serve one control stream of either service."""
        hello = (await anext(commands)).hello
        stream = Stream()
        stream.say(ready=self.description)
        tasks = [asyncio.create_task(self._read(commands, stream))]
        if hello.load_report_ms:
            tasks.append(asyncio.create_task(self._report(stream, hello.load_report_ms / 1e3)))
        try:
            while True:
                await stream.wake.wait()
                stream.wake.clear()
                while message := self._next(stream):
                    yield message
                    await asyncio.sleep(self._pace)
        finally:
            for task in tasks:
                task.cancel()

    def _next(self, stream: Stream) -> pb.MachineEvents | None:
        """One iteration: what is to be said, and a token for each running request."""
        events, stream.events = stream.events, []
        if self._asked >= self._hold_until:
            for key, request in list(stream.running.items()):
                request.left -= 1
                tokens = pb.Tokens(work=request.work, ids=[LATER])
                if not request.left:
                    tokens.finish = FINISH_REASON_LENGTH
                    del stream.running[key]
                events.append(pb.MachineEvent(tokens=tokens))
        return pb.MachineEvents(events=events) if events else None

    async def _read(self, commands: AsyncIterator[Any], stream: Stream) -> None:
        async for message in commands:
            for command in (message, *message.more):
                self._execute(command, stream)

    def _execute(self, command: Any, stream: Stream) -> None:
        kind = command.WhichOneof("command")
        if kind == "cancel":
            stream.running.pop(_key(command.cancel.work), None)
        elif isinstance(command, pb.PromptCommand):
            work = command.start.work
            finish = 0 if command.start.HasField("transfer") else FINISH_REASON_LENGTH
            stream.say(accepted=pb.Accepted(work=work))
            stream.say(tokens=pb.Tokens(work=work, ids=[FIRST], finish=finish))  # type: ignore[arg-type]
        else:
            work = command.start.work
            stream.running[_key(work)] = Running(work, command.start.sampling.max_tokens - 1)
            self._asked += 1
            stream.say(accepted=pb.Accepted(work=work))
            stream.say(kv_received=pb.KvReceived(work=work))

    async def _report(self, stream: Stream, every_s: float) -> None:
        sequence = 0
        while True:
            sequence += 1
            stream.say(load=LoadReport(sequence=sequence, kv_blocks_total=1 << 24))
            await asyncio.sleep(every_s)


def _stall() -> None:
    """Sleep without giving up the interpreter's lock."""
    ctypes.PyDLL(None).usleep(int(STALL_S * 1e6))
    print(f"stalled for {STALL_S} s", flush=True)


def _key(work: pb.WorkRef) -> tuple[str, int]:
    return work.request_id, work.attempt


async def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--name", required=True)
    parser.add_argument("--home", choices=HOMES, required=True)
    parser.add_argument("--hold-until", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--max-running", type=int, default=1 << 20)
    options = parser.parse_args()
    machine = InstantMachine(
        options.name,
        options.home,
        hold_until=options.hold_until,
        pace=options.pace,
        max_running=options.max_running,
    )
    server = await machine.serve()
    print(machine.description.address, flush=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _stall)
    await asyncio.to_thread(sys.stdin.read)  # ends with whoever started it
    await server.stop(0)


if __name__ == "__main__":
    asyncio.run(_main())
