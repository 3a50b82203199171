"""An engine of two ranks at real daemons: parts go their own ways and end as one."""

from __future__ import annotations

import select
import signal
from typing import TYPE_CHECKING

from services.engine.vllm.ranks import RankClients
from services.kvd.client import KvdClient, Received, Released
from splitwise.kv.identity import part_engine_id, part_key
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE
from tests.services.kvd.fake_engine import PATIENCE, Ref, new_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from services.kvd.notices import Notice
    from tests.services.kvd.daemon import DaemonProcess
    from tests.services.kvd.fake_engine import FakeEngine

    Attach = Callable[..., FakeEngine]

RANKS = 2


class RankedEngine:
    """Each rank with memory of its own, and a scheduler side with sessions of its own."""

    def __init__(self, attach: Attach, daemon: DaemonProcess) -> None:
        self.name = new_key().transfer_id.hex()
        self.ranks: list[FakeEngine] = [
            attach(daemon, part_engine_id(self.name, rank), tp_rank=rank, tp_size=RANKS)
            for rank in range(RANKS)
        ]
        clients = []
        for rank in self.ranks:
            client = KvdClient(daemon.socket, rank.name, incarnation=rank.client.incarnation)
            client.attach(timeout=PATIENCE)
            clients.append(client)
        self.scheduler = RankClients(clients)

    def ended(self) -> Notice:
        """Wait for the next notice on a whole transfer."""
        poll = select.poll()
        poll.register(self.scheduler.fileno(), select.POLLIN)
        while True:
            assert poll.poll(1e3 * PATIENCE), "no notice"
            for notice in self.scheduler.poll():
                return notice


def test_all_parts_arrive_and_one_notice_tells(daemons: list[DaemonProcess], engine: Attach) -> None:
    near, far = daemons
    prompt, token = RankedEngine(engine, near), RankedEngine(engine, far)
    key, here, there = new_key(), [1, 2, 3], [7, 9, 11]
    token.scheduler.reserve(Ref(key), 0, there, source_kvd_address=near.address, source_engine_id=prompt.name)
    prompt.scheduler.expect(Ref(key), 40, TRANSFER_MODE_LAYERWISE)
    for number, rank in enumerate(prompt.ranks):
        rank.run_pass(part_key(key, number), 0, here, final=True)
    prompt.scheduler.first_token(Ref(key), 42)
    received, released = token.ended(), prompt.ended()
    assert isinstance(received, Received)
    assert (received.key, received.first_token) == (key, 42)
    assert isinstance(released, Released)
    assert released.delivered
    for source, target in zip(prompt.ranks, token.ranks, strict=True):
        assert target.bytes_of(there) == source.bytes_of(here)
    prompt.scheduler.close()
    token.scheduler.close()


def test_what_the_scheduler_announced_first_counts_first(
    daemons: list[DaemonProcess], engine: Attach
) -> None:
    """A daemon that was held up finds both sessions readable, and reads all of the rank's first."""
    near, far = daemons
    prompt, token = RankedEngine(engine, near), RankedEngine(engine, far)
    key = new_key()
    near.signal(signal.SIGSTOP)
    for rank in prompt.ranks:  # so that these sessions are the first to be readable
        rank.cancel(new_key())
    prompt.scheduler.expect(Ref(key), 40, TRANSFER_MODE_LAYERWISE)
    for number, rank in enumerate(prompt.ranks):
        rank.run_pass(part_key(key, number), 0, [1, 2], final=True)
    prompt.scheduler.first_token(Ref(key), 42)
    near.signal(signal.SIGCONT)
    token.scheduler.reserve(
        Ref(key), 0, [3, 4], source_kvd_address=near.address, source_engine_id=prompt.name
    )
    assert isinstance(token.ended(), Received)
    assert isinstance(prompt.ended(), Released)
    prompt.scheduler.close()
    token.scheduler.close()


def test_a_part_that_fails_ends_the_others(daemons: list[DaemonProcess], engine: Attach) -> None:
    """The second rank's pass never comes; its part is cancelled at the source."""
    near, far = daemons
    prompt, token = RankedEngine(engine, near), RankedEngine(engine, far)
    key = new_key()
    token.scheduler.reserve(
        Ref(key), 0, [3, 4], source_kvd_address=near.address, source_engine_id=prompt.name
    )
    prompt.scheduler.expect(Ref(key), 40, TRANSFER_MODE_LAYERWISE)
    prompt.ranks[0].run_pass(key, 0, [1, 2], final=True)
    prompt.ranks[1].client.cancel(Ref(part_key(key, 1)), "this rank failed")
    end = prompt.ended()
    assert isinstance(end, Released)
    assert not end.delivered
    assert not isinstance(token.ended(), Received)
    prompt.scheduler.close()
    token.scheduler.close()
