"""``python -m services.kvd.probe``: one real put between two UCX contexts, told as JSON.

Used by `splitwise doctor`: says which UCX is loaded, which transports two daemons of this
host would use, and whether this UCX can do RDMA.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import mmap
import sys

from services.kvd.ucx import Ucx, UcxError
from splitwise.config import load_settings
from splitwise.errors import ConfigError, ExitCode

SIZE = 1 << 20
TIMEOUT_S = 20.0
RDMA = ("rc_", "dc_", "ud_", "rc/", "gga_")


async def probe(library: str, transports: str, devices: str) -> dict[str, object]:
    """Put 1 MiB from one context's memory into the other's and compare."""
    source, target = (Ucx(library, transports, devices) for _ in range(2))
    buffers = [mmap.mmap(-1, SIZE) for _ in range(2)]
    buffers[0].write(bytes(range(256)) * (SIZE // 256))
    views = [ctypes.c_char.from_buffer(buffer) for buffer in buffers]
    source.start()
    target.start()
    addresses = [ctypes.addressof(view) for view in views]
    memory = [ucx.register(address, SIZE) for ucx, address in zip((source, target), addresses, strict=True)]
    endpoint = source.connect(target.address())
    key = endpoint.unpack_rkey(memory[1].rkey())
    try:
        endpoint.put(memory[0], key, [addresses[0]], [addresses[1]], [SIZE])
        await asyncio.wait_for(endpoint.flush(), TIMEOUT_S)
        used = endpoint.transports()
        arrived = buffers[0][:] == buffers[1][:]
    finally:
        endpoint.destroy_rkey(key)
        await endpoint.close()
        for registration in memory:
            registration.close()
        await source.close()
        await target.close()
    return {
        "version": source.version,
        "library": source.library,
        "transports": used,
        "rdma": any(name.startswith(RDMA) for name in used),
        "arrived": arrived,
    }


def main() -> int:
    """Print the result of the probe; the exit code says whether the bytes arrived."""
    try:
        ucx = load_settings("kvd", sys.argv[1:]).settings.kvd.ucx
        told = asyncio.run(probe(str(ucx.library or ""), ucx.tls or "", ucx.net_devices or ""))
    except (UcxError, ConfigError, TimeoutError) as error:
        print(json.dumps({"error": str(error) or f"no answer within {TIMEOUT_S} s"}))
        return ExitCode.FAILED
    print(json.dumps(told))
    return ExitCode.OK if told["arrived"] else ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
