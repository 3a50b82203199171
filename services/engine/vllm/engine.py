"""`VllmEngine`: the engine interface of the machine's services on vLLM's ``AsyncLLM``."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.engine.interface import EngineError, EngineLoad, TransferFailedError, WorkRefusedError
from services.engine.vllm.folder import EngineFolder
from services.engine.vllm.hotline import AdapterEnd
from services.engine.vllm.launch import create_engine, set_environment, wait_for_daemon
from services.engine.vllm.outputs import is_error, token_output
from services.engine.vllm.sampling import prompt_sampling, token_sampling
from services.engine.vllm.transfer import TransferParams
from splitwise.errors import ConfigError
from splitwise.models import read_model_folder
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_UNSPECIFIED, MachineDescription
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.engine.interface import PromptWork, TokenOutput, TokenWork
    from services.engine.vllm.hotline import TransferEnd
    from services.engine.vllm.settings import VllmSettings

HELLO_S = 10.0  # after vLLM says that it is ready, the connector has long said so


class VllmEngine:
    """`services.engine.interface.Engine` on vLLM. `machine_id` is the engine's name at the KV daemon."""

    def __init__(self, settings: VllmSettings, machine_id: str, kvd_socket: Path) -> None:
        self._settings = settings
        self._machine_id = machine_id
        self._kvd_socket = Path(kvd_socket)
        self._folder: EngineFolder | None = None
        self._hotline: AdapterEnd | None = None
        self._llm: AsyncLLM | None = None
        self._description = MachineDescription()

    # ---- life

    async def start(self) -> MachineDescription:
        """Load the model and attach its KV memory; half a minute on a CPU, most of it imports."""
        log = get_logger()
        try:
            model = read_model_folder(self._settings.model)
        except ConfigError as error:
            raise EngineError(str(error)) from error
        self._folder = EngineFolder()
        folder = self._folder.path
        self._hotline = AdapterEnd(folder)
        await self._hotline.start()
        set_environment(self._settings, folder)
        log.info("engine.importing", engine="vllm")
        version = await asyncio.to_thread(_import_vllm)
        await wait_for_daemon(self._kvd_socket)
        log.info("engine.loading", model=model.name, folder=str(model.path))
        try:
            self._llm = await asyncio.to_thread(
                create_engine, self._settings, model, self._machine_id, self._kvd_socket, folder
            )
            hello = await asyncio.wait_for(asyncio.shield(self._hotline.hello), HELLO_S)
        except Exception as error:
            raise EngineError(f"vLLM did not start: {self._start_failure(error)}") from error
        self._description = MachineDescription(
            model=self._settings.model_name or model.name,
            kv_fingerprint=hello["fingerprint"],
            kv_facts=hello["facts"],
            engine_id=self._machine_id,
            max_model_len=hello["max_model_len"],
            kv_blocks=hello["kv_blocks"],
            block_tokens=hello["block_tokens"],
            block_bytes=hello["block_bytes"],
            max_running=self._settings.max_running,
            engine=f"vllm {version}",
            tokenizer=str(model.path),
            vocab_size=hello["vocab_size"],
            tensor_parallel=self._settings.tensor_parallel,
        )
        log.info("engine.ready", kv_blocks=hello["kv_blocks"], max_model_len=hello["max_model_len"])
        return self._description

    def _start_failure(self, error: Exception) -> str:
        """Prefer what the core said to vLLM's own error, which only points to its log."""
        hello = self._hotline.hello if self._hotline is not None else None
        if hello is not None and hello.done() and "error" in hello.result():
            return str(hello.result()["error"])
        return f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        """Stop the engine core, which gives its KV memory back, and remove the engine's folder."""
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # or it reports the core's end as a failure
            await asyncio.to_thread(llm.shutdown)
        if self._hotline is not None:
            await self._hotline.close()
        if self._folder is not None:
            self._folder.remove()

    def failure(self) -> str | None:
        """Say why the engine cannot take work."""
        if self._llm is None or self._hotline is None:
            return "the engine was not started or is stopped"
        if self.dead():
            return "vLLM's engine core died; see its messages above"
        if self._hotline.figures().daemon_away:
            return f"the KV daemon at {self._kvd_socket} is away"
        return None

    def dead(self) -> bool:
        """Whether the engine core is gone; a daemon that is away comes back."""
        llm, hotline = self._llm, self._hotline
        return llm is None or hotline is None or llm.errored or hotline.core_lost

    def load(self) -> EngineLoad:
        """Return the engine core's own figures."""
        if self._hotline is None or self._llm is None:
            return EngineLoad(0, self._description.kv_blocks, 0)
        figures = self._hotline.figures()
        return EngineLoad(
            figures.blocks_used,
            self._description.kv_blocks,
            figures.preemptions,
            figures.batch_requests,
            figures.batch_tokens,
        )

    # ---- work

    async def run_prompt(self, work: PromptWork) -> AsyncIterator[TokenOutput]:
        """Yield the first token; then end when the daemon has read all blocks (without transfer: at once).

        Closing before that gives the transfer up, and returns when the blocks are free.
        """
        room = self._check(work.token_ids)
        params = None
        if work.transfer is not None:
            params = TransferParams(
                "prompt",
                work.transfer.transfer_id.hex(),
                work.transfer.generation,
                work.mode,
                work.lease_ms,
            )
        sampling = prompt_sampling(work.sampling, _extra(params))
        name = f"{work.key.request_id}.{work.key.attempt}.prompt"
        last = params is None or room == 1
        async with (
            self._transfer(params) as end,
            self._request(name, work.token_ids, sampling, end) as outputs,
        ):
            async for output in outputs:
                if is_error(output):
                    raise EngineError(f"vLLM ended the prompt phase: {output.outputs[0].finish_reason}")
                yield token_output(output, last=last)
            if end is not None:
                await end.ended.wait()

    async def run_token(self, work: TokenWork) -> AsyncIterator[TokenOutput]:
        """Yield the second and later tokens; closing returns when no peer writes the blocks any more."""
        room = self._check(work.token_ids)
        params = TransferParams(
            "token",
            work.transfer.transfer_id.hex(),
            work.transfer.generation,
            TRANSFER_MODE_UNSPECIFIED,
            work.lease_ms,
            work.source_kvd_address,
            work.source_engine_id,
            work.traceparent,
        )
        sampling = token_sampling(work.sampling, room, _extra(params))
        name = f"{work.key.request_id}.{work.key.attempt}.token"
        async with (
            self._transfer(params) as end,
            self._request(name, work.token_ids, sampling, end) as outputs,
        ):
            async for output in outputs:
                if is_error(output):
                    raise await self._transfer_failure(end)
                yield token_output(output, last=True)

    def _check(self, token_ids: list[int]) -> int:
        """Refuse what vLLM would refuse, or worse take; return how many tokens may follow."""
        limit = self._description.max_model_len
        if not token_ids:
            raise WorkRefusedError("token_ids: the prompt is empty")
        if len(token_ids) >= limit:
            raise WorkRefusedError(
                f"token_ids: {len(token_ids)} prompt tokens leave no room for output; "
                f"the limit is {limit} in all"
            )
        largest = max(token_ids)
        if largest >= self._description.vocab_size:
            raise WorkRefusedError(
                f"token_ids[{token_ids.index(largest)}]: {largest} is outside the vocabulary "
                f"of {self._description.vocab_size}"
            )
        return limit - len(token_ids)

    @asynccontextmanager
    async def _transfer(self, params: TransferParams | None) -> AsyncIterator[TransferEnd | None]:
        """Follow a transfer; leaving early gives it up and waits for its end."""
        if params is None or self._hotline is None:
            yield None
            return
        end = self._hotline.watch(params.name)
        try:
            yield end
        finally:
            if not end.ended.is_set() and end.opened:
                self._hotline.give_up(params.name)
                await end.ended.wait()
            self._hotline.forget(params.name)

    @asynccontextmanager
    async def _request(
        self, name: str, token_ids: list[int], sampling: vllm.SamplingParams, end: TransferEnd | None
    ) -> AsyncIterator[AsyncIterator[vllm.RequestOutput]]:
        """Run one request in vLLM; leaving early aborts it."""
        llm, hotline = self._llm, self._hotline
        if llm is None or hotline is None:
            raise EngineError("the engine is stopped")
        # Shielded: a request whose sending was cut off could not be aborted, for want of its id.
        adding = asyncio.ensure_future(_add(llm, name, token_ids, sampling))
        try:
            queue = await asyncio.shield(adding)
        except asyncio.CancelledError:
            queue = await adding
            if end is not None:
                end.opened = True
            await llm.abort(queue.request_id, internal=True)
            hotline.ring()
            raise
        if end is not None:
            end.opened = True
        hotline.ring()
        outputs = _drain(queue)
        try:
            yield outputs
        finally:
            await outputs.aclose()
            await llm.abort(queue.request_id, internal=True)
            queue.close()
            hotline.ring()

    async def _transfer_failure(self, end: TransferEnd | None) -> Exception:
        """Return why vLLM gave up a token request; the hotline says so a moment before vLLM does."""
        if end is None or self._hotline is None or self._hotline.core_lost:
            return EngineError("vLLM's engine core died")
        await end.ended.wait()
        if end.failure is None:
            return EngineError("vLLM ended the token phase with an error of its own")
        return TransferFailedError(end.failure, corrupt=end.corrupt)


