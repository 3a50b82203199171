"""What routing costs: our router beside vllm-router, both in front of engines that cost nothing.

    python -m bench.router [--vllm-router PATH] [--rounds 5] [--streams 64]

Machines, HTTP servers and clients are processes of their own. All routers take turns in the
same run, and figures are medians over the rounds. Per core means: per second of CPU time that
the router's process used, since the cores are shared with the load. Columns:

added ms      time to one token, routed minus direct (to a machine's stream, to the HTTP server)
requests/s    of one token each, `--streams` at a time;  per core
tokens/s      of `--tokens` tokens each, `--streams` at a time;  per core

vllm-router forwards HTTP to one server in its plain mode, its fastest way; ours drives a
prompt machine and a token machine, merges two streams and makes the text. The time of a
decision alone: ``python -m bench.router.decisions``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import socket
import statistics
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections import defaultdict
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

import aiohttp
import psutil

from bench.router.load import GrpcClient, HttpClient, MachineClient, latencies, throughput

if TYPE_CHECKING:
    from bench.router.load import Client

ONE_TOKEN_REQUESTS = 200


@dataclass
class Way:
    """One way from a client to an engine; `direct` is the same without the router `pid`."""

    name: str
    pid: int
    client: Client
    direct: Client


async def start(
    stack: AsyncExitStack, *command: str, stdout: int = DEVNULL, stderr: int | None = None
) -> asyncio.subprocess.Process:
    """Start a process that ends with this one's run."""
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=stdout, stderr=stderr)

    async def stop() -> None:
        if process.returncode is None:
            process.terminate()
        await process.wait()

    stack.push_async_callback(stop)
    return process


async def started(stack: AsyncExitStack, *arguments: str) -> str:
    """Start one of the mock processes and return the address that it prints."""
    process = await start(stack, sys.executable, "-m", *arguments, stdout=PIPE)
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


async def our_router(stack: AsyncExitStack) -> tuple[int, str, str, str]:
    """Start two instant machines and a router; return its pid and addresses, and a machine's."""
    machines = [
        await started(stack, "tests.support.instant_machine", "--name", home, "--home", home)
        for home in ("prompt", "token")
    ]
    options = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--telemetry.log_format", "json"]
    router = await start(
        stack, sys.executable, "-m", "services.router", *options, "--machines", json.dumps(machines),
        stderr=PIPE,
    )  # fmt: skip
    assert router.stderr is not None
    joined, addresses = 0, {}
    while joined < len(machines) or not addresses:
        line = json.loads(await router.stderr.readline())
        joined += line["event"] == "machine.joined"
        addresses = line if line["event"] == "service.ready" else addresses
    asyncio.get_running_loop().create_task(_forget(router.stderr))
    return router.pid, addresses["address"], addresses["http"], machines[0]


async def _forget(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass


async def vllm_router(stack: AsyncExitStack, binary: str, server: str) -> tuple[int, str]:
    """Start vllm-router before an HTTP server; return its pid and address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["--worker-urls", f"http://{server}", "--host", "127.0.0.1", "--port", str(port)]
    router = await start(stack, binary, *command, "--policy", "round_robin", "--log-level", "error")
    async with aiohttp.ClientSession() as session:
        for _ in range(200):
            if router.returncode is not None:
                raise SystemExit(f"{binary} ended with {router.returncode}")
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as response:
                    if response.status == 200:
                        return router.pid, f"127.0.0.1:{port}"
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise SystemExit(f"{binary} does not serve on port {port}")


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its children so far."""
    process = psutil.Process(pid)
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(time.user + time.system for time in times)


async def measure(way: Way, options: argparse.Namespace, found: dict[str, list[float]]) -> None:
    """Let one way take its turn."""
    routed = await latencies(way.client, ONE_TOKEN_REQUESTS)
    direct = await latencies(way.direct, ONE_TOKEN_REQUESTS)
    found["added ms"].append(1e3 * (statistics.median(routed) - statistics.median(direct)))
    for name, requests, tokens in (
        ("requests", options.requests, 1),
        ("tokens", 2 * options.streams, options.tokens),
    ):
        before = cpu_seconds(way.pid)
        seconds = await throughput(way.client, streams=options.streams, requests=requests, tokens=tokens)
        used = cpu_seconds(way.pid) - before
        found[f"{name}/s"].append(requests * tokens / seconds)
        found[f"{name}/s per core"].append(requests * tokens / used)


async def run(options: argparse.Namespace) -> None:
    """Start everything, measure in turns, print the table."""
    async with AsyncExitStack() as stack:
        pid, grpc_address, http_address, machine = await our_router(stack)
        server = await started(stack, "bench.router.mock")

        def connected(client: Client) -> Client:
            stack.push_async_callback(client.close)
            return client

        direct = connected(MachineClient(machine))
        ways = [
            Way("splitwise, gRPC", pid, connected(GrpcClient(grpc_address)), direct),
            Way("splitwise, HTTP", pid, connected(HttpClient(http_address)), direct),
        ]
        if options.vllm_router is not None:
            peer_pid, peer = await vllm_router(stack, options.vllm_router, server)
            peer_direct = connected(HttpClient(server))
            ways.append(Way("vllm-router, HTTP", peer_pid, connected(HttpClient(peer)), peer_direct))
        found: dict[str, dict[str, list[float]]] = {way.name: defaultdict(list) for way in ways}
        for number in range(1 + options.rounds):
            for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                began = time.perf_counter()
                await measure(way, options, found[way.name] if number else defaultdict(list))
                print(f"round {number}: {way.name} {time.perf_counter() - began:.1f} s", file=sys.stderr)
    report(found)


def report(found: dict[str, dict[str, list[float]]]) -> None:
    """Print medians, with the ratio to the last way's where there are several."""
    columns = list(next(iter(found.values())))
    print(f"{'':20}" + "".join(f"{name:>20}" for name in columns))
    for name, figures in found.items():
        print(f"{name:20}" + "".join(f"{statistics.median(figures[c]):20,.3f}" for c in columns))
    peer = list(found)[-1]
    for name in list(found)[:-1] if peer.startswith("vllm") else []:
        ratios = [statistics.median(found[name][c]) / statistics.median(found[peer][c]) for c in columns]
        print(f"{name + ' / peer':20}" + "".join(f"{ratio:20.2f}" for ratio in ratios))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--vllm-router", default=shutil.which("vllm-router"), help="its command, if not on PATH"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--requests", type=int, default=2000)
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
