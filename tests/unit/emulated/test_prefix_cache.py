"""The prefix cache: what is found again, what is counted, what is forgotten."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.engine.emulated import EmulatedSettings, expected_tokens
from services.engine.emulated.blocks import BlockAllocator, BlockError
from services.engine.emulated.machine import EmulatedMachine
from services.engine.interface import PromptWork, TokenWork, Transfer, WorkKey
from splitwise.rpc.v1.common_pb2 import SamplingParams
from tests.support.loopback_daemon import Client, Daemon

if TYPE_CHECKING:
    from services.engine.emulated.sequence import Sequence

SETTINGS = EmulatedSettings(kv_blocks=32, block_tokens=4, layers=2, prefix_caching=True)
PROMPT = list(range(300, 322))  # five full blocks and two tokens


class Pair:
    def __init__(self, settings: EmulatedSettings = SETTINGS) -> None:
        self.settings = settings
        self.daemon = Daemon()
        self.clients = [Client(self.daemon, settings.layers) for _ in range(2)]
        self.machines = [EmulatedMachine(settings, client) for client in self.clients]  # type: ignore[arg-type]
        for client, machine in zip(self.clients, self.machines, strict=True):
            client.machine = machine
        self.batches: list[int] = []  # prompt tokens of each iteration on the prompt machine
        self.first_blocks: list[int] = []
        self.number = 0

    def submit(self, prompt: list[int], outputs: int = 6) -> tuple[Sequence, Sequence]:
        self.number += 1
        key, transfer = WorkKey(str(self.number), 1), Transfer(self.number.to_bytes(16, "big"), 1)
        sampling = SamplingParams(max_tokens=outputs, temperature=0.0)
        return (
            self.machines[0].submit_prompt(PromptWork(key, prompt, sampling, transfer, 2)),
            self.machines[1].submit_token(TokenWork(key, prompt, sampling, transfer, "", "", 1000)),
        )

    def run(self) -> None:
        for _ in range(50):
            for index, machine in enumerate(self.machines):
                iteration = machine.begin()
                if iteration is not None:
                    for layer in range(self.settings.layers):
                        machine.write_layer(iteration, layer)
                    machine.finish(iteration)
                    if index == 0:
                        self.batches.append(iteration.batch.prompt_tokens)
            for key, push in list(self.daemon.pushes.items()):
                if push.deliverable:
                    self.first_blocks.append(push.first_block)
                    self.daemon.deliver(key)
            for client, machine in zip(self.clients, self.machines, strict=True):
                while client.notices:
                    machine.take_notice(client.notices.pop(0))


def cached(sequence: Sequence) -> list[int]:
    found = []
    while not sequence.outputs.empty():
        output = sequence.outputs.get_nowait()
        if output is not None:
            found.append(output.cached_prompt_tokens)
    return found


def test_the_second_prompt_finds_the_firsts_blocks_on_both_sides() -> None:
    pair = Pair()
    for hits in (0, 20, 20):
        prompt, token = pair.submit(PROMPT)
        pair.run()
        assert cached(prompt) == [hits]
        assert cached(token) == [0] * 5
        assert prompt.tokens[22:] + token.tokens[23:] == expected_tokens(SETTINGS, PROMPT, 6)
    assert pair.batches == [22, 2, 2]
    assert pair.first_blocks == [0, 5, 5]
    assert [machine.allocator.used for machine in pair.machines] == [0, 0]


def test_only_what_begins_alike_is_found() -> None:
    pair = Pair()
    pair.submit(PROMPT)
    pair.run()
    for other, hits in (
        ([*PROMPT[:9], 5, *PROMPT[10:]], 8),
        ([5, *PROMPT[1:]], 0),
        (PROMPT[4:], 0),  # the same tokens at other positions
        (PROMPT[:20], 16),  # its last token is computed again, for it makes the first token
        ([*PROMPT, 1, 2, 3, 4, 5], 20),
    ):
        prompt, token = pair.submit(other)
        pair.run()
        assert cached(prompt) == [hits]
        made = prompt.tokens[len(other) :] + token.tokens[len(other) + 1 :]
        assert made == expected_tokens(SETTINGS, other, 6)


def test_off_by_default() -> None:
    pair = Pair(EmulatedSettings(kv_blocks=32, block_tokens=4, layers=2))
    for _ in range(2):
        prompt, _ = pair.submit(PROMPT)
        pair.run()
        assert cached(prompt) == [0]
    assert pair.batches == [22, 22]


def test_requests_at_once_share_blocks_and_free_them_once() -> None:
    pair = Pair()
    pair.submit(PROMPT)
    pair.run()
    several = [pair.submit(PROMPT) for _ in range(3)]
    iteration = pair.machines[0].begin()
    assert iteration is not None
    assert iteration.batch.prompt_tokens == 3 * 2
    allocator = pair.machines[0].allocator
    assert allocator.users(several[0][0].blocks[0]) == 3
    assert allocator.used == 5 + 3
    for prompt, _ in several[:2]:
        pair.machines[0].abort(prompt)
    for layer in range(SETTINGS.layers):
        pair.machines[0].write_layer(iteration, layer)
    pair.machines[0].finish(iteration)
    pair.run()
    assert [machine.allocator.used for machine in pair.machines] == [0, 0]
    prompt, token = several[2]
    assert prompt.tokens[22:] + token.tokens[23:] == expected_tokens(SETTINGS, PROMPT, 6)


def test_memory_that_is_needed_takes_the_oldest_cached_blocks() -> None:
    allocator = BlockAllocator(4)
    blocks = allocator.take(3)
    assert blocks is not None
    for index, block in enumerate(blocks):
        allocator.publish(block, (index, 7))
    allocator.give_back(blocks)
    assert allocator.free == 4
    assert allocator.share([(0, 7), (1, 7), (9, 9), (2, 7)]) == blocks[:2]
    assert allocator.used == 2
    taken = allocator.take(2)
    assert taken is not None
    assert blocks[2] in taken
    assert allocator.share([(2, 7)]) == []
    assert allocator.take(1) is None
    allocator.give_back(blocks[:2])
    with pytest.raises(BlockError, match="given back twice"):
        allocator.give_back(blocks[:1])
    assert allocator.share([(0, 7)]) == blocks[:1]
