"""Work that is cancelled at any moment of its life is over: nothing of it is counted any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, cast

import pytest

from services.engine.interface import EngineLoad, TokenOutput
from services.machine.outbox import Outbox
from services.machine.transfers import TransferWatch
from services.machine.works import WorkTable
from splitwise.config import Address
from splitwise.rpc.v1.common_pb2 import SamplingParams, TransferRef
from splitwise.rpc.v1.machine_pb2 import (
    FAILURE_CAUSE_CANCELLED,
    CancelWork,
    MachineEvent,
    StartPrompt,
    StartToken,
    WorkRef,
)
from splitwise.scheduling.events import Phase

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from services.engine.interface import Engine

WORK = WorkRef(request_id="r", attempt=1)
SAMPLING = SamplingParams(max_tokens=9, temperature=0.0)


class EndlessEngine:
    """Makes a token each turn; `running` counts what it was not told to stop."""

    def __init__(self) -> None:
        self.running = 0

    def load(self) -> EngineLoad:
        return EngineLoad(0, 1, 0)

    async def run_prompt(self, work: Any) -> AsyncGenerator[TokenOutput, None]:
        del work
        self.running += 1
        try:
            while True:
                await asyncio.sleep(0)
                yield TokenOutput([1], [], None, None, 0)
        finally:
            self.running -= 1

    run_token = run_prompt


def start(works: WorkTable, phase: Phase, outbox: Outbox) -> None:
    transfer = TransferRef(transfer_id=bytes(16), generation=1)
    if phase is Phase.PROMPT:
        works.start_prompt(outbox, StartPrompt(work=WORK, token_ids=[1, 2], sampling=SAMPLING))
    else:
        works.start_token(
            outbox,
            StartToken(work=WORK, token_ids=[1, 2], sampling=SAMPLING, transfer=transfer,
                       source_kvd_address="127.0.0.1:1", source_engine_id="e", lease_ms=1000),
        )  # fmt: skip


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("turns", range(6))
async def test_cancelled_after_so_many_turns_of_the_loop(phase: Phase, turns: int) -> None:
    """Also in the very turn of its start, as when a client leaves at once: both commands come together."""
    engine = EndlessEngine()
    works = WorkTable(cast("Engine", engine), TransferWatch(Address("127.0.0.1", 1)), max_waiting=9)
    outbox = Outbox()
    start(works, phase, outbox)
    for _ in range(turns):
        await asyncio.sleep(0)
    works.cancel(phase, CancelWork(work=WORK, reason="gone"))
    works.cancel(phase, CancelWork(work=WORK, reason="twice is the same"))
    async with asyncio.timeout(30):
        await works.wait_empty()
    load = works.load()
    assert (works.open, load.prompt_requests, load.prompt_tokens, load.token_requests) == (0, 0, 0, 0)
    assert engine.running == 0
    outbox.close()
    events: list[MachineEvent] = [event async for batch in outbox.batches() for event in batch.events]
    (failed,) = [event.failed for event in events if event.WhichOneof("event") == "failed"]
    assert (failed.work, failed.cause, failed.message) == (WORK, FAILURE_CAUSE_CANCELLED, "gone")
