"""The thread that speaks to the driver, when the driver hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest

from services.power import service
from services.power.service import Worker
from splitwise.errors import UnavailableError


async def test_results_and_errors_come_back() -> None:
    worker = Worker()
    assert await worker.run(lambda a, b: a + b, 1, b=2) == 3

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await worker.run(fails)


async def test_a_driver_that_hangs_makes_calls_unavailable_and_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "ANSWER_S", 0.05)
    monkeypatch.setattr(service, "MAX_WAITING", 3)
    worker, gate, done = Worker(), threading.Event(), []

    def hang(number: int) -> None:
        gate.wait()
        done.append(number)

    for number in range(3):
        with pytest.raises(UnavailableError, match="has not answered"):
            await worker.run(hang, number)
    with pytest.raises(UnavailableError, match="3 calls wait for the driver"):
        await worker.run(hang, 3)
    gate.set()
    assert await worker.to_the_end(lambda: list(done)) == [0, 1, 2]  # in order, none lost
    await worker.run(hang, 4)
    assert done == [0, 1, 2, 4]


async def test_the_end_is_not_cut_by_a_cancellation() -> None:
    worker, begun, gate, done = Worker(), threading.Event(), threading.Event(), []

    def restore() -> None:
        begun.set()
        gate.wait()
        done.append("restored")

    task = asyncio.create_task(worker.to_the_end(restore))
    await asyncio.to_thread(begun.wait)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["restored"]
