"""Hands out KV blocks and catches every wrong return of one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_FREE, _USED = 0, 1


class BlockError(Exception):
    """A block was returned twice, or never belonged to the one who returned it. A bug, never load."""


class BlockAllocator:
    """`total` blocks, numbered from 0; the last returned are used again first.

    Reusing recently returned blocks first makes a late write of an old transfer hit a
    running request, where the emulated engine notices it.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"{total} KV blocks: at least one is needed")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._state = bytearray(total)

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that are taken."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when there are not so many."""
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > len(self._free):
            return None
        if count == 0:
            return []
        taken = self._free[-count:]
        taken.reverse()
        del self._free[-count:]
        for block in taken:
            self._state[block] = _USED
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks; `BlockError` (and nothing is returned) when one of them is free already."""
        returned = list(blocks)
        for block in returned:
            if not 0 <= block < self.total:
                raise BlockError(f"block {block} does not exist; there are {self.total}")
            if self._state[block] == _FREE:
                raise BlockError(f"block {block} was given back twice")
        if len(set(returned)) != len(returned):
            raise BlockError(f"a block occurs twice among those given back: {sorted(returned)}")
        for block in returned:
            self._state[block] = _FREE
        self._free.extend(reversed(returned))
