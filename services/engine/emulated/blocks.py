"""Hands out KV blocks, keeps full ones for later prompts with the same beginning, catches wrong returns."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

BlockKey: TypeAlias = tuple[int, int]  # index in the request, prefix sum at the block's last token


class BlockError(Exception):
    """A block was returned once too often, or does not exist. A bug, never load."""


class BlockAllocator:
    """`total` blocks, numbered from 0, each with a count of its users.

    Blocks that were returned last are used again first: a late write of an old transfer
    then hits a running request, where the emulated engine notices it. Published blocks
    keep their content while they are not needed; the least recently used goes first.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"{total} KV blocks: at least one is needed")
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._users = [0] * total
        self._key_of: dict[int, BlockKey] = {}
        self._block_of: dict[BlockKey, int] = {}
        self._unused: OrderedDict[int, None] = OrderedDict()  # published, without a user

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """Blocks that have a user."""
        return self.total - self.free

    def users(self, block: int) -> int:
        """Return how many hold a block."""
        return self._users[block]

    def take(self, count: int) -> list[int] | None:
        """Take `count` blocks, or none at all when there are not so many."""
        if count < 0:
            raise ValueError(f"cannot take {count} blocks")
        if count > self.free:
            return None
        taken = []
        for _ in range(count):
            block = self._free.pop() if self._free else self._evict()
            self._users[block] = 1
            taken.append(block)
        return taken

    def _evict(self) -> int:
        block, _ = self._unused.popitem(last=False)
        del self._block_of[self._key_of.pop(block)]
        return block

    def publish(self, block: int, key: BlockKey) -> None:
        """Offer a block that is full and will not be written again to other requests."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def share(self, keys: Iterable[BlockKey]) -> list[int]:
        """Take the blocks that hold the first of these keys, up to the first that is missing."""
        shared = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            self._unused.pop(block, None)
            self._users[block] += 1
            shared.append(block)
        return shared

    def give_back(self, blocks: Iterable[int]) -> None:
        """Return blocks; `BlockError` (and nothing is returned) when one of them has no user."""
        returned = list(blocks)
        for block in returned:
            if not 0 <= block < self.total:
                raise BlockError(f"block {block} does not exist; there are {self.total}")
            if self._users[block] == 0:
                raise BlockError(f"block {block} was given back twice")
        if len(set(returned)) != len(returned):
            raise BlockError(f"a block occurs twice among those given back: {sorted(returned)}")
        for block in reversed(returned):  # a request's last blocks are forgotten first
            self._users[block] -= 1
            if self._users[block]:
                continue
            if block in self._key_of:
                self._unused[block] = None
            else:
                self._free.append(block)
