"""A KV daemon as a process, and what it says of itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import grpc

from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.rpc.v1.kvd_pb2_grpc import KvdPeerStub, KvdStub
from tests.services.kvd.fake_engine import PATIENCE

if TYPE_CHECKING:
    import signal
    from pathlib import Path


class DaemonProcess:
    """`start` again after `kill` keeps its socket and address."""

    def __init__(self, folder: Path, node: str, *flags: str) -> None:
        self.node = node
        self.folder = folder
        self.socket = str(folder / f"{node}.sock")
        self.address = "127.0.0.1:0"
        self.flags = flags
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> DaemonProcess:
        log_path = self.folder / f"{self.node}-{time.monotonic_ns()}.log"
        with log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "services.kvd", "--node", self.node, "--socket", self.socket),
                    *("--listen", self.address, "--telemetry.log_format", "json", *self.flags),
                ],
                stderr=log,
                env={**os.environ, "SPLITWISE_DIE_WITH_PARENT": str(os.getpid())},
            )
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and self.process.poll() is None:
            for line in log_path.read_text().splitlines():
                if "service.ready" in line:
                    self.address = json.loads(line)["address"]
                    return self
            time.sleep(0.02)
        raise AssertionError(f"{self.node} did not start: {log_path.read_text()}")

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(PATIENCE)

    def stop(self) -> int:
        """SIGTERM; returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(PATIENCE)

    # ---- over gRPC

    def describe(self) -> pb.KvdDescription:
        with grpc.insecure_channel(self.address) as channel:
            return KvdStub(channel).Describe(pb.DescribeKvdRequest(), timeout=PATIENCE)

    def peer(self, method: str, request: Any) -> Any:
        with grpc.insecure_channel(self.address) as channel:
            return getattr(KvdPeerStub(channel), method)(request, timeout=PATIENCE)

    def until_empty(self) -> pb.KvdDescription:
        """Wait until no transfer is open and no block granted."""
        return self.until(
            lambda told: told.transfers_open == 0 and all(e.blocks_granted == 0 for e in told.engines)
        )

    def until(self, holds: Any) -> pb.KvdDescription:
        deadline = time.monotonic() + PATIENCE
        while True:
            told = self.describe()
            if holds(told):
                return told
            assert time.monotonic() < deadline, f"{self.node} has come to rest as {told}"
            time.sleep(0.02)
