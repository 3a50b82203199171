"""Reports on the parts of a transfer become one report on the whole."""

from __future__ import annotations

import asyncio

import pytest

from services.engine.interface import Transfer
from services.machine.transfers import TransferWatch
from splitwise.config import Address
from splitwise.kv.identity import part_key, transfer_key
from splitwise.rpc.v1.common_pb2 import TransferRef, TransferStats
from splitwise.rpc.v1.kvd_pb2 import TRANSFER_FAILURE_SOURCE, TransferReport

TRANSFER = Transfer(bytes(range(16)), 1)
OTHER = Transfer(bytes(range(1, 17)), 1)


def report(
    rank: int, *, delivered: bool = True, transfer: Transfer = TRANSFER, **stats: int
) -> TransferReport:
    part = part_key(transfer_key(transfer), rank)
    return TransferReport(
        transfer=TransferRef(transfer_id=part.transfer_id, generation=part.generation),
        delivered=delivered,
        failure=0 if delivered else TRANSFER_FAILURE_SOURCE,
        message="" if delivered else f"rank {rank}",
        stats=TransferStats(**stats),
    )


class Watch(TransferWatch):
    """Watches no daemon: the test brings the reports."""

    def __init__(self, ranks: int) -> None:
        super().__init__(Address.parse("127.0.0.1:1"))
        self._ranks = ranks

    def bring(self, rank: int, one: TransferReport) -> None:
        self._report(rank, one)


@pytest.mark.asyncio
async def test_sizes_add_up_and_the_slowest_part_counts() -> None:
    watch, heard = Watch(2), list[TransferReport]()
    watch.listen(TRANSFER, heard.append)
    watch.bring(1, report(1, bytes=10, puts=2, push_us=500, exposed_us=7))
    assert not heard
    watch.bring(0, report(0, bytes=10, puts=3, push_us=400, exposed_us=9))
    (whole,) = heard
    assert whole.delivered
    assert transfer_key(whole.transfer) == transfer_key(TRANSFER)
    stats = whole.stats
    assert (stats.bytes, stats.puts, stats.push_us, stats.exposed_us) == (20, 5, 500, 9)
    await watch.close()


@pytest.mark.asyncio
@pytest.mark.parametrize("bad", [0, 1])
async def test_one_part_that_failed_fails_the_whole(bad: int) -> None:
    watch, heard = Watch(2), list[TransferReport]()
    watch.listen(TRANSFER, heard.append)
    for rank in (0, 1):
        watch.bring(rank, report(rank, delivered=rank != bad))
    (whole,) = heard
    assert (whole.delivered, whole.message) == (False, f"rank {bad}")
    await watch.close()


@pytest.mark.asyncio
async def test_a_lease_ends_with_the_last_part() -> None:
    watch = Watch(2)
    watch.open_lease(TRANSFER)
    watch.bring(0, report(0))
    ending = asyncio.create_task(watch.lease_end(TRANSFER, 30))
    watch.bring(0, report(0))  # said twice: not the other rank's
    await asyncio.sleep(0)
    assert not ending.done()
    watch.bring(1, report(1))
    assert await ending
    assert watch.leases == 0
    await watch.close()


@pytest.mark.asyncio
async def test_what_nobody_waits_for_is_not_kept() -> None:
    watch, heard = Watch(2), list[TransferReport]()
    watch.listen(TRANSFER, heard.append)
    watch.bring(0, report(0))
    watch.forget(TRANSFER)
    watch.bring(1, report(1))
    watch.bring(0, report(0, transfer=OTHER))
    assert not heard
    assert not watch._reports
    assert not watch._parts
    await watch.close()
