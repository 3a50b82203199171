"""Ten thousand requests at once through one router, and twelve thousand that it does not have room for."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

import grpc.aio
import psutil
import pytest

from tests.services.router.cluster import request
from tests.services.router.instant import instant_cluster

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
MANY, FLOOD = 10_000, 12_000
TOKENS = 5
TEXT = "a" + (TOKENS - 1) * "b"
BYTES_PER_REQUEST = 50_000
"""What an open request may cost the router, its gRPC call included (measured: 13 kB)."""


async def test_ten_thousand_requests_are_held_at_once_and_all_answered(tmp_path: Path) -> None:
    """The token machine gives no second token before it was asked for all, so all are open together."""
    async with instant_cluster(tmp_path, ["--hold-until", str(MANY)], "--queue-limit", str(MANY)) as found:
        router = psutil.Process(found.router.process.pid)
        before = router.memory_info().rss
        asked = request([7] * 16, model="instant", max_tokens=TOKENS)
        answers = await asyncio.gather(*[found.ask(asked) for _ in range(MANY)])
        grown = router.memory_info().rss - before
        print(f"{grown / MANY / 1e3:.1f} kB of the router's memory per open request")
        assert Counter(str(answer.error) for answer in answers) == {"None": MANY}
        assert {answer.text for answer in answers} == {TEXT}
        assert {answer.finished.restarts for answer in answers} == {0}
        assert grown < MANY * BYTES_PER_REQUEST
        counters = (await found.describe()).counters
        assert (counters.received, counters.finished) == (MANY, MANY)
        await found.until_free()


async def test_what_does_not_fit_is_refused_with_a_delay_and_the_rest_is_served(tmp_path: Path) -> None:
    """12,000 at once, room for 128 and a queue of 500: served or RESOURCE_EXHAUSTED, none is lost."""
    machine = ["--max-running", "64", "--pace", "0.5"]
    async with instant_cluster(tmp_path, machine, "--queue-limit", "500") as found:
        asked = request([7] * 16, model="instant", max_tokens=TOKENS)
        answers = await asyncio.gather(*[found.ask(asked) for _ in range(FLOOD)])
        refused = [answer for answer in answers if answer.error is not None]
        codes = {answer.error.code() for answer in refused if answer.error is not None}
        assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert all(answer.retry_after_ms > 0 for answer in refused)
        served = [answer for answer in answers if answer.error is None]
        assert len(served) >= 500
        assert {answer.text for answer in served} == {TEXT}
        counters = (await found.describe()).counters
        assert (counters.finished, counters.rejected) == (len(served), len(refused))
        assert (await found.ask(asked)).text == TEXT
        await found.until_free()
