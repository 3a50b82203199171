"""An engine without a model: real time, real KV bytes, real transfers, made-up text.

Each iteration takes as long as the performance model says, writes the KV of its tokens
into shared memory, lets the KV daemon push it layer by layer, and makes every token from
all the KV bytes that the request holds at that moment.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from services.engine.emulated.machine import EmulatedMachine
from services.engine.emulated.power import EmulatedPower
from services.engine.emulated.sampling import refuse_unserved
from services.engine.interface import EngineError, EngineLoad, WorkRefusedError
from services.kvd.client import AttachError, KvdClient
from splitwise.errors import ConfigError
from splitwise.kv.geometry import SHARED_FACTS
from splitwise.perf.catalog import shipped
from splitwise.perf.model import PerformanceModelError
from splitwise.rpc.v1.common_pb2 import MachineDescription, MachineIdentity

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from pathlib import Path

    from services.engine.emulated.machine import Iteration
    from services.engine.emulated.sequence import Sequence
    from services.engine.emulated.settings import EmulatedSettings
    from services.engine.interface import PromptWork, TokenOutput, TokenWork

VERSION = "emulated-1"
_CATCH_UP = 0.5  # seconds behind its own schedule beyond which an engine starts a new one


class EmulatedEngine:
    """`services.engine.interface.Engine` without a model.

    `iteration_seconds(prompt_tokens, prompt_sequences, sequences, context)` gives the
    emulated time of one iteration; `machine_id` is the engine's name at the daemon.
    """

    def __init__(
        self,
        settings: EmulatedSettings,
        machine_id: str,
        kvd_socket: str | Path,
        iteration_seconds: Callable[[int, int, int, int], float] | None = None,
    ) -> None:
        self.settings = settings
        self.client = KvdClient(str(kvd_socket), machine_id)
        self._seconds = iteration_seconds or _modelled(settings)
        self._power = EmulatedPower(settings)
        self._machine: EmulatedMachine | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = "not started"
        self._schedule = 0.0  # when the running iteration ends, on the loop's clock

    async def start(self) -> MachineDescription:
        """Map the KV memory, attach it to the daemon, describe the machine."""
        machine = EmulatedMachine(self.settings, self.client)
        try:
            attached = await asyncio.to_thread(
                self.client.attach, machine.store.geometry, machine.store.memory
            )
        except AttachError as error:
            machine.store.close()
            raise EngineError(str(error)) from error
        self._machine = machine
        self._failure = None
        asyncio.get_running_loop().add_reader(self.client.fileno(), self._take_notices)
        self._task = asyncio.create_task(self._run(machine), name=f"emulated-{self.client.engine_id}")
        settings = self.settings
        return MachineDescription(
            identity=MachineIdentity(machine_id=self.client.engine_id, incarnation=self.client.incarnation),
            model=settings.model,
            kv_fingerprint=attached.fingerprint,
            engine_id=self.client.engine_id,
            max_model_len=settings.max_model_len,
            kv_blocks=settings.kv_blocks,
            block_tokens=settings.block_tokens,
            block_bytes=settings.block_tokens * settings.token_bytes_per_layer * settings.layers,
            max_running=settings.max_running,
            engine=VERSION,
            vocab_size=settings.vocab_size,
            kv_facts=[f"{name}={getattr(machine.store.geometry, name)}" for name in SHARED_FACTS],
        )

    async def run_prompt(self, work: PromptWork) -> AsyncGenerator[TokenOutput, None]:
        """Yield the first token; the iterator ends once the daemon needs the KV no more.

        Closing it before that gives the KV up; closing returns when all is free.
        """
        machine = self._check(work)
        sequence = machine.submit_prompt(work)
        self._wake.set()
        try:
            output = await sequence.outputs.get()
            if output is not None:
                yield output
                await sequence.freed.wait()
            elif sequence.error is not None:
                raise sequence.error
        finally:
            await self._end(sequence)

    async def run_token(self, work: TokenWork) -> AsyncGenerator[TokenOutput, None]:
        """Yield the second and later tokens; closing returns when all is free."""
        machine = self._check(work)
        sequence = machine.submit_token(work)
        self._wake.set()
        try:
            while (output := await sequence.outputs.get()) is not None:
                yield output
            if sequence.error is not None:
                raise sequence.error
        finally:
            await self._end(sequence)

    async def _end(self, sequence: Sequence) -> None:
        if self._machine is not None:
            self._machine.abort(sequence)
            self._wake.set()
        await sequence.freed.wait()

    def load(self) -> EngineLoad:
        """Return the current queue figures."""
        if self._machine is None:
            return EngineLoad(0, self.settings.kv_blocks, 0)
        machine = self._machine
        requests, tokens = machine.batch_size
        return EngineLoad(
            machine.allocator.used, machine.allocator.total, machine.preemptions, requests, tokens
        )

    def failure(self) -> str | None:
        """Say why no work can be taken, or None."""
        return self._failure or self.client.failure()

    def dead(self) -> bool:
        """Whether only a new engine can help; a daemon that is away comes back."""
        return self._failure is not None

    async def close(self) -> None:
        """Fail what runs, detach from the daemon, free the memory."""
        machine, self._machine = self._machine, None
        if machine is None:
            return
        self._failure = "closed"
        asyncio.get_running_loop().remove_reader(self.client.fileno())
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await asyncio.to_thread(self.client.close)
        machine.fail_all("the engine was closed")
        machine.store.close()

    # ---- inside

    def _check(self, work: PromptWork | TokenWork) -> EmulatedMachine:
        """Refuse what this engine can never serve; return the machine."""
        if self._machine is None or self._failure is not None:
            raise EngineError(f"emulated engine {self.client.engine_id}: {self._failure}")
        length, settings = len(work.token_ids), self.settings
        if not 1 <= length < settings.max_model_len:
            raise WorkRefusedError(
                f"token_ids: {length} tokens; the prompt must have 1 to {settings.max_model_len - 1}"
            )
        largest = min(length + max(work.sampling.max_tokens, 1), settings.max_model_len)
        capacity = settings.kv_blocks * settings.block_tokens
        if largest > capacity:
            raise WorkRefusedError(
                f"token_ids: prompt and output of {largest} tokens do not fit {capacity} tokens of KV memory"
            )
        for index, token in enumerate(work.token_ids):
            if not 0 <= token < settings.vocab_size:
                raise WorkRefusedError(
                    f"token_ids[{index}]: {token} is not below the vocabulary's {settings.vocab_size}"
                )
        refuse_unserved(work.sampling)
        return self._machine

    def _take_notices(self) -> None:
        if self._machine is not None:
            for notice in self.client.poll():
                self._machine.take_notice(notice)
            self._wake.set()

    async def _run(self, machine: EmulatedMachine) -> None:
        try:
            while True:
                self._wake.clear()
                iteration = machine.begin()
                if iteration is None:
                    self._schedule = 0.0
                    self._power.idle()
                    await self._wake.wait()
                    continue
                await self._iterate(machine, iteration)
        except Exception as error:  # noqa: BLE001 - whatever it was, the engine is of no more use
            self._failure = f"the engine failed: {type(error).__name__}: {error}"
            machine.fail_all(self._failure)

    async def _iterate(self, machine: EmulatedMachine, iteration: Iteration) -> None:
        """Compute one batch; layers end one after the other only where someone sees it."""
        batch, layers = iteration.batch, self.settings.layers
        seconds = self.settings.time_scale * self._seconds(
            batch.prompt_tokens, batch.prompt_sequences, batch.sequences, batch.context
        )
        seconds *= self._power.begin(batch.prompt_tokens, batch.sequences)
        now = asyncio.get_running_loop().time()
        start = self._schedule if now - self._schedule < _CATCH_UP else now
        self._schedule = start + seconds
        for layer in range(layers):
            if iteration.pushes and seconds > 0.0:
                await self._until(start + seconds * (layer + 1) / layers)
            machine.write_layer(iteration, layer)
        await self._until(self._schedule)
        machine.finish(iteration)

    async def _until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - asyncio.get_running_loop().time()))


def _modelled(settings: EmulatedSettings) -> Callable[[int, int, int, int], float]:
    """Return the catalogue's phase times for what the settings emulate; raises `ConfigError`."""
    try:
        model = shipped().performance(settings.performance_model, settings.hardware, settings.tensor_parallel)
    except PerformanceModelError as error:
        raise ConfigError(f"machine.engine.options: {error}") from error
    return model.iteration_seconds
