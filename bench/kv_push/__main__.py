"""How fast KV blocks are pushed, beside a memory copy and raw TCP: ``python -m bench.kv_push``.

In each round every size runs through all ways in turn, so that the noise of the machine meets
them alike; printed are medians. `push` is what an engine sees: from the layer announced as
written until the token side hears `Received`, through two real daemons over UCX, checksums
off (`push+sum`: on). `copy` is the same through one daemon. `memcpy` copies the same blocks
between two shared mappings, `tcp` sends the same bytes over one loopback connection. With
``--nixl`` that library takes its turn as well (see nixl_peer.py); both its sides spin, ours sleep.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from bench.kv_push.nixl_peer import NixlPush, nixl_is_installed
from services.kvd.client import KvdClient, Received, push_entry
from services.kvd.memfd import MemfdMemory
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TransferRef
from splitwise.rpc.v1.kvd_pb2 import KvGeometry

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 1 << 20
SIZES = ((MIB, 64 << 10), (16 * MIB, 64 << 10), (16 * MIB, MIB), (64 * MIB, 64 << 10), (64 * MIB, MIB))
MEMORY = 128 * MIB
IDLE_S = 5.0


class Daemon:
    """One KV daemon process."""

    def __init__(self, folder: str, name: str, *flags: str) -> None:
        self.socket = f"{folder}/{name}.sock"
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.kvd", "--node", name, "--socket", self.socket),
                *("--listen", "127.0.0.1:0", "--telemetry.log_format", "json", *flags),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if "service.ready" in line:
                self.address = str(json.loads(line)["address"])
                break
        threading.Thread(target=self._process.stderr.read, daemon=True).start()

    def cpu_s(self) -> float:
        """CPU seconds used so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self) -> None:
        """End it."""
        self._process.terminate()
        self._process.wait()


