"""From block ids to copies: which bytes go where, with neighbours coalesced.

A plan speaks of one (source rank, destination rank, head range). Today both sides split the
heads alike, so a plan is always one rank to the same rank with all of its heads; splits that
differ become several plans per layer, without another type.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from splitwise.kv.geometry import Geometry

    Int64s = npt.NDArray[np.int64]


class PlanError(ValueError):
    """The two sides cannot be brought together."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank and the range of its KV heads, as fractions of all heads: [start, stop)."""

    rank: int
    heads: tuple[float, float]


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Copies of one layer: arrays of equal length, offsets from the start of each memory."""

    source: Shard
    destination: Shard
    source_offsets: Int64s
    destination_offsets: Int64s
    sizes: Int64s

    @property
    def nbytes(self) -> int:
        """Bytes that the plan moves."""
        return int(self.sizes.sum())


def coalesce(source: Int64s, destination: Int64s, size: int) -> tuple[Int64s, Int64s, Int64s]:
    """Merge neighbours that are contiguous on both sides.

    `source` and `destination` are the offsets of pieces of `size` bytes, shape (n,). Returns
    offsets and sizes of the merged runs, in the order of the pieces.
    """
    sizes = np.full(len(source), size, np.int64)
    if len(source) < 2:
        return source, destination, sizes
    follows = (np.diff(source) == size) & (np.diff(destination) == size)
    starts = np.concatenate(([0], np.flatnonzero(~follows) + 1))
    return source[starts], destination[starts], np.add.reduceat(sizes, starts)


def plan_layer(
    source: Geometry,
    destination: Geometry,
    layer: int,
    source_blocks: Sequence[int],
    destination_blocks: Sequence[int],
) -> CopyPlan:
    """Plan the copies of one layer of equally many blocks; raises `PlanError`."""
    different = source.differences(destination)
    if different:
        raise PlanError(f"the KV memories differ in {'; '.join(different)}")
    if len(source_blocks) != len(destination_blocks):
        raise PlanError(f"{len(source_blocks)} blocks cannot go to {len(destination_blocks)}")
    here = source.offset(layer, 0) + np.asarray(source_blocks, np.int64) * source.block_stride_bytes
    there = destination.offset(layer, 0) + np.asarray(destination_blocks, np.int64) * (
        destination.block_stride_bytes
    )
    runs = coalesce(here, there, source.block_bytes_per_layer)
    share = 1 / source.tp_size
    shard = Shard(source.tp_rank, (source.tp_rank * share, (source.tp_rank + 1) * share))
    return CopyPlan(shard, shard, *runs)
