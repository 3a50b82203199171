"""Which transfers are refused and why, and how a layer counter becomes layers of entries."""

from __future__ import annotations

from functools import partial

import pytest

from services.kvd.engines import LayerProgress
from splitwise.kv.identity import BadTransferError, TransferKey, transfer_key
from splitwise.kv.ledger import Ledger, RejectedError, Rejection
from splitwise.rpc.v1.common_pb2 import TransferRef
from splitwise.rpc.v1.kvd_pb2 import PushEntry, PushPlan


def key(name: int, generation: int = 1) -> TransferKey:
    return TransferKey(name.to_bytes(16), generation)


def cause_of(ledger: Ledger[str], which: TransferKey, *, add: bool) -> Rejection:
    ask = partial(ledger.add, which, "again") if add else partial(ledger.require, which)
    with pytest.raises(RejectedError) as refused:
        ask()
    return refused.value.cause


def test_each_refusal_has_its_cause() -> None:
    ledger: Ledger[str] = Ledger(limit=3)
    ledger.add(key(1), "one")
    assert ledger.require(key(1)) == "one"
    assert cause_of(ledger, key(1), add=True) is Rejection.REUSED_TRANSFER
    ledger.end(key(1), "done")
    assert cause_of(ledger, key(1), add=True) is Rejection.REUSED_TRANSFER
    assert cause_of(ledger, key(1), add=False) is Rejection.OUT_OF_PLACE
    assert cause_of(ledger, key(2), add=False) is Rejection.UNKNOWN_TRANSFER
    ledger.add(key(1, 3), "third")
    assert cause_of(ledger, key(1, 2), add=True) is Rejection.STALE_GENERATION
    assert cause_of(ledger, key(1), add=False) is Rejection.STALE_GENERATION
    ledger.add(key(4), "four")
    ledger.add(key(5), "five")
    assert cause_of(ledger, key(6), add=True) is Rejection.TOO_MANY_TRANSFERS


def test_a_revoked_transfer_is_never_opened() -> None:
    ledger: Ledger[str] = Ledger(limit=3)
    ledger.end(key(1), "revoked before it began")
    assert cause_of(ledger, key(1), add=True) is Rejection.REUSED_TRANSFER


def test_memory_of_the_past_is_bounded() -> None:
    ledger: Ledger[str] = Ledger(limit=3, remembered=10)
    for name in range(1000):
        ledger.add(key(name), "")
        ledger.end(key(name), "done")
    assert len(ledger) == 0
    assert len(ledger._ended) == len(ledger._newest) == 10
    assert cause_of(ledger, key(999), add=True) is Rejection.REUSED_TRANSFER


def test_names_are_checked() -> None:
    assert transfer_key(TransferRef(transfer_id=b"x" * 16, generation=2)) == (b"x" * 16, 2)
    with pytest.raises(BadTransferError, match="3 bytes"):
        transfer_key(TransferRef(transfer_id=b"abc", generation=1))
    with pytest.raises(BadTransferError, match="count from 1"):
        transfer_key(TransferRef(transfer_id=b"x" * 16))


def plan(base: int, *firsts: int) -> PushPlan:
    return PushPlan(progress_base=base, entries=[PushEntry(first_block=first) for first in firsts])


def events(progress: LayerProgress) -> list[tuple[int | None, int]]:
    return [(layer, entry.first_block) for layer, entry in progress.events()]


def test_counter_and_plan_come_in_either_order() -> None:
    progress = LayerProgress(2)
    progress.count(1)
    progress.add_plan(plan(0, 7, 8))
    assert events(progress) == [(None, 7), (None, 8), (0, 7), (0, 8)]
    progress.count(1)
    assert events(progress) == [(1, 7), (1, 8)]
    assert events(progress) == []


def test_a_pass_begins_after_the_layers_of_the_one_before() -> None:
    """Else a restart would be followed by layers that were written before it."""
    progress = LayerProgress(2)
    progress.add_plan(plan(0, 1))
    assert events(progress) == [(None, 1)]
    progress.count(3)  # read late: the second pass's first layer is in it
    progress.add_plan(plan(2, 2))
    assert events(progress) == [(0, 1), (1, 1), (None, 2), (0, 2)]


def test_a_pass_that_broke_off_is_superseded() -> None:
    progress = LayerProgress(3)
    progress.add_plan(plan(0, 1))
    progress.count(1)
    progress.add_plan(plan(1, 2))
    assert events(progress) == [(None, 1), (0, 1), (None, 2)]
    progress.count(3)
    assert events(progress) == [(0, 2), (1, 2), (2, 2)]
