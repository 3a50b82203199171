"""What is refused, with which cause and words, and that nothing stays open after it."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

import grpc
import pytest

from services.kvd.client import AttachError, Failed
from splitwise.rpc.v1 import kvd_pb2 as pb
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_UNSPECIFIED, TransferRef
from tests.services.kvd.fake_engine import FakeEngine, new_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.services.kvd.daemon import DaemonProcess

    Attach = Callable[..., FakeEngine]


def test_reservations_that_cannot_be(daemons: list[DaemonProcess], engine: Attach) -> None:
    near, far = daemons
    prompt, token = engine(near), engine(far)
    other = engine(near, dtype="float32")
    used = new_key(generation=2)
    token.reserve(used, [1], at=near.address, source=prompt.name)
    token.cancel(used)
    token.arrived(used)
    cases = [
        ([48], near.address, prompt.name, "block id 48 is outside", pb.TRANSFER_FAILURE_REFUSED),
        ([3, 3], near.address, prompt.name, "occurs twice", pb.TRANSFER_FAILURE_REFUSED),
        ([3], near.address, "nobody", "'nobody' is not attached", pb.TRANSFER_FAILURE_REFUSED),
        ([3], near.address, other.name, "dtype: float32 here, bfloat16", pb.TRANSFER_FAILURE_REFUSED),
        ([3], "not an address", prompt.name, "source_kvd_address", pb.TRANSFER_FAILURE_REFUSED),
        ([3], "127.0.0.1:1", prompt.name, "cannot be reached", pb.TRANSFER_FAILURE_PEER_LOST),
    ]
    open_one = new_key()
    token.reserve(open_one, [9], at=near.address, source=prompt.name)
    for blocks, at, source, words, cause in cases:
        key = new_key()
        token.reserve(key, blocks, at=at, source=source)
        failed = token.arrived(key)
        assert isinstance(failed, Failed)
        assert words in failed.message
        assert failed.cause == cause
    stale = used._replace(generation=1)
    token.reserve(stale, [3], at=near.address, source=prompt.name)
    assert token.arrived(stale).cause == pb.TRANSFER_FAILURE_STALE
    prompt.prompt(open_one, [4])  # none of them has harmed the one that was open
    assert prompt.released(open_one).delivered
    assert token.arrived(open_one).first_token == 7


def test_a_lease_that_runs_out_frees_either_side(daemons: list[DaemonProcess], engine: Attach) -> None:
    prompt, token = engine(daemons[0]), engine(daemons[1])
    key = new_key()
    token.reserve(key, [1], at=daemons[0].address, source=prompt.name, lease_ms=300)
    assert token.arrived(key).cause == pb.TRANSFER_FAILURE_EXPIRED
    alone = new_key()
    prompt.prompt(alone, [1], lease_ms=300)
    released = prompt.released(alone)
    assert not released.delivered
    assert "lease ran out while waiting for the grant" in released.message


def test_a_prompt_that_does_not_fill_the_grant_fails(daemons: list[DaemonProcess], engine: Attach) -> None:
    prompt, token = engine(daemons[0]), engine(daemons[1])
    for blocks in ([1, 2], [1, 2, 3, 4]):
        key = new_key()
        token.reserve(key, [1, 2, 3], at=daemons[0].address, source=prompt.name)
        prompt.prompt(key, blocks)
        failed = token.arrived(key)
        assert f"the prompt has {len(blocks)} blocks, the grant ends at 3" in failed.message
        assert not prompt.released(key).delivered


def test_a_transfer_that_does_not_say_how_to_push_ends_its_session(
    daemons: list[DaemonProcess], engine: Attach
) -> None:
    """Nothing but the prompt's command decides it; the engine attaches again and works."""
    prompt, token = engine(daemons[0]), engine(daemons[1])
    key = new_key()
    prompt.expect(key, TRANSFER_MODE_UNSPECIFIED)
    assert not prompt.released(key).delivered
    again = new_key()
    prompt.until_attached()
    token.reserve(again, [1], at=daemons[0].address, source=prompt.name)
    prompt.prompt(again, [4])
    assert prompt.released(again).delivered
    assert token.arrived(again).first_token == 7


def test_messages_about_unknown_transfers_change_nothing(daemons: list[DaemonProcess]) -> None:
    ref = TransferRef(transfer_id=secrets.token_bytes(16), generation=1)
    before = daemons[0].describe().transfers_open
    assert not daemons[0].peer("Revoke", pb.RevokeRequest(transfer=ref)).known
    daemons[0].peer("Abandon", pb.AbandonRequest(transfer=ref))
    with pytest.raises(grpc.RpcError) as refused:
        daemons[0].peer("Revoke", pb.RevokeRequest(transfer=TransferRef(transfer_id=b"x")))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert daemons[0].describe().transfers_open == before


def test_memory_that_does_not_hold_its_blocks_is_refused(daemons: list[DaemonProcess]) -> None:
    engine = FakeEngine(daemons[0].socket, "short", attach=False)
    engine.geometry.num_blocks += 1
    with pytest.raises(AttachError, match="the last block ends at byte"):
        engine.client.attach(engine.geometry, engine.memory)
    engine.close()
