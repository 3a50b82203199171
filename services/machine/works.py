"""All work of one machine: started, counted, cancelled and answered in one place.

A work item is one phase of one attempt. Whatever happens to it, it is answered exactly once
on the stream that it came on (its tokens, or `failed`), and only when everything it held on
this machine is free; the exception is a prompt whose first token is out, whose KV cache is
kept until it was delivered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING

from services.engine.interface import EngineError, TransferFailedError, WorkKey, WorkRefusedError
from services.machine import metrics
from services.machine.convert import failed_event, prompt_work, token_work, tokens_event, work_key, work_ref
from splitwise.rpc.v1.common_pb2 import LoadReport
from splitwise.rpc.v1.machine_pb2 import (
    FAILURE_CAUSE_CANCELLED,
    FAILURE_CAUSE_ENGINE,
    FAILURE_CAUSE_INVALID,
    FAILURE_CAUSE_OVERLOADED,
    FAILURE_CAUSE_TRANSFER,
    FAILURE_CAUSE_TRANSFER_CORRUPT,
    Accepted,
    FailureCause,
    KvReceived,
    MachineEvent,
)
from splitwise.scheduling.events import Phase
from splitwise.telemetry import get_logger
from splitwise.telemetry.tracing import NO_SPAN, start_span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from services.engine.interface import Engine, EngineLoad, PromptWork, TokenOutput, TokenWork
    from services.machine.outbox import Outbox
    from services.machine.transfers import TransferWatch
    from splitwise.rpc.v1.kvd_pb2 import TransferReport
    from splitwise.rpc.v1.machine_pb2 import CancelWork, StartPrompt, StartToken, WorkRef
    from splitwise.telemetry.tracing import Span

Slot = tuple[Phase, WorkKey]
REPORT_WAIT_S = 0.1
"""How long a request's last token waits for the daemon's report on its transfer. The report is
sent before the first of these tokens is made; it is late only for answers of a few tokens, and
then what the transfer cost would be missing from the answer's summary."""


def _generator(outputs: AsyncIterator[TokenOutput]) -> AsyncGenerator[TokenOutput, None]:
    """Return an engine's iterator as the generator that it must be to be closed."""
    if not isinstance(outputs, AsyncGenerator):
        raise EngineError("the engine's outputs cannot be closed: it must return async generators")
    return outputs


@dataclass(eq=False)
class Work:
    """One phase of one attempt on this machine."""

    phase: Phase
    key: WorkKey
    outbox: Outbox
    prompt_tokens: int
    span: Span = NO_SPAN
    began: float = field(default_factory=monotonic)
    started: bool = False  # it made a token
    kv_received: bool = False
    reported: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # by the daemon
    cancelled: str | None = None
    alive: bool = False  # its task has begun to run
    task: asyncio.Task[None] | None = field(default=None, repr=False)


