"""Telling whether the bytes that arrived are the bytes that were sent, and in their places.

The byte count is always compared. With checksums on, both sides also hash every block, layer
by layer and in the request's order of blocks, so that a flipped byte, a zeroed or swapped
block and a missing layer each change the result (XXH3, 64 bits: made to find accidents, not
attacks; the daemons' identities are TLS's business).
"""

from __future__ import annotations

import xxhash


class LayerDigests:
    """A running hash for each layer; blocks must be added in the request's order."""

    def __init__(self, layers: int) -> None:
        self._layers = [xxhash.xxh3_64() for _ in range(layers)]

    def add(self, layer: int, block: bytes | memoryview) -> None:
        """Take one more block (or several that follow each other) of a layer."""
        self._layers[layer].update(block)

    def value(self) -> int:
        """Return one number, 64 bits, over all layers so far."""
        whole = xxhash.xxh3_64()
        for layer in self._layers:
            whole.update(layer.digest())
        return whole.intdigest()
