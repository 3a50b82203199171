"""Runs a compose file's services as plain processes, so that its command lines are tried as they stand.

What Docker would give a container is mapped, and nothing else: a service's name and 0.0.0.0
to a loopback address of its own, a mounted path to a folder, the image's ENV, and the packages
that the image lacks cannot be imported. Health checks and the order of start are the file's.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.compose_file import COMPOSE, ROOT, Dockerfile, ours, requirements_tool, seconds

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

PATIENCE_S = 300.0  # a loaded host is slow, not wrong
PAUSE_S = 0.3  # between two health checks, which cost half a second of a CPU each
GUARD = Path(__file__).parent / "guard"
PROGRAMS = {"python": [sys.executable], "splitwise": [sys.executable, "-m", "splitwise.cli.main"]}
# Packages whose module has another name.
MODULES = {"libucx-cu12": "libucx"}


class Stack:
    """The services of one profile; `only` starts some of them. `folder` must have a short path."""

    def __init__(
        self, content: Mapping[str, Any], profile: str, folder: Path, only: Iterable[str] = ()
    ) -> None:
        self.folder = folder
        chosen = tuple(only)
        self.services = {
            name: service for name, service in ours(content, profile).items() if not chosen or name in chosen
        }
        first, second = divmod(os.getpid(), 250)
        self.addresses = {
            name: f"127.{first % 250 + 1}.{second + 1}.{number}"
            for number, name in enumerate(self.services, 1)
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._images = Dockerfile()
        self._left_out = requirements_tool().LEFT_OUT

    def start(self) -> None:
        """Start all in the order that `depends_on` asks for, then wait until every one is healthy."""
        waiting = dict(self.services)
        while waiting:
            able = [name for name in waiting if not set(waiting[name].get("depends_on", ())) & set(waiting)]
            assert able, f"depends_on goes in a circle: {', '.join(waiting)}"
            for name in able:
                for other, how in waiting.pop(name).get("depends_on", {}).items():
                    if how["condition"] == "service_healthy":
                        self.wait_healthy(other)
                self.launch(name)
        for name in self.services:
            self.wait_healthy(name)

    def launch(self, name: str) -> None:
        """Start one service's process."""
        command = self._command(name, self.services[name]["command"])
        with self.log(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, env=self._environment(name), stdout=log, stderr=log, cwd=self.folder
            )

    def healthy(self, name: str) -> bool:
        """Run the service's health check once."""
        check = self.services[name]["healthcheck"]
        kind, *words = check["test"]
        assert kind == "CMD"
        done = subprocess.run(
            self._command(name, words),
            env=self._environment(name),
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return done.returncode == 0

    def wait_healthy(self, name: str) -> None:
        """Repeat the health check until it succeeds."""
        end = time.monotonic() + PATIENCE_S
        while not self.healthy(name):
            ended = [other for other, process in self.processes.items() if process.poll() is not None]
            assert not ended, f"{ended[0]} ended: {self.tail(ended[0])}"
            assert time.monotonic() < end, "\n".join(
                f"{other}: {self.tail(other)}" for other in self.processes
            )

    def stop(self, name: str) -> int:
        """SIGTERM as `docker stop` does; returns the exit code, or -9 after the grace period."""
        process = self.processes.pop(name)
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(seconds(self.services[name]["stop_grace_period"]))
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def close(self) -> None:
        """End whatever still runs."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.processes.clear()

    def log(self, name: str) -> Path:
        """Return the file with a service's output."""
        return self.folder / f"{name}.log"

    def tail(self, name: str) -> str:
        """Return the end of a service's output."""
        return self.log(name).read_text()[-2000:]

    def volume(self, source: str) -> Path:
        """Return the folder or file that stands for a volume."""
        if source.startswith("."):
            return COMPOSE / source
        if source.startswith("/"):
            return Path(source)
        path = self.folder / source
        path.mkdir(exist_ok=True)
        return path

    def place(self, name: str, text: str) -> str:
        """Put addresses and paths of this host in place of the container's."""
        for other, address in self.addresses.items():
            text = re.sub(rf"(?<![\w-]){re.escape(other)}:(?=\d)", f"{address}:", text)
        text = re.sub(r"(?:0\.0\.0\.0|127\.0\.0\.1):(?=\d)", f"{self.addresses[name]}:", text)
        for mount in self.services[name]["volumes"]:
            source, target = mount.split(":")[:2]
            text = re.sub(rf"(?<!\w){re.escape(target)}(?=/|$)", str(self.volume(source)), text)
        return text

    def _command(self, name: str, words: list[str]) -> list[str]:
        return [*PROGRAMS[words[0]], *(self.place(name, word) for word in words[1:])]

    def _environment(self, name: str) -> dict[str, str]:
        service = self.services[name]
        image = service["build"]["target"]
        packages = self._left_out.get(image, ())
        own = {**self._images.environment(image), **service["environment"]}
        settings = {
            key: self.place(name, value) for key, value in own.items() if key.startswith("SPLITWISE_")
        }
        return {
            **{key: value for key, value in os.environ.items() if not key.startswith("SPLITWISE_")},
            **settings,
            "NUMBA_DISABLE_JIT": "1",  # compiling takes longer than all else here
            "OMP_NUM_THREADS": "1",
            "SPLITWISE_DIE_WITH_PARENT": str(os.getpid()),
            "BLOCKED_PACKAGES": " ".join(MODULES.get(package, package) for package in packages),
            "PYTHONPATH": os.pathsep.join([str(GUARD), str(ROOT)]),
        }
