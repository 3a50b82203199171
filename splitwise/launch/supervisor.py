"""Starts a planned cluster, restarts what dies, and takes everything down in order."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from splitwise.client import AsyncClient
from splitwise.config import Address, load_settings
from splitwise.errors import ConfigError, ExitCode, RemoteError, SplitwiseError
from splitwise.launch.plan import ClusterOptions, ProcessSpec, environment, plan_cluster
from splitwise.launch.process import ManagedProcess, State
from splitwise.launch.state import runtime_folder, write_state

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from splitwise.launch.lines import LogLine

FIRST_PAUSE_S, LONGEST_PAUSE_S, SOUND_AFTER_S = 0.5, 30.0, 60.0
STOP_GRACE_S = 20.0  # longer than the drain (plan.DRAIN_S) and the closing of an engine
SERVING_TIMEOUT_S = 60.0


class Watcher(Protocol):
    """Who is told what happens, such as the terminal."""

    def changed(self, process: ManagedProcess) -> None:
        """A process entered another state."""

    def logged(self, process: ManagedProcess, line: LogLine) -> None:
        """A process wrote a line."""

    def died(self, process: ManagedProcess, pause_s: float | None) -> None:
        """A process died; it is started again after `pause_s`, or not at all (None)."""


class StartError(SplitwiseError):
    """A process ended before it was ready; `process` has its last lines."""

    def __init__(self, process: ManagedProcess) -> None:
        self.process = process
        self.configuration = process.exit_code == ExitCode.CONFIG
        super().__init__(f"{process.name} ended with exit code {process.exit_code} before it was ready")


class Supervisor:
    """A running cluster. Use as ``async with``: entering starts it, leaving takes it down."""

    def __init__(self, options: ClusterOptions, watcher: Watcher) -> None:
        self._options = options
        self._watcher = watcher
        self._known: dict[str, str] = {}
        self._stopping = False
        self._news = asyncio.Event()
        self._keepers: list[asyncio.Task[None]] = []
        self._state_file: Path | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="up-", dir=runtime_folder()))
        self._specs = plan_cluster(options, self._folder)
        self._environment = environment(options, self._folder)
        self.processes = [
            ManagedProcess(spec.name, watcher.logged, self._changed, machines=spec.machines)
            for spec in self._specs
        ]
        self.seconds_to_ready = 0.0

    @property
    def router(self) -> Address:
        """The router's address, once it was ready."""
        return Address.parse(self._known["router"])

    @property
    def http(self) -> Address | None:
        """The gateway's address, when it is on."""
        text = self._known.get("router/http")
        return None if text is None else Address.parse(text)

    async def __aenter__(self) -> Self:
        """Start all; returns when requests are served. Raises `StartError`, leaving nothing behind."""
        began = time.monotonic()
        try:
            async with asyncio.TaskGroup() as group:
                for spec, process in zip(self._specs, self.processes, strict=True):
                    group.create_task(self._start_first(spec, process))
            await self._wait_serving()
        except BaseException as error:
            await self.stop()
            if isinstance(error, BaseExceptionGroup):
                raise error.exceptions[0] from None
            raise
        self.seconds_to_ready = time.monotonic() - began
        self._state_file = write_state(self.router, self.http)
        self._keepers = [
            asyncio.create_task(self._keep(spec, process), name=f"keep-{spec.name}")
            for spec, process in zip(self._specs, self.processes, strict=True)
        ]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Take everything down: the router first, daemons last. May be called again."""
        self._stopping = True
        for keeper in self._keepers:
            keeper.cancel()
        if self._state_file is not None:
            self._state_file.unlink(missing_ok=True)
        stages = sorted({spec.stage for spec in self._specs}, reverse=True)
        for stage in stages:
            pairs = zip(self._specs, self.processes, strict=True)
            await asyncio.gather(*(p.stop(STOP_GRACE_S) for spec, p in pairs if spec.stage == stage))
        shutil.rmtree(self._folder, ignore_errors=True)

    def _changed(self, process: ManagedProcess) -> None:
        if process.state is State.READY:
            self._note_addresses(process)
        self._news.set()
        self._watcher.changed(process)

    def _note_addresses(self, process: ManagedProcess) -> None:
        """Remember where it listens, so that it comes back there after a restart."""
        if isinstance(address := process.ready.get("address"), str):
            self._known[process.name] = address
        if isinstance(http := process.ready.get("http"), str):
            self._known[f"{process.name}/http"] = http

    async def _start_first(self, spec: ProcessSpec, process: ManagedProcess) -> None:
        await self._until(lambda: all(name in self._known for name in spec.after))
        process.start(spec.arguments(self._known), self._environment)
        await self._until(lambda: process.state in (State.READY, State.EXITED))
        if process.state is State.EXITED:
            raise StartError(process)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()

    async def _wait_serving(self) -> None:
        """Wait until the router can serve a model: its machines have registered."""
        tls = load_settings(file=self._options.config).settings.tls
        async with AsyncClient(self.router, tls=tls) as client:
            end = time.monotonic() + SERVING_TIMEOUT_S
            while time.monotonic() < end:
                try:
                    if any(model.serving for model in await client.models(timeout=5)):
                        return
                except RemoteError:
                    pass
                await asyncio.sleep(0.05)
        raise ConfigError("all processes are ready, but the router found no pair of machines: see its log")

    async def _keep(self, spec: ProcessSpec, process: ManagedProcess) -> None:
        """Start the process again whenever it dies, later each time it dies soon."""
        pause = FIRST_PAUSE_S
        while True:
            await process.wait_exit()
            if self._stopping:
                return
            if process.exit_code == ExitCode.CONFIG:
                self._watcher.died(process, None)
                return
            if time.monotonic() - process.started > SOUND_AFTER_S:
                pause = FIRST_PAUSE_S
            self._watcher.died(process, pause)
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
            process.start(spec.arguments(self._known), self._environment)
