"""Whole transfers between real daemons over UCX, byte for byte."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from services.kvd.client import Failed, Received
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, TRANSFER_MODE_SERIALIZED
from tests.services.kvd.fake_engine import BLOCK_BYTES, LAYERS, Ref, new_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.services.kvd.daemon import DaemonProcess
    from tests.services.kvd.fake_engine import FakeEngine

    Attach = Callable[..., FakeEngine]

MODES = {"layerwise": TRANSFER_MODE_LAYERWISE, "serialized": TRANSFER_MODE_SERIALIZED}


@pytest.mark.parametrize("nodes", [1, 2], ids=["copy", "ucx"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("grant", ["before", "during", "after"])
def test_every_byte_arrives_in_its_place(
    daemons: list[DaemonProcess], engine: Attach, nodes: int, mode: str, grant: str
) -> None:
    near, far = daemons[0], daemons[nodes - 1]
    prompt, token = engine(near), engine(far)
    key, here, there = new_key(), random.sample(range(48), 20), random.sample(range(48), 20)
    untouched = [block for block in range(48) if block not in there]
    before = token.bytes_of(untouched)

    def reserve(when: str) -> None:
        if when == grant:
            token.reserve(key, there, at=near.address, source=prompt.name)

    prompt.expect(key, MODES[mode])
    reserve("before")
    prompt.run_pass(key, 0, here[:7], final=False)
    reserve("during")
    prompt.run_pass(key, 7, here[7:], final=True)
    prompt.client.first_token(Ref(key), 4711)
    reserve("after")

    received = token.arrived(key)
    assert isinstance(received, Received), received
    assert received.first_token == 4711
    assert received.stats.bytes == 20 * LAYERS * BLOCK_BYTES
    assert received.stats.blocks == 20
    assert received.stats.transport == ("local" if nodes == 1 else "ucx")
    assert prompt.released(key).delivered
    assert token.bytes_of(there) == prompt.bytes_of(here)
    assert token.bytes_of(untouched) == before


@pytest.mark.parametrize("nodes", [1, 2], ids=["copy", "ucx"])
@pytest.mark.parametrize("cached", [1, 7, 9, 12])
def test_blocks_that_the_token_side_has_are_left_out(
    daemons: list[DaemonProcess], engine: Attach, nodes: int, cached: int
) -> None:
    near, far = daemons[0], daemons[nodes - 1]
    prompt, token = engine(near), engine(far)
    key, here, there = new_key(), list(range(12)), list(range(20, 32))
    token.reserve(key, there[cached:], first=cached, at=near.address, source=prompt.name)
    prompt.expect(key)
    prompt.run_pass(key, 0, here[:7], final=False)
    prompt.run_pass(key, 7, here[7:], final=True)
    prompt.client.first_token(Ref(key), 1)
    received = token.arrived(key)
    assert isinstance(received, Received), received
    assert received.stats.bytes == (12 - cached) * LAYERS * BLOCK_BYTES
    assert received.stats.blocks_skipped == cached
    assert token.bytes_of(there[cached:]) == prompt.bytes_of(here[cached:])
    assert set(token.bytes_of(there[:cached])) == {bytes(BLOCK_BYTES)}
    assert prompt.released(key).delivered


def test_neighbours_travel_in_one_put(daemons: list[DaemonProcess], engine: Attach) -> None:
    prompt, token = engine(daemons[0]), engine(daemons[1])
    key = new_key()
    token.reserve(key, range(10, 26), at=daemons[0].address, source=prompt.name)
    prompt.prompt(key, range(16))
    assert token.arrived(key).stats.puts == LAYERS
    prompt.released(key)


def test_a_preempted_prompt_begins_again_and_its_old_bytes_are_not_taken(
    daemons: list[DaemonProcess], engine: Attach
) -> None:
    for nodes in (1, 2):
        prompt, token = engine(daemons[0]), engine(daemons[nodes - 1])
        key, there = new_key(), list(range(8))
        token.reserve(key, there, at=daemons[0].address, source=prompt.name)
        prompt.expect(key)
        prompt.run_pass(key, 0, [40, 41, 42, 43, 44], final=False)
        prompt.run_pass(key, 0, [30, 31, 32], final=False, restart=True)
        prompt.run_pass(key, 3, [33, 34, 35, 36, 37], final=True)
        prompt.client.first_token(Ref(key), 3)
        received = token.arrived(key)
        assert isinstance(received, Received), received
        assert received.stats.bytes == 8 * LAYERS * BLOCK_BYTES
        assert token.bytes_of(there) == prompt.bytes_of(range(30, 38))
        assert prompt.released(key).delivered


def test_many_at_once_to_several_destinations(daemons: list[DaemonProcess], engine: Attach) -> None:
    near, far = daemons
    prompts = [engine(near), engine(far)]
    tokens = [engine(near), engine(far), engine(far)]
    rounds = []
    for number in range(36):
        origin, target = random.choice(list(enumerate(prompts))), random.choice(tokens)
        # Blocks of a destination are not shared by open transfers: three each, in turns.
        slot = number * 4 % 48
        rounds.append((new_key(), origin, target, [slot, slot + 1, slot + 2]))
    for batch in (rounds[at : at + 12] for at in range(0, 36, 12)):
        for key, (index, source), target, blocks in batch:
            target.reserve(key, blocks[::-1], at=daemons[index].address, source=source.name)
            source.prompt(key, blocks, token=blocks[0])
        for key, (_, source), target, blocks in batch:
            received = target.arrived(key)
            assert isinstance(received, Received), received
            assert received.first_token == blocks[0]
            assert target.bytes_of(blocks[::-1]) == source.bytes_of(blocks)
            assert source.released(key).delivered


def test_every_transfer_has_one_notice_wherever_it_is_cancelled(
    daemons: list[DaemonProcess], engine: Attach
) -> None:
    prompt, token = engine(daemons[0]), engine(daemons[1])
    keys = []
    for number in range(40):
        key, blocks = new_key(), [number % 40, number % 40 + 1]
        who, when = (prompt, token)[number % 2], number // 2 % 5
        keys.append(key)
        for step in range(4):
            if step == when:
                who.cancel(key)
            if step == 0:
                token.reserve(key, blocks, at=daemons[0].address, source=prompt.name)
            elif step == 1:
                prompt.expect(key)
            elif step == 2:
                prompt.run_pass(key, 0, blocks, final=True)
            else:
                prompt.client.first_token(Ref(key), 5)
        who.cancel(key)
        who.cancel(key)
        ends = (prompt.released(key), token.arrived(key))
        assert isinstance(ends[1], Received) == ends[0].delivered or isinstance(ends[1], Received), ends
        if isinstance(ends[1], Received):
            assert token.bytes_of(blocks) == prompt.bytes_of(blocks)
    for daemon in daemons:
        daemon.until_empty()
    for each in (prompt, token):
        late = [notice.key for notice in each.client.poll()]
        assert not late
        assert all(len(each.notices[key]) == 1 for key in keys)
        assert each.client.open_transfers() == 0


def test_a_failed_attempt_is_followed_by_the_next_generation(
    daemons: list[DaemonProcess], engine: Attach
) -> None:
    prompt, token = engine(daemons[0]), engine(daemons[1])
    first = new_key()
    token.reserve(first, [1, 2], at=daemons[0].address, source=prompt.name)
    token.cancel(first)
    assert isinstance(token.arrived(first), Failed)
    second = first._replace(generation=2)
    token.reserve(second, [1, 2], at=daemons[0].address, source=prompt.name)
    prompt.prompt(second, [5, 6])
    assert isinstance(token.arrived(second), Received)
    assert prompt.released(second).delivered
