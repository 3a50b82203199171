"""Single turns of either half of a transfer that chance seldom finds."""

from __future__ import annotations

from splitwise.kv.destination import (
    Acknowledge,
    Cause,
    Deliver,
    DestinationTransfer,
    Fail,
    Fence,
    Revoke,
    Verify,
)
from splitwise.kv.identity import TransferKey
from splitwise.kv.source import GrantedBlocks, Push, Release, Signal, SourceTransfer, Stopped
from splitwise.kv.states import End, TransferState

KEY = TransferKey(bytes(16), 1)


def granted(blocks: int) -> SourceTransfer:
    source = SourceTransfer(KEY, 1)
    source.expect(layerwise=True, lease=5.0)
    source.grant(0.0, GrantedBlocks(0, tuple(range(100, 100 + blocks))), 5.0)
    return source


def test_a_prompt_that_begins_again_waits_for_its_old_puts() -> None:
    """They would land on the new ones."""
    source = granted(2)
    source.entry(0.0, 0, 1, final=False, restart=False)
    assert source.layer_written(0.0, 0, 0, [1]) == [Push(0, (1,), (100,), 0)]
    source.entry(0.0, 0, 2, final=True, restart=True)
    assert source.layer_written(0.0, 0, 0, [5, 6]) == []
    assert source.first_token(0.0, 9) == []
    assert source.pushed(0.0) == [Push(0, (5, 6), (100, 101), 1)]
    assert source.pushed(0.0) == [Signal(9)]


def test_nothing_is_given_back_while_a_put_is_in_flight() -> None:
    source = granted(1)
    source.entry(0.0, 0, 1, final=True, restart=False)
    source.layer_written(0.0, 0, 0, [1])
    assert source.stop(End.CANCELLED, "enough", tell_peer=False) == []
    assert source.state is TransferState.STOPPING
    assert source.stop(End.CANCELLED, "again", tell_peer=False) == []
    assert source.pushed(0.0) == [Stopped(), Release(delivered=False, message="enough")]
    assert source.stop(End.CANCELLED, "again", tell_peer=False) == [Stopped()]


def test_a_gap_in_what_was_announced_ends_the_transfer() -> None:
    source = granted(3)
    source.entry(0.0, 0, 1, final=False, restart=False)
    actions = source.layer_written(0.0, 0, 1, [1])
    assert Release(delivered=False, message="layer 0: block 1 was announced after 0") in actions


def verifying() -> DestinationTransfer:
    target = DestinationTransfer(KEY, 10, 5.0)
    target.reserve()
    target.granted()
    assert target.signalled(9) == [Verify()]
    return target


def test_delivery_follows_the_check_and_happens_once() -> None:
    target = verifying()
    assert target.signalled(9) == []
    assert target.verified(None) == [Deliver(9), Acknowledge()]
    assert target.verified(None) == target.verified("late") == []
    assert target.stop(Cause.CANCELLED, "late") == target.fenced() == []


def test_a_check_that_fails_is_a_failure_and_frees_the_source() -> None:
    assert verifying().verified("differs") == [Acknowledge(), Fail(Cause.CORRUPT, "differs")]


def test_whatever_ends_a_transfer_in_its_check_there_is_one_failure() -> None:
    for end in ("stop", "abandoned", "grant_refused"):
        target = verifying()
        assert getattr(target, end)(Cause.SOURCE, end) == []
        assert target.verified("differs") == [Acknowledge(), Fail(Cause.SOURCE, end)]
        assert target.verified("differs") == []


def test_without_an_answer_the_memory_is_fenced_before_it_is_given_back() -> None:
    target = DestinationTransfer(KEY, 10, 5.0)
    target.reserve()
    assert target.tick(4.9) == []
    (revoke,) = target.tick(5.0)
    assert isinstance(revoke, Revoke)
    assert target.tick(6.0) == []
    assert target.revoke_unanswered() == [Fence()]
    (fail,) = target.fenced()
    assert isinstance(fail, Fail)
    assert fail.cause is Cause.EXPIRED
    assert target.revoked() == target.revoke_unanswered() == []
