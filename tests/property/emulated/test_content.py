"""The emulated KV: whatever is wrong with a byte, a block or a layer changes the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.emulated.blocks import BlockAllocator, BlockError
from services.engine.emulated.content import (
    KvContent,
    TokenChoice,
    mix,
    mix_words,
    model_salt,
    prefix_sums,
    reference_tokens,
)
from services.engine.emulated.memory import KvStore
from services.engine.emulated.settings import EmulatedSettings

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS = EmulatedSettings(kv_blocks=64, block_tokens=4, layers=3, token_bytes_per_layer=24)
CONTENT = KvContent(model_salt("m"), SETTINGS.layers, SETTINGS.words)
CHOICE = TokenChoice(SETTINGS.vocab_size)
prompts = st.lists(st.integers(0, SETTINGS.vocab_size - 1), min_size=1, max_size=60)


@pytest.fixture(scope="module")
def store() -> Iterator[KvStore]:
    made = KvStore(SETTINGS, CONTENT)
    yield made
    made.close()


def fill(store: KvStore, tokens: list[int], blocks: np.ndarray[tuple[int], np.dtype[np.int64]]) -> int:
    positions = np.arange(len(tokens))
    size = SETTINGS.block_tokens
    store.write(blocks[positions // size], positions % size, prefix_sums(tokens))
    return store.digest(blocks, len(tokens))


def scattered(tokens: list[int], seed: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    count = -(-len(tokens) // SETTINGS.block_tokens)
    return np.random.default_rng(seed).permutation(SETTINGS.kv_blocks)[:count].astype(np.int64)


@given(prompts, st.integers(0, 1000), st.data())
def test_any_wrong_byte_changes_the_digest(
    store: KvStore, tokens: list[int], seed: int, data: st.DataObject
) -> None:
    blocks = scattered(tokens, seed)
    right = fill(store, tokens, blocks)
    position = data.draw(st.integers(0, len(tokens) - 1))
    layer = data.draw(st.integers(0, SETTINGS.layers - 1))
    inside = data.draw(st.integers(0, SETTINGS.token_bytes_per_layer - 1))
    flip = data.draw(st.integers(1, 255))
    geometry = store.geometry
    place = (
        layer * geometry.layer_stride_bytes
        + int(blocks[position // SETTINGS.block_tokens]) * geometry.block_stride_bytes
        + position % SETTINGS.block_tokens * SETTINGS.token_bytes_per_layer
        + inside
    )
    store.memory.buffer[place] ^= flip
    assert store.digest(blocks, len(tokens)) != right
    store.memory.buffer[place] ^= flip
    assert store.digest(blocks, len(tokens)) == right


@given(prompts.filter(lambda tokens: len(tokens) > 2 * SETTINGS.block_tokens), st.integers(0, 1000))
def test_swapped_blocks_a_missing_layer_and_a_stale_block_change_the_digest(
    store: KvStore, tokens: list[int], seed: int
) -> None:
    blocks = scattered(tokens, seed)
    right = fill(store, tokens, blocks)
    swapped = blocks.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert store.digest(swapped, len(tokens)) != right
    other = [*tokens[:-1], (tokens[-1] + 1) % SETTINGS.vocab_size]
    assert fill(store, other, blocks) != right
    fill(store, tokens, blocks)
    start = int(blocks[0]) * store.geometry.block_stride_bytes + store.geometry.layer_stride_bytes
    store.memory.buffer[start : start + store.geometry.block_stride_bytes] = bytes(
        store.geometry.block_stride_bytes
    )
    assert store.digest(blocks, len(tokens)) != right


@given(prompts, st.integers(0, 1000), st.integers(0, 1000))
def test_where_the_blocks_are_does_not_matter(
    store: KvStore, tokens: list[int], one: int, other: int
) -> None:
    assert fill(store, tokens, scattered(tokens, one)) == fill(store, tokens, scattered(tokens, other))


@given(prompts, prompts)
def test_kv_depends_on_everything_before(one: list[int], other: list[int]) -> None:
    """Equal last tokens at equal positions have equal KV only when all tokens before are equal."""
    last = min(len(one), len(other)) - 1
    same = prefix_sums(one)[last] == prefix_sums(other)[last]
    assert same == (one[: last + 1] == other[: last + 1])


@given(prompts, st.integers(1, 20), st.none() | st.integers(0, 2**63 - 1))
def test_the_reference_equals_making_tokens_one_by_one_from_whole_digests(
    tokens: list[int], count: int, seed: int | None
) -> None:
    text = list(tokens)
    for _ in range(count):
        digest = CONTENT.digest(CONTENT.all_words(prefix_sums(text)))
        text.append(CHOICE.choose(digest, seed, may_end=True))
    seeds = [] if seed is None else [seed]
    assert reference_tokens(CONTENT, CHOICE, tokens, count, seeds=seeds) == text[len(tokens) :]


@given(prompts, st.integers(1, 30), st.integers(0, 5))
def test_texts_end_at_the_end_token_alone(tokens: list[int], count: int, least: int) -> None:
    choice = TokenChoice(SETTINGS.vocab_size, eos_probability=0.2)
    made = reference_tokens(CONTENT, choice, tokens, count, min_tokens=least)
    assert choice.eos_token_id not in made[:-1]
    assert len(made) == count or (made[-1] == choice.eos_token_id and len(made) >= least)
    assert all(256 <= token < SETTINGS.vocab_size for token in made)
    assert choice.eos_token_id not in reference_tokens(CONTENT, choice, tokens, count, ignore_eos=True)


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=20))
def test_mixing_words_is_mixing_each(words: list[int]) -> None:
    array = np.array(words, dtype=np.uint64)
    assert mix_words(array).tolist() == [mix(word) for word in words]
    assert array.tolist() == words


class Allocations(RuleBasedStateMachine):
    """No block is ever with two owners, and none is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = BlockAllocator(20)
        self.owned: list[list[int]] = []

    @rule(count=st.integers(0, 25))
    def take(self, count: int) -> None:
        free = self.allocator.free
        taken = self.allocator.take(count)
        if count > free:
            assert taken is None
            return
        assert taken is not None
        assert len(set(taken)) == count
        self.owned.append(taken)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        self.allocator.give_back(self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1))))

    @precondition(lambda self: any(self.owned))
    @rule(data=st.data())
    def give_back_twice(self, data: st.DataObject) -> None:
        blocks = data.draw(st.sampled_from([blocks for blocks in self.owned if blocks]))
        before = self.allocator.used
        with pytest.raises(BlockError, match="occurs twice"):
            self.allocator.give_back([*blocks, blocks[0]])
        assert self.allocator.used == before
        self.allocator.give_back(blocks)
        self.owned.remove(blocks)
        with pytest.raises(BlockError, match="given back twice"):
            self.allocator.give_back(blocks)

    @rule(block=st.sampled_from([-1, 20, 1000]))
    def give_back_what_never_was(self, block: int) -> None:
        with pytest.raises(BlockError, match="does not exist"):
            self.allocator.give_back([block])

    @invariant()
    def every_block_has_one_owner(self) -> None:
        owned = [block for blocks in self.owned for block in blocks]
        assert len(set(owned)) == len(owned) == self.allocator.used
        assert self.allocator.used + self.allocator.free == self.allocator.total == 20


TestAllocations = Allocations.TestCase
TestAllocations.settings = settings(max_examples=50, stateful_step_count=30)