class WorkTable:
    """The work of both phases, from all routers, around one engine."""

    def __init__(self, engine: Engine, transfers: TransferWatch, *, max_waiting: int) -> None:
        self._engine = engine
        self._transfers = transfers
        self.max_waiting = max_waiting
        self._works: dict[Slot, Work] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._reports = 0
        self.refusal: tuple[FailureCause.ValueType, str] | None = None
        self.tokens_made = dict.fromkeys(Phase, 0)
        self.prompt_tokens_done = 0

    # -- commands

    def start_prompt(self, outbox: Outbox, start: StartPrompt) -> None:
        """Begin a prompt phase, or answer why not."""
        try:
            item = prompt_work(start)
        except ValueError as error:
            _refuse(outbox, Phase.PROMPT, start.work, FAILURE_CAUSE_INVALID, str(error))
            return
        work = Work(Phase.PROMPT, item.key, outbox, len(item.token_ids), _span(Phase.PROMPT, start))
        self._start(work, start.work, self._run_prompt(work, item))

    def start_token(self, outbox: Outbox, start: StartToken) -> None:
        """Begin a token phase, or answer why not."""
        span = _span(Phase.TOKEN, start)
        try:
            item = token_work(start, span.traceparent)
        except ValueError as error:
            _refuse(outbox, Phase.TOKEN, start.work, FAILURE_CAUSE_INVALID, str(error))
            return
        work = Work(Phase.TOKEN, item.key, outbox, len(item.token_ids), span)
        self._start(work, start.work, self._run_token(work, item))

    def cancel(self, phase: Phase, command: CancelWork) -> None:
        """Stop one work item; one that is over, or cancelled already, is left alone."""
        work = self._works.get((phase, work_key(command.work)))
        if work is not None:
            self._cancel(work, command.reason or "cancelled by the router")

    def drop(self, outbox: Outbox, reason: str) -> None:
        """Stop everything that came on a stream that broke."""
        for work in [work for work in self._works.values() if work.outbox is outbox]:
            self._cancel(work, reason)

    async def cancel_all(self, reason: str) -> None:
        """Stop everything and return when all of it is free."""
        for work in list(self._works.values()):
            self._cancel(work, reason)
        await self._empty.wait()

    async def wait_empty(self) -> None:
        """Return when no work and no lease is left."""
        await self._empty.wait()

    @property
    def open(self) -> int:
        """Work items that are not over, leases included."""
        return len(self._works)

    def items(self) -> list[Work]:
        """Return the work that is not over; may be called from any thread."""
        return list(self._works.values())

    def engine_load(self) -> EngineLoad:
        """Return the engine's own figures."""
        return self._engine.load()

    def load(self) -> LoadReport:
        """Return the queues as this service counts them."""
        prompts = [w for w in self._works.values() if w.phase is Phase.PROMPT and not w.started]
        tokens = [w for w in self._works.values() if w.phase is Phase.TOKEN]
        engine = self._engine.load()
        self._reports += 1
        return LoadReport(
            sequence=self._reports,
            prompt_requests=len(prompts),
            prompt_tokens=sum(work.prompt_tokens for work in prompts),
            token_requests=len(tokens),
            token_waiting=sum(not work.started for work in tokens),
            kv_blocks_used=engine.kv_blocks_used,
            kv_blocks_total=engine.kv_blocks_total,
            preemptions=engine.preemptions,
        )

    # -- one work item's life

    def _start(self, work: Work, ref: WorkRef, run: Coroutine[None, None, None]) -> None:
        refusal = self._refusal(work)
        if refusal is not None:
            run.close()
            _refuse(work.outbox, work.phase, ref, *refusal)
            work.span.end(error=metrics.OUTCOMES[refusal[0]])
            return
        self._works[work.phase, work.key] = work
        self._empty.clear()
        work.outbox.add(MachineEvent(accepted=Accepted(work=ref)))
        work.task = asyncio.create_task(self._live(work, run))

    def _refusal(self, work: Work) -> tuple[FailureCause.ValueType, str] | None:
        if self.refusal is not None:
            return self.refusal
        if (work.phase, work.key) in self._works:
            return FAILURE_CAUSE_INVALID, "work: this attempt runs here already"
        waiting = sum(not other.started for other in self._works.values())
        if waiting >= self.max_waiting:
            return FAILURE_CAUSE_OVERLOADED, f"{waiting} requests wait here; the limit is {self.max_waiting}"
        return None

    async def _live(self, work: Work, run: Coroutine[None, None, None]) -> None:
        """Run to the end and answer a failure; cancellation is an end like any other."""
        work.alive = True
        try:
            if work.cancelled is not None:  # before it began
                run.close()
                self._fail(work, FAILURE_CAUSE_CANCELLED, work.cancelled)
                return
            await run
            metrics.WORK.labels(work.phase.value, metrics.FINISHED).inc()
        except asyncio.CancelledError:
            reason = work.cancelled or "the machine stops"
            self._fail(work, FAILURE_CAUSE_CANCELLED, reason)
        except WorkRefusedError as error:
            self._fail(work, FAILURE_CAUSE_INVALID, str(error))
        except TransferFailedError as error:
            corrupt = FAILURE_CAUSE_TRANSFER_CORRUPT if error.corrupt else FAILURE_CAUSE_TRANSFER
            self._fail(work, corrupt, str(error))
        except EngineError as error:
            self._fail(work, FAILURE_CAUSE_ENGINE, str(error))
        except Exception as error:  # noqa: BLE001 - whatever an engine raises, the router is told
            get_logger().exception("work.failed", request_id=work.key.request_id, phase=work.phase.value)
            self._fail(work, FAILURE_CAUSE_ENGINE, f"{type(error).__name__}: {error}")
        finally:
            work.span.end()
            self._works.pop((work.phase, work.key), None)
            if not self._works:
                self._empty.set()

    def _fail(self, work: Work, cause: FailureCause.ValueType, message: str) -> None:
        _refuse(work.outbox, work.phase, work_ref(work.key), cause, message)
        work.span.end(error=metrics.OUTCOMES[cause])

    def _cancel(self, work: Work, reason: str) -> None:
        if work.cancelled is None and work.task is not None:
            work.cancelled = reason
            # A task that is cancelled before it began never runs, and would never give its work back.
            if work.alive:
                work.task.cancel()

    async def _run_prompt(self, work: Work, item: PromptWork) -> None:
        transfer = item.transfer
        if transfer is None:
            async with aclosing(_generator(self._engine.run_prompt(item))) as outputs:
                async for output in outputs:
                    self._send(work, output)
            return
        self._transfers.open_lease(transfer)
        try:
            async with aclosing(_generator(self._engine.run_prompt(item))) as outputs:
                async for output in outputs:
                    self._send(work, output)
            if not await self._transfers.lease_end(transfer, item.lease_ms / 1000):
                await self._transfers.revoke(transfer, "the lease ran out")
        finally:
            if self._transfers.close_lease(transfer) and work.started:
                # The engine is done with it; only the daemon can still give the blocks back.
                await self._transfers.revoke(transfer, work.cancelled or "the prompt phase failed")

    async def _run_token(self, work: Work, item: TokenWork) -> None:
        self._transfers.listen(item.transfer, lambda report: self._received(work, report))
        try:
            async with aclosing(_generator(self._engine.run_token(item))) as outputs:
                async for output in outputs:
                    if not work.kv_received:  # a token proves it; the report may be late
                        work.kv_received = True
                        work.outbox.add(MachineEvent(kv_received=KvReceived(work=work_ref(work.key))))
                    if output.finish is not None and not work.reported.is_set():
                        await _at_most(REPORT_WAIT_S, work.reported)
                    self._send(work, output)
        finally:
            self._transfers.forget(item.transfer)

    def _send(self, work: Work, output: TokenOutput) -> None:
        if not work.started:
            self._begun(work)
        self.tokens_made[work.phase] += len(output.token_ids)
        work.outbox.add(tokens_event(work.key, output))

    def _begun(self, work: Work) -> None:
        work.started = True
        seconds = monotonic() - work.began
        if work.phase is Phase.PROMPT:
            self.prompt_tokens_done += work.prompt_tokens
            metrics.PROMPT.observe(seconds)
            work.span.end()  # its KV cache is kept, but the phase is over
        else:
            work.span.event("second token")
            metrics.KV_WAIT.observe(seconds)

    def _received(self, work: Work, report: TransferReport) -> None:
        work.reported.set()
        if report.delivered:
            work.kv_received = True
            work.span.event("KV received", bytes=report.stats.bytes)
            event = KvReceived(work=work_ref(work.key), stats=report.stats)
            work.outbox.add(MachineEvent(kv_received=event))


def _span(phase: Phase, start: StartPrompt | StartToken) -> Span:
    return start_span(
        f"{phase.value} phase",
        start.traceparent,
        request_id=start.work.request_id,
        attempt=start.work.attempt,
        prompt_tokens=len(start.token_ids),
    )


def _refuse(outbox: Outbox, phase: Phase, ref: WorkRef, cause: FailureCause.ValueType, message: str) -> None:
    """Answer work that will not be done, or not to its end."""
    metrics.WORK.labels(phase.value, metrics.OUTCOMES[cause]).inc()
    outbox.add(failed_event(ref, cause, message))


async def _at_most(seconds: float, event: asyncio.Event) -> None:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
