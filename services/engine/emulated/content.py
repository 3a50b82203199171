"""What an emulated KV cache holds, and the tokens that follow from it: pure functions.

The KV of a token is `words` 64-bit words per layer. They depend on the model's salt, the
layer, the token's position and *all* token ids up to it, as in a real model. The next
token depends on every one of those words, read back from memory::

    prefix[p] = sum of mix(token[i], i) over i <= p               (mod 2**64)
    word[layer, p, j] = mix(prefix[p] + lane(layer, j))
    digest(n) = sum of word * weight(layer, p, j) over all p < n  (mod 2**64)
    token n = choose(digest(n), seed)

Weights are odd, so that a change of any single word changes the digest for certain;
swapped, stale and missing words change it but for a chance of 2**-64. The digest does not
know blocks: what is where in memory is the engine's affair, and `reference_tokens` needs
no memory at all.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

FIRST_WORD = 256  # lower ids are bytes in the router's built-in vocabulary
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1, _MUL2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_U = np.uint64
_U_MUL1, _U_MUL2 = _U(_MUL1), _U(_MUL2)
_S30, _S27, _S31 = _U(30), _U(27), _U(31)
_TOKEN_STEP, _POSITION_STEP = 0xD1342543DE82EF95, 0xA0761D6478BD642F
_WEIGHT_GROWTH = 1024


def mix(value: int) -> int:
    """Scatter 64 bits (the finalizer of splitmix64: a bijection)."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MUL1) & _MASK
    value = ((value ^ (value >> 27)) * _MUL2) & _MASK
    return value ^ (value >> 31)


def mix_words(words: Words) -> Words:
    """`mix` of each element; works on a copy."""
    out = words ^ (words >> _S30)
    out *= _U_MUL1
    out ^= out >> _S27
    out *= _U_MUL2
    out ^= out >> _S31
    return out


def model_salt(model: str) -> int:
    """64 bits that tell one model's KV from another's."""
    return int.from_bytes(hashlib.blake2b(model.encode(), digest_size=8).digest(), "little")


def token_step(token_id: int, position: int) -> int:
    """Return what one token adds to the prefix sum."""
    return mix(token_id * _TOKEN_STEP + position * _POSITION_STEP + _GOLDEN)


def prefix_sums(token_ids: Sequence[int]) -> Words:
    """Return the prefix sum at each position, shape (tokens,)."""
    ids = np.asarray(token_ids, dtype=np.uint64)
    positions = np.arange(len(ids), dtype=np.uint64)
    steps = mix_words(ids * _U(_TOKEN_STEP) + positions * _U(_POSITION_STEP) + _U(_GOLDEN))
    return np.cumsum(steps, dtype=np.uint64)


@dataclass(slots=True)
class KvContent:
    """The content of one model's KV cache: `layers` x tokens x `words` 64-bit words."""

    salt: int
    layers: int
    words: int
    _lanes: Words = field(init=False)
    _weights: Words = field(init=False)

    def __post_init__(self) -> None:
        lanes = np.arange(self.layers * self.words, dtype=np.uint64).reshape(self.layers, 1, self.words)
        self._lanes = mix_words(lanes * _U(_GOLDEN) + _U(self.salt))
        self._weights = np.empty((self.layers, 0, self.words), dtype=np.uint64)

    def layer_words(self, layer: int, prefixes: Words) -> Words:
        """Return the KV of the tokens with these prefix sums in one layer, shape (tokens, words)."""
        return mix_words(prefixes[:, None] + self._lanes[layer])

    def all_words(self, prefixes: Words) -> Words:
        """Return the KV of the tokens in all layers, shape (layers, tokens, words)."""
        return mix_words(prefixes[None, :, None] + self._lanes)

    def weights(self, tokens: int) -> Words:
        """Return the digest's weights of the first `tokens` positions, shape (layers, tokens, words)."""
        have = self._weights.shape[1]
        if have < tokens:
            size = -(-tokens // _WEIGHT_GROWTH) * _WEIGHT_GROWTH
            rows = _weight_rows(self.layers * self.words, size)
            self._weights = np.ascontiguousarray(
                rows.reshape(self.layers, self.words, size).transpose(0, 2, 1)
            )
        return self._weights[:, :tokens]

    def digest(self, held: Words) -> int:
        """Digest the KV of a request, (layers, tokens, words) as read from memory."""
        layers, tokens, words = held.shape
        weights = self.weights(tokens)
        total = 0
        for layer in range(layers):
            flat = np.ascontiguousarray(held[layer]).reshape(tokens * words)
            total += int(np.dot(flat, weights[layer].reshape(tokens * words)))
        return total & _MASK


@lru_cache(maxsize=4)
def _weight_rows(lanes: int, size: int) -> Words:
    counts = np.arange(size, dtype=np.uint64)
    lane = np.arange(lanes, dtype=np.uint64)[:, None] << _U(40)
    return mix_words((counts + lane) * _U(_GOLDEN)) | _U(1)


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """How a digest becomes a token id: words of the vocabulary, or the end of the text."""

    vocab_size: int
    eos_probability: float = 0.0

    @property
    def eos_token_id(self) -> int:
        """The last id of the vocabulary ends a text; it is never made otherwise."""
        return self.vocab_size - 1

    def choose(self, digest: int, seed: int | None, *, may_end: bool) -> int:
        """Return the token id; `seed` is None for greedy sampling."""
        bits = mix(digest if seed is None else digest + mix(seed + _GOLDEN))
        if may_end and mix(bits + 1) < self.eos_probability * 2.0**64:
            return self.eos_token_id
        return FIRST_WORD + bits % (self.vocab_size - 1 - FIRST_WORD)


def reference_tokens(
    content: KvContent,
    choice: TokenChoice,
    prompt: Sequence[int],
    count: int,
    *,
    seeds: Sequence[int | None] = (),
    min_tokens: int = 0,
    ignore_eos: bool = False,
) -> list[int]:
    """Return the tokens that an intact cluster makes for `prompt`, without any memory or machine.

    `seeds` holds one seed per output position (the last one goes on); empty is greedy.
    """
    prefixes = prefix_sums(prompt)
    weights = content.weights(len(prompt) + count)
    digest = content.digest(content.all_words(prefixes))
    prefix = int(prefixes[-1])
    made: list[int] = []
    while len(made) < count:
        seed = seeds[min(len(made), len(seeds) - 1)] if seeds else None
        may_end = not ignore_eos and len(made) + 1 >= min_tokens
        token = choice.choose(digest, seed, may_end=may_end)
        made.append(token)
        if may_end and token == choice.eos_token_id:
            break
        position = len(prompt) + len(made) - 1
        prefix = (prefix + token_step(token, position)) & _MASK
        words = content.all_words(np.array([prefix], dtype=np.uint64))
        digest = (digest + int(np.sum(words[:, 0] * weights[:, position], dtype=np.uint64))) & _MASK
    return made