class Engine:
    """KV memory of one layer at a daemon."""

    def __init__(self, daemon: Daemon, block_bytes: int) -> None:
        self.name = secrets.token_hex(4)
        self.memory = MemfdMemory(MEMORY)
        self.memory.buffer[:] = os.urandom(MIB) * (MEMORY // MIB)
        self.client = KvdClient(daemon.socket, self.name)
        blocks = MEMORY // block_bytes
        shape = KvGeometry(
            layers=1, num_blocks=blocks, block_bytes_per_layer=block_bytes, layer_stride_bytes=MEMORY,
            block_stride_bytes=block_bytes, block_tokens=16, dtype="bfloat16", layout="x", model="m",
            backend="x", tp_size=1,
        )  # fmt: skip
        self.client.attach(shape, self.memory)

    def close(self) -> None:
        """Detach."""
        self.client.close()
        self.memory.close()


def push(source: Engine, target: Engine, at: str, here: list[int], there: list[int]) -> float:
    """One transfer; seconds from the layer's announcement to `Received`."""
    ref = TransferRef(transfer_id=secrets.token_bytes(16), generation=1)
    target.client.reserve(ref, 0, there, source_kvd_address=at, source_engine_id=source.name)
    source.client.expect(ref, 1, TRANSFER_MODE_LAYERWISE)
    time.sleep(0.02)  # the grant arrives while the prompt would be computed
    begin = time.perf_counter()
    source.client.push_plan([push_entry(ref, 0, here, final=True)])
    source.client.layer_done()
    source.client.first_token(ref, 1)
    notices = target.client.wait(60.0)
    seconds = time.perf_counter() - begin
    assert isinstance(notices[0], Received), notices
    source.client.wait(60.0)
    return seconds


def memcpy(source: Engine, target: Engine, block: int, here: list[int], there: list[int]) -> float:
    """Copy the same blocks between two mappings."""
    read, write = memoryview(source.memory.buffer), memoryview(target.memory.buffer)
    begin = time.perf_counter()
    for one, other in zip(here, there, strict=True):
        write[other * block : (other + 1) * block] = read[one * block : (one + 1) * block]
    return time.perf_counter() - begin


def raw_tcp(source: Engine, size: int) -> float:
    """Send as many bytes over one loopback connection; until the receiver has them."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    into = memoryview(bytearray(size))

    def receive() -> None:
        got = 0
        while got < size:
            got += receiver.recv_into(into[got:])

    with sender, receiver:
        thread = threading.Thread(target=receive)
        begin = time.perf_counter()
        thread.start()
        sender.sendall(memoryview(source.memory.buffer)[:size])
        thread.join()
        return time.perf_counter() - begin


def scattered(size: int, block: int) -> tuple[list[int], list[int]]:
    """Blocks in an order without neighbours."""
    count, all_blocks = size // block, MEMORY // block
    return [(number * 2) % all_blocks for number in range(count)], [
        all_blocks - 1 - (number * 2) % all_blocks for number in range(count)
    ]


def measure(rounds: int, *, nixl: bool) -> None:
    """Run everything in turns and print the table."""
    peer = NixlPush(MEMORY) if nixl else None
    ways = (*WAYS, "nixl") if peer is not None else WAYS
    with tempfile.TemporaryDirectory() as folder:
        plain = [Daemon(folder, name, "--checksum", "false") for name in ("a", "b")]
        summed = [Daemon(folder, name) for name in ("c", "d")]
        try:
            against = [f"push : {way}" for way in ways[3:]]
            print(f"| {' | '.join(['transfer / block', *ways, *against])} |")
            print("|---" * (1 + len(ways) + len(against)) + "|")
            for size, block in SIZES:
                print(row(plain, summed, peer, size, block, rounds))
            hand_over(plain, rounds)
            before = [daemon.cpu_s() for daemon in plain]
            time.sleep(IDLE_S)
            used = max(daemon.cpu_s() - was for daemon, was in zip(plain, before, strict=True))
            print(f"\nidle daemon: {100 * used / IDLE_S:.1f} % of a core")
        finally:
            for daemon in (*plain, *summed):
                daemon.stop()
            if peer is not None:
                peer.close()


WAYS = ("push", "push+sum", "copy", "memcpy", "tcp")


def row(
    plain: list[Daemon], summed: list[Daemon], peer: NixlPush | None, size: int, block: int, rounds: int
) -> str:
    """Measure one size."""
    homes = (plain[0], plain[1], plain[0], summed[0], summed[1])
    source, far, near, checked_source, checked = (Engine(home, block) for home in homes)
    here, there = scattered(size, block)
    ways: dict[str, Callable[[], float]] = {
        "push": lambda: push(source, far, plain[0].address, here, there),
        "push+sum": lambda: push(checked_source, checked, summed[0].address, here, there),
        "copy": lambda: push(source, near, plain[0].address, here, there),
        "memcpy": lambda: memcpy(source, near, block, here, there),
        "tcp": lambda: raw_tcp(source, size),
    }
    if peer is not None:
        ways["nixl"] = lambda: peer.push(block, here, there)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            seconds = run()
            if number:  # the first round pays for pages and connections
                times[way].append(seconds)
    for engine in (source, far, near, checked_source, checked):
        engine.close()
    rate = {way: size / statistics.median(times[way]) / 1e9 for way in ways}
    numbers = [*rate.values(), *(rate["push"] / other for other in list(rate.values())[3:])]
    label = f"{size // MIB} MiB / {block >> 10} KiB"
    return f"| {' | '.join([label, *(f'{number:.2f}' for number in numbers)])} |"


def hand_over(plain: list[Daemon], rounds: int) -> None:
    """Time the hand-over of one small block: all that is not bytes."""
    source, target = Engine(plain[0], 4096), Engine(plain[1], 4096)
    times = [push(source, target, plain[0].address, [1], [1]) for _ in range(5 * rounds)]
    source.close()
    target.close()
    p50, p99 = (statistics.quantiles(times, n=100)[at] * 1e3 for at in (49, 98))
    print(f"\nhand-over of one 4 KiB block: p50 {p50:.2f} ms, p99 {p99:.2f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--nixl", action="store_true", help="NIXL beside it (see nixl_peer.py)")
    chosen = parser.parse_args()
    if chosen.nixl and not nixl_is_installed():
        parser.error("--nixl needs: pip install --no-deps nixl nixl-cu12")
    measure(chosen.rounds, nixl=chosen.nixl)
