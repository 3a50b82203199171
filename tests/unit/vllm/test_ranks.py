"""The parts of a transfer over several ranks become one notice, whatever order they end in."""

from __future__ import annotations

import os
import select
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.engine.vllm.ranks import RankClients
from services.kvd.notices import Failed, Notice, Received, Released
from splitwise.kv.identity import TransferKey, part_engine_id, part_key
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE
from splitwise.rpc.v1.kvd_pb2 import TRANSFER_FAILURE_CORRUPT, TRANSFER_FAILURE_SOURCE

KEY = TransferKey(bytes(range(16)), 1)


@dataclass
class FakeClient:
    """Remembers calls; notices are put in by the test."""

    rank: int
    calls: list[tuple[str, TransferKey]] = field(default_factory=list)
    reserved: dict[str, Any] = field(default_factory=dict)
    notices: list[Notice] = field(default_factory=list)
    away: str | None = None
    descriptor: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK))

    def expect(self, key: TransferKey, *_rest: Any) -> None:
        self.calls.append(("expect", key))

    def reserve(self, key: TransferKey, first: int, blocks: list[int], **more: Any) -> None:
        self.calls.append(("reserve", key))
        self.reserved = {"first": first, "blocks": blocks, **more}

    def first_token(self, key: TransferKey, _token: int) -> None:
        self.calls.append(("first_token", key))

    def cancel(self, key: TransferKey, _reason: str) -> None:
        self.calls.append(("cancel", key))

    def tell(self, notice: Notice) -> None:
        self.notices.append(notice)
        os.eventfd_write(self.descriptor, 1)

    def poll(self) -> list[Notice]:
        taken, self.notices = self.notices, []
        if taken:
            os.eventfd_read(self.descriptor)
        return taken

    def fileno(self) -> int:
        return self.descriptor

    def failure(self) -> str | None:
        return self.away

    def close(self) -> None:
        os.close(self.descriptor)

    def said(self, what: str) -> list[TransferKey]:
        return [key for call, key in self.calls if call == what]


def ranks(count: int) -> tuple[RankClients, list[FakeClient]]:
    clients = [FakeClient(rank) for rank in range(count)]
    return RankClients(clients), clients  # type: ignore[arg-type]


def notice(side: str, rank: int, *, good: bool) -> Notice:
    key = part_key(KEY, rank)
    if side == "prompt":
        return Released(key, delivered=good, message="" if good else f"rank {rank}")
    return Received(key, 7) if good else Failed(key, TRANSFER_FAILURE_SOURCE, f"rank {rank}")


def open_transfer(whole: RankClients, side: str) -> None:
    if side == "prompt":
        whole.expect(KEY, 100, TRANSFER_MODE_LAYERWISE)
    else:
        whole.reserve(KEY, 2, [5, 6], source_kvd_address="there:1", source_engine_id="left")


@given(
    st.sampled_from(["prompt", "token"]),
    st.lists(st.booleans(), min_size=2, max_size=8),
    st.randoms(use_true_random=False),
    st.data(),
)
def test_one_notice_after_the_last_part_and_good_only_if_all_are(
    side: str, good: list[bool], random: Any, data: st.DataObject
) -> None:
    whole, clients = ranks(len(good))
    open_transfer(whole, side)
    order = list(range(len(good)))
    random.shuffle(order)
    told: list[Notice] = []
    for position, rank in enumerate(order):
        assert not told
        assert whole.open_transfers() == 1
        clients[rank].tell(notice(side, rank, good=good[rank]))
        if position == len(order) - 1 or data.draw(st.booleans()):
            told += whole.poll()
    (end,) = told
    assert end.key == KEY
    assert whole.open_transfers() == 0
    if all(good):
        assert end == notice(side, 0, good=True)
    else:
        assert isinstance(end, Failed) or (isinstance(end, Released) and not end.delivered)
        assert end.message in {f"rank {rank}" for rank, is_good in enumerate(good) if not is_good}
    whole.close()


@pytest.mark.parametrize("side", ["prompt", "token"])
def test_the_first_failure_gives_the_other_parts_up_once(side: str) -> None:
    whole, clients = ranks(3)
    open_transfer(whole, side)
    clients[1].tell(notice(side, 1, good=False))
    assert whole.poll() == []
    clients[0].tell(notice(side, 0, good=False))
    assert whole.poll() == []
    assert [client.said("cancel") for client in clients] == [[part_key(KEY, rank)] for rank in range(3)]
    clients[2].tell(notice(side, 2, good=True))
    assert len(whole.poll()) == 1
    whole.close()


def test_every_rank_reserves_the_same_blocks_of_its_own_source() -> None:
    whole, clients = ranks(2)
    open_transfer(whole, "token")
    for rank, client in enumerate(clients):
        assert client.said("reserve") == [part_key(KEY, rank)]
        assert client.reserved["blocks"] == [5, 6]
        assert client.reserved["first"] == 2
        assert client.reserved["source_engine_id"] == part_engine_id("left", rank)
    whole.close()


def test_both_sides_of_one_transfer_in_one_engine_are_kept_apart() -> None:
    whole, clients = ranks(2)
    open_transfer(whole, "prompt")
    open_transfer(whole, "token")
    assert whole.open_transfers() == 2
    for rank, client in enumerate(clients):
        client.tell(notice("token", rank, good=True))
    assert [type(end) for end in whole.poll()] == [Received]
    for rank, client in enumerate(clients):
        client.tell(notice("prompt", rank, good=True))
    assert [type(end) for end in whole.poll()] == [Released]
    whole.close()


def test_different_first_tokens_are_corrupt() -> None:
    whole, clients = ranks(2)
    open_transfer(whole, "token")
    clients[0].tell(Received(part_key(KEY, 0), 7))
    clients[1].tell(Received(part_key(KEY, 1), 8))
    (end,) = whole.poll()
    assert isinstance(end, Failed)
    assert end.cause == TRANSFER_FAILURE_CORRUPT
    whole.close()


def test_a_transfer_that_is_open_cannot_be_opened_again() -> None:
    whole, _ = ranks(2)
    open_transfer(whole, "token")
    with pytest.raises(ValueError, match="is open"):
        open_transfer(whole, "token")
    whole.close()


def test_a_late_notice_of_an_unknown_transfer_is_dropped() -> None:
    whole, clients = ranks(2)
    clients[1].tell(notice("token", 1, good=True))
    assert whole.poll() == []
    whole.close()


def test_the_descriptor_is_readable_while_any_rank_has_a_notice() -> None:
    whole, clients = ranks(3)
    open_transfer(whole, "token")
    poll = select.poll()
    poll.register(whole.fileno(), select.POLLIN)
    assert poll.poll(0) == []
    clients[2].tell(notice("token", 2, good=True))
    assert poll.poll(0)
    whole.poll()
    assert poll.poll(0) == []
    whole.close()


def test_one_session_that_is_away_stops_all() -> None:
    whole, clients = ranks(2)
    assert whole.failure() is None
    clients[1].away = "the daemon is away"
    assert whole.failure() == "the daemon is away"
    whole.close()
