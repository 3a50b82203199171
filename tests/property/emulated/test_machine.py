"""An emulated pair under any order of events: texts stay right, blocks come back, nothing runs twice."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.engine.emulated.expected import expected_tokens
from services.engine.emulated.machine import EmulatedMachine, Iteration
from services.engine.emulated.sequence import Sequence, Stage
from services.engine.emulated.settings import EmulatedSettings
from services.engine.interface import PromptWork, TokenWork, Transfer, WorkKey
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, SamplingParams
from tests.support.loopback_daemon import Client, Daemon

SETTINGS = EmulatedSettings(
    kv_blocks=14, block_tokens=4, layers=2, token_bytes_per_layer=8, max_running=4, max_batch_tokens=10
)
CACHING = SETTINGS.model_copy(update={"prefix_caching": True})
MAX_PROMPT, MAX_OUTPUT = 24, 24


class Pair(RuleBasedStateMachine):
    """A prompt and a token machine, a daemon between them, and every interleaving."""

    settings = SETTINGS
    prompts = st.lists(st.integers(0, 999), min_size=1, max_size=MAX_PROMPT)

    def __init__(self) -> None:
        super().__init__()
        self.daemon = Daemon()
        self.clients = [Client(self.daemon, SETTINGS.layers) for _ in range(2)]
        self.machines = [EmulatedMachine(self.settings, client) for client in self.clients]  # type: ignore[arg-type]
        for client, machine in zip(self.clients, self.machines, strict=True):
            client.machine = machine
        self.iterations: list[Iteration | None] = [None, None]
        self.numbers = itertools.count(1)
        self.live: list[tuple[int, Sequence, list[int]]] = []  # machine, sequence, expected tokens

    def teardown(self) -> None:
        for machine, sequence, _ in self.live:
            self.machines[machine].abort(sequence)
        for key in list(self.daemon.pushes):
            self.daemon.end(key)
        for index in range(2):
            self.finish(index)
            self.take_notices(index)
        for machine in self.machines:
            assert machine.allocator.used == 0, "blocks were lost"
            machine.store.close()
        assert all(sequence.freed.is_set() for _, sequence, _ in self.live)

    @initialize(number=st.integers(0, 4))
    def warm(self, number: int) -> None:
        for first in range(number):
            self.submit(prompt=[300 + first, 301, 302, 303, 304], outputs=MAX_OUTPUT, split=True)

    @rule(data=st.data(), outputs=st.integers(1, MAX_OUTPUT), split=st.booleans())
    def submit_any(self, data: st.DataObject, outputs: int, *, split: bool) -> None:
        self.submit(data.draw(self.prompts), outputs, split=split)

    def submit(self, prompt: list[int], outputs: int, *, split: bool) -> None:
        number = next(self.numbers)
        key = WorkKey(f"r{number}", 1)
        sampling = SamplingParams(max_tokens=outputs, temperature=0.0)
        transfer = Transfer(number.to_bytes(16, "big"), 1) if split else None
        expected = expected_tokens(SETTINGS, prompt, outputs)
        work = PromptWork(key, prompt, sampling, transfer, TRANSFER_MODE_LAYERWISE)
        self.live.append((0, self.machines[0].submit_prompt(work), expected[:1]))
        if transfer is not None and outputs > 1:
            token_work = TokenWork(key, prompt, sampling, transfer, "kvd", "engine", 60_000)
            self.live.append((1, self.machines[1].submit_token(token_work), expected[1:]))

    @rule(index=st.integers(0, 1))
    def begin(self, index: int) -> None:
        if self.iterations[index] is None:
            self.iterations[index] = self.machines[index].begin()

    @rule(index=st.integers(0, 1))
    def finish(self, index: int) -> None:
        iteration, self.iterations[index] = self.iterations[index], None
        if iteration is not None:
            for layer in range(SETTINGS.layers):
                self.machines[index].write_layer(iteration, layer)
            self.machines[index].finish(iteration)

    @rule(index=st.integers(0, 1), steps=st.integers(1, 12))
    def run(self, index: int, steps: int) -> None:
        for _ in range(steps):
            self.finish(index)
            self.begin(index)

    @rule(rounds=st.integers(1, 60))
    def progress(self, rounds: int) -> None:
        """Let both machines and the daemon work for a while, so that long texts get somewhere."""
        for _ in range(rounds):
            for index in range(2):
                self.run(index, 1)
                self.take_notices(index)
            self.deliver_all()

    @rule()
    def deliver_all(self) -> None:
        for key, push in list(self.daemon.pushes.items()):
            if push.deliverable:
                self.daemon.deliver(key)

    @precondition(lambda self: self.daemon.pushes)
    @rule(data=st.data())
    def end_a_transfer(self, data: st.DataObject) -> None:
        self.daemon.end(data.draw(st.sampled_from(sorted(self.daemon.pushes))))

    @rule(index=st.integers(0, 1))
    def take_notices(self, index: int) -> None:
        while self.clients[index].notices:
            self.machines[index].take_notice(self.clients[index].notices.pop(0))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        machine, sequence, _ = data.draw(st.sampled_from(self.live))
        self.machines[machine].abort(sequence)
        self.machines[machine].abort(sequence)

    @invariant()
    def blocks_have_one_owner(self) -> None:
        for index, machine in enumerate(self.machines):
            held = Counter(b for m, sequence, _ in self.live if m == index for b in sequence.blocks)
            assert all(machine.allocator.users(block) == count for block, count in held.items())
            assert len(held) == machine.allocator.used
            assert self.settings.prefix_caching or all(count == 1 for count in held.values())

    @invariant()
    def nobody_gives_way_too_often(self) -> None:
        for index, sequence, _ in self.live:
            if sequence.stage is not Stage.OVER:
                assert self.machines[index].scheduler.preemptions(sequence) <= SETTINGS.max_preemptions

    @invariant()
    def batches_keep_to_their_size(self) -> None:
        for iteration in self.iterations:
            if iteration is not None and iteration.batch.prompt_tokens:
                batch = iteration.batch
                assert batch.prompt_tokens + batch.sequences <= SETTINGS.max_batch_tokens

    @invariant()
    def what_is_over_holds_nothing(self) -> None:
        for _, sequence, _ in self.live:
            if sequence.stage is Stage.OVER:
                assert not sequence.blocks
                assert not sequence.transfer_open
                assert sequence.freed.is_set()

    @invariant()
    def texts_are_right(self) -> None:
        for _, sequence, expected in self.live:
            made = sequence.tokens[sequence.prompt_length :]
            skip = 1 if sequence.token_side else 0
            assert made[skip:] == expected[: len(made[skip:])]
            if sequence.stage is Stage.OVER and not sequence.aborted and not sequence.error:
                assert made[skip:] == expected


class CachingPair(Pair):
    """The same with prefix caches, and prompts that mostly begin alike."""

    settings = CACHING
    prompts = st.builds(
        lambda same, rest: [*range(500, 500 + same), *rest],
        st.integers(0, MAX_PROMPT - 5),
        st.lists(st.integers(0, 1), min_size=1, max_size=5),
    )


TestPair = Pair.TestCase
TestCachingPair = CachingPair.TestCase
TestCachingPair.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPair.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
