"""``python -m services.kvd.probe``: real puts between two processes, both ways, told as JSON.

Used by `splitwise doctor`: says which UCX is loaded, which transports two daemons of this
host would use, whether they are RDMA, and how fast bytes go each way. The other process is
this module, too (``--peer``); the two speak JSON lines over its standard input and output.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import json
import os
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from services.kvd.memfd import MemfdMemory
from services.kvd.ucx import Ucx, UcxError
from splitwise.config import load_settings
from splitwise.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from splitwise.config.schema import UcxSettings

SIZE = 8 << 20
ROUNDS = 8
TIMEOUT_S = 20.0
PEER = "--peer"
RDMA = ("rc_", "dc_", "ud_", "rc/", "gga_")


class Side:
    """One UCX context with registered memory, and how the other side reaches it."""

    def __init__(self, settings: UcxSettings) -> None:
        self.ucx = Ucx(str(settings.library or ""), settings.tls or "", settings.net_devices or "")
        self.ucx.start()
        self._memory = MemfdMemory(2 * SIZE, "splitwise-probe")
        # What is sent lies in the first half, what the other side puts in the second.
        self._view = (ctypes.c_char * (2 * SIZE)).from_buffer(self._memory.buffer)
        self._base = ctypes.addressof(self._view)
        self._registration = self.ucx.register(self._base, 2 * SIZE)

    def describe(self) -> dict[str, Any]:
        """Return what the other side needs to put into this memory."""
        return {
            "address": base64.b64encode(self.ucx.address()).decode(),
            "rkey": base64.b64encode(self._registration.rkey()).decode(),
            "base": self._base,
        }

    async def push(self, other: dict[str, Any], pattern: bytes) -> dict[str, Any]:
        """Put the pattern into the other side's memory, several times; returns speed and transports."""
        ctypes.memmove(self._base, pattern * (SIZE // len(pattern)), SIZE)
        endpoint = self.ucx.connect(base64.b64decode(other["address"]))
        key = endpoint.unpack_rkey(base64.b64decode(other["rkey"]))
        try:
            await self._put(endpoint, key, other)  # connects
            begun = time.perf_counter()
            for _ in range(ROUNDS):
                await self._put(endpoint, key, other)
            seconds = time.perf_counter() - begun
            return {"bytes_per_second": ROUNDS * SIZE / seconds, "transports": endpoint.transports()}
        finally:
            endpoint.destroy_rkey(key)
            await endpoint.close()

    async def _put(self, endpoint: Any, key: Any, other: dict[str, Any]) -> None:
        endpoint.put(self._registration, key, [self._base], [other["base"] + SIZE], [SIZE])
        await asyncio.wait_for(endpoint.flush(), TIMEOUT_S)

    def arrived(self, pattern: bytes) -> bool:
        """Say whether the other side's pattern is in its place, every byte of it."""
        return ctypes.string_at(self._base + SIZE, SIZE) == pattern * (SIZE // len(pattern))

    async def close(self) -> None:
        """Give everything back."""
        self._registration.close()
        await self.ucx.close()
        del self._view
        self._memory.close()


THERE, BACK = bytes(range(256)), bytes(reversed(range(256)))


async def probe(settings: UcxSettings, arguments: Sequence[str]) -> dict[str, Any]:
    """Put into the peer's memory and have it put into ours."""
    side = Side(settings)
    try:
        async with _peer(arguments) as (listen, say):
            other = await listen()
            say(side.describe())
            there = await side.push(other, THERE)
            say({"pushed": True})
            back = await listen()
            back["arrived"], there["arrived"] = side.arrived(BACK), back.pop("saw")
        transports = sorted({*there["transports"], *back["transports"]})
        return {
            "version": side.ucx.version,
            "library": side.ucx.library,
            "transports": transports,
            "rdma": any(name.startswith(RDMA) for name in transports),
            "arrived": there["arrived"] and back["arrived"],
            "ways": {"there": there, "back": back},
        }
    finally:
        await side.close()


@asynccontextmanager
async def _peer(arguments: Sequence[str]) -> AsyncIterator[Any]:
    """Run the other process; gives a function to hear a line of it and one to say one."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.kvd.probe", PEER, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    reader, writer = process.stdout, process.stdin
    if reader is None or writer is None:
        raise UcxError("the other process has no pipes")

    async def listen() -> dict[str, Any]:
        line = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        told: dict[str, Any] = json.loads(line) if line else {"error": "the other process ended"}
        if "error" in told:
            raise UcxError(told["error"])
        return told

    def say(message: dict[str, Any]) -> None:
        writer.write(json.dumps(message).encode() + b"\n")

    try:
        yield listen, say
    finally:
        if process.returncode is None:
            writer.close()
            try:
                await asyncio.wait_for(process.wait(), TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def be_peer(settings: UcxSettings) -> None:
    """Be the other process: told over standard input, telling over standard output."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(0, "rb", 0))
    side = Side(settings)
    try:
        print(json.dumps(side.describe()), flush=True)
        other = json.loads(await reader.readline())
        await reader.readline()  # pushed
        saw = side.arrived(THERE)
        print(json.dumps({**await side.push(other, BACK), "saw": saw}), flush=True)
        await reader.read()  # until the first process has looked
    finally:
        await side.close()


def main() -> int:
    """Print the result of the probe; the exit code says whether the bytes arrived."""
    arguments = [word for word in sys.argv[1:] if word != PEER]
    try:
        ucx = load_settings("kvd", arguments).settings.kvd.ucx
        if PEER in sys.argv:
            asyncio.run(be_peer(ucx))
            return ExitCode.OK
        told = asyncio.run(probe(ucx, arguments))
    except (UcxError, ConfigError, TimeoutError) as error:
        print(json.dumps({"error": str(error) or f"no answer within {TIMEOUT_S:g} s"}), flush=True)
        return ExitCode.FAILED
    print(json.dumps(told))
    return ExitCode.OK if told["arrived"] else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
