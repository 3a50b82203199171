"""The emulated engine's KV memory: real bytes in shared memory, seen as words."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from services.kvd.memfd import MemfdMemory
from splitwise.rpc.v1.kvd_pb2 import KvGeometry

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.engine.emulated.content import KvContent, Words
    from services.engine.emulated.settings import EmulatedSettings

LAYOUT = "LBTW"  # layer, block, token of the block, word


class KvStore:
    """`kv_blocks` blocks in a memfd, addressed by (layer, block, token of the block)."""

    def __init__(self, settings: EmulatedSettings, content: KvContent) -> None:
        self._content = content
        self.block_tokens = settings.block_tokens
        shape = (settings.layers, settings.kv_blocks, settings.block_tokens, settings.words)
        self.memory = MemfdMemory(int(np.prod(shape)) * 8, name="splitwise-emulated-kv")
        self._words: NDArray[np.uint64] = np.frombuffer(self.memory.buffer, dtype=np.uint64).reshape(shape)
        block = settings.block_tokens * settings.token_bytes_per_layer
        self.geometry = KvGeometry(
            layers=settings.layers,
            num_blocks=settings.kv_blocks,
            block_bytes_per_layer=block,
            layer_stride_bytes=block * settings.kv_blocks,
            block_stride_bytes=block,
            base_offset=0,
            block_tokens=settings.block_tokens,
            dtype="uint64",
            layout=LAYOUT,
            model=settings.model,
            backend="emulated",
            tp_rank=0,
            tp_size=1,
        )

    def write_layer(
        self, layer: int, blocks: NDArray[np.int64], offsets: NDArray[np.int64], prefixes: Words
    ) -> None:
        """Write one layer's KV of several tokens: token i into place `offsets[i]` of block `blocks[i]`."""
        self._words[layer, blocks, offsets] = self._content.layer_words(layer, prefixes)

    def write(self, blocks: NDArray[np.int64], offsets: NDArray[np.int64], prefixes: Words) -> None:
        """Write all layers' KV of several tokens."""
        self._words[:, blocks, offsets] = self._content.all_words(prefixes)

    def digest(self, blocks: NDArray[np.int64], tokens: int) -> int:
        """Read the KV of a request's first `tokens` tokens back, all layers, and digest it."""
        layers, _, size, words = self._words.shape
        held = self._words[:, blocks[: -(-tokens // size)]]
        return self._content.digest(held.reshape(layers, -1, words)[:, :tokens])

    def close(self) -> None:
        """Give the memory back."""
        self._words = np.empty((0, 0, 0, 0), dtype=np.uint64)
        self.memory.close()
