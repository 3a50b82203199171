"""How KV blocks lie in one engine rank's memory, and which engines may exchange them.

A block of one layer is `block_bytes_per_layer` contiguous bytes at

    base_offset + layer * layer_stride_bytes + block * block_stride_bytes

Engines exchange blocks only when everything in `SHARED_FACTS` is equal: model, dtype,
layout inside a block, attention backend, sizes, and the tensor-parallel split.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARED_FACTS = (
    "model",
    "dtype",
    "layout",
    "backend",
    "layers",
    "block_tokens",
    "block_bytes_per_layer",
    "tp_rank",
    "tp_size",
)


class GeometryError(ValueError):
    """The description of a KV memory contradicts itself or its size."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """One rank's KV memory. Sizes in bytes; `tp_rank` counts from 0."""

    layers: int
    num_blocks: int
    block_bytes_per_layer: int
    layer_stride_bytes: int
    block_stride_bytes: int
    base_offset: int
    block_tokens: int
    dtype: str
    layout: str
    model: str
    backend: str
    tp_rank: int = 0
    tp_size: int = 1

    def facts(self) -> list[str]:
        """List what must be equal on both sides, as ``name=value``."""
        return [f"{name}={getattr(self, name)}" for name in SHARED_FACTS]

    def fingerprint(self) -> str:
        """Return a hash over `facts`: equal fingerprints may exchange blocks."""
        return hashlib.blake2b("\n".join(self.facts()).encode(), digest_size=16).hexdigest()

    def differences(self, other: Geometry) -> list[str]:
        """Name each fact in which `other` differs: ``dtype: bfloat16 here, float32 there``."""
        return [
            f"{name}: {getattr(self, name)} here, {getattr(other, name)} there"
            for name in SHARED_FACTS
            if getattr(self, name) != getattr(other, name)
        ]

    def offset(self, layer: int, block: int) -> int:
        """Return where a block of a layer begins, from the start of the memory."""
        return self.base_offset + layer * self.layer_stride_bytes + block * self.block_stride_bytes

    def check(self, memory_bytes: int) -> None:
        """Raise `GeometryError` unless every block lies in `memory_bytes` and none overlaps another."""
        for name in ("layers", "num_blocks", "block_bytes_per_layer", "block_tokens", "tp_size"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}: must be at least 1")
        if not 0 <= self.tp_rank < self.tp_size:
            raise GeometryError(f"tp_rank {self.tp_rank} is outside the {self.tp_size} ranks")
        end = self.offset(self.layers - 1, self.num_blocks - 1) + self.block_bytes_per_layer
        if end > memory_bytes:
            raise GeometryError(f"the last block ends at byte {end}, the memory at {memory_bytes}")
        self._check_overlap()

    def _check_overlap(self) -> None:
        strides = (
            (self.layers, self.layer_stride_bytes),
            (self.num_blocks, self.block_stride_bytes),
        )
        reach = self.block_bytes_per_layer
        for count, stride in sorted(strides, key=lambda pair: pair[1]):
            if count > 1 and stride < reach:
                raise GeometryError(
                    f"a stride of {stride} bytes is less than the {reach} bytes it steps over"
                )
            reach += (count - 1) * stride

    def check_blocks(self, block_ids: Iterable[int]) -> None:
        """Raise `GeometryError` for a block id that is not there or occurs twice."""
        seen: set[int] = set()
        for block in block_ids:
            if not 0 <= block < self.num_blocks:
                raise GeometryError(f"block id {block} is outside the {self.num_blocks} blocks")
            if block in seen:
                raise GeometryError(f"block id {block} occurs twice")
            seen.add(block)