async def _add(llm: AsyncLLM, name: str, token_ids: list[int], sampling: vllm.SamplingParams) -> Any:
    """Give one request to vLLM; returns the queue of its outputs."""
    from vllm.exceptions import VLLMClientError
    from vllm.v1.engine.exceptions import EngineDeadError

    prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
    try:
        return await llm.add_request(name, prompt, sampling)
    except EngineDeadError as error:
        raise EngineError("vLLM's engine core died") from error
    except (VLLMClientError, ValueError) as error:
        raise WorkRefusedError(str(error)) from error


async def _drain(queue: Any) -> AsyncGenerator[vllm.RequestOutput]:
    """Yield a request's outputs as vLLM's own ``generate`` does."""
    from vllm.v1.engine.exceptions import EngineDeadError

    finished = False
    while not finished:
        try:
            output = queue.get_nowait() or await queue.get()
        except EngineDeadError as error:
            raise EngineError("vLLM's engine core died") from error
        finished = output.finished
        yield output


def _extra(params: TransferParams | None) -> dict[str, Any] | None:
    return None if params is None else {"kv_transfer_params": params.to_vllm()}


def _import_vllm() -> str:
    import vllm
    import vllm.v1.engine.async_llm  # the slow part of starting, done where it is announced

    return str(vllm.__version__)
