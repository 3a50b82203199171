"""A router, two daemons and a machine of each phase as processes, each with a certificate of its own."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import grpc.aio

from splitwise.config import Address, TlsSettings
from splitwise.launch.emulate import FLEET, parse_groups, write_fleet
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1 import common_pb2, router_pb2
from splitwise.rpc.v1.router_pb2_grpc import RouterStub
from tests.services.gateway.live_cluster import PATIENCE, Process

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_certificates.sh"
ENGINE: dict[str, Any] = {"time_scale": 0.05}


def make_certificates(folder: Path, *words: str, days: str = "2") -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "DAYS": days}
    return subprocess.run(
        [str(SCRIPT), str(folder), *words], env=environment, capture_output=True, text=True, check=False
    )


def tls_of(folder: Path, name: str, ca: Path | None = None) -> TlsSettings:
    """Return the settings with NAME's pair; `ca` is another folder whose CA is trusted."""
    return TlsSettings(
        ca=(ca or folder) / "ca.pem", certificate=folder / f"{name}.pem", key=folder / f"{name}.key"
    )


def flags(tls: TlsSettings) -> list[str]:
    values = {"ca": tls.ca, "certificate": tls.certificate, "key": tls.key}
    return [word for name, path in values.items() for word in (f"--tls.{name}", str(path))]


class TlsCluster:
    """Prompt machine and daemon on node a, token machine and daemon on node b."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.certificates = folder / "certificates"
        made = make_certificates(self.certificates, *Role, "machine=gpu-1", "kvd=gpu-1-kvd")
        assert made.returncode == 0, made.stderr
        self.router = Process(folder / "router.log")
        self.kvds = {node: Process(folder / f"kvd-{node}.log") for node in "ab"}
        self.fleet = Process(folder / "fleet.log")
        self._started: list[Process] = []

    def tls(self, name: str) -> TlsSettings:
        return tls_of(self.certificates, name)

    async def start(self) -> None:
        await asyncio.gather(
            self._start(
                self.router, "router", "-m", "services.router", "--http-listen", "127.0.0.1:0", "--listen"
            ),
            *(
                self._start(
                    *(self.kvds[node], name, "-m", "services.kvd", "--node", node),
                    *("--socket", str(self.folder / f"{node}.sock"), "--listen"),
                )
                for node, name in (("a", "kvd"), ("b", "gpu-1-kvd"))
            ),
        )
        self.router_address = Address.parse((await self.router.ready())["address"])
        self.kvd_addresses = {
            node: Address.parse((await process.ready())["address"]) for node, process in self.kvds.items()
        }
        entries = []
        for node, group, name in (("a", "1xH100:prompt", "machine"), ("b", "1xH100:token", "gpu-1")):
            file = self.folder / f"fleet-{node}.json"
            write_fleet(
                file,
                parse_groups([group]),
                routers=[self.router_address],
                kvd_socket=self.folder / f"{node}.sock",
                kvd_address=self.kvd_addresses[node],
                node=node,
                options=ENGINE,
            )
            (entry,) = json.loads(file.read_text())
            entries.append({**entry, "arguments": [*entry["arguments"], *flags(self.tls(name))]})
        file = self.folder / "fleet.json"
        file.write_text(json.dumps(entries))
        self._started.append(self.fleet)
        await self.fleet.start(*FLEET, str(file))
        await self._until_serving()

    async def _start(self, process: Process, name: str, *arguments: str) -> None:
        self._started.append(process)
        log = ("--telemetry.log_format", "json")
        await process.start(*arguments, "127.0.0.1:0", *log, *flags(self.tls(name)))

    async def _until_serving(self) -> None:
        end = time.monotonic() + PATIENCE
        async with open_channel(self.router_address, tls=self.tls("client"), role=Role.ROUTER) as channel:
            while True:
                cluster = await RouterStub(channel).DescribeCluster(router_pb2.DescribeClusterRequest())
                if [machine.state for machine in cluster.machines] == ["serving"] * 2:
                    self.machines = {
                        machine.description.identity.machine_id: Address.parse(machine.description.address)
                        for machine in cluster.machines
                    }
                    return
                assert time.monotonic() < end, (cluster, self.logs())
                await asyncio.sleep(0.05)

    async def refusal(self, call: Any) -> tuple[grpc.StatusCode, str]:
        """Make a call that must fail; returns its status and message."""
        try:
            if hasattr(call, "__aiter__"):
                async for message in call:
                    raise AssertionError(f"answered with {message}")
            else:
                raise AssertionError(f"answered with {await call}")
        except grpc.aio.AioRpcError as error:
            return error.code(), error.details() or ""
        raise AssertionError("answered with an empty stream")

    def logs(self) -> str:
        return "\n".join(file.read_text() for file in sorted(self.folder.glob("*.log")))

    async def stop(self) -> None:
        for process in reversed(self._started):
            await process.stop()


def ask(ids: list[int], count: int) -> router_pb2.GenerateRequest:
    request = router_pb2.GenerateRequest(
        sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    )
    request.token_ids.ids.extend(ids)
    return request
