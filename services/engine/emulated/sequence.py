"""One piece of work inside the emulated engine: its tokens, its KV blocks, where it stands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from services.engine.emulated.content import prefix_sums, token_step

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from services.engine.emulated.blocks import BlockKey
    from services.engine.emulated.content import Words
    from services.engine.interface import TokenOutput, Transfer, WorkKey
    from splitwise.rpc.v1.common_pb2 import SamplingParams

_MASK = (1 << 64) - 1


class Stage(Enum):
    """Where a sequence stands. Each holds blocks from ARRIVING or RUNNING on."""

    WAITING = "waiting"  # no blocks yet
    ARRIVING = "arriving"  # token side: blocks reserved, KV on its way
    RUNNING = "running"  # in the engine's batches
    HANDED_OVER = "handed over"  # prompt side: first token made, KV may still be read
    OVER = "over"  # holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """Work with its state. `computed` positions have their KV written; `tokens` are known."""

    key: WorkKey
    tokens: list[int]
    prompt_length: int
    sampling: SamplingParams
    transfer: Transfer | None
    token_side: bool
    made: int = 0  # output tokens so far, the first token included
    stage: Stage = Stage.WAITING
    computed: int = 0
    cached: int = 0  # of these, found in the prefix cache
    published: int = 0  # blocks offered to the prefix cache
    pushed: int = 0  # blocks announced to the daemon
    transfer_open: bool = False  # the daemon may touch the blocks
    aborted: bool = False
    error: Exception | None = None
    outputs: asyncio.Queue[TokenOutput | None] = field(default_factory=asyncio.Queue)
    freed: asyncio.Event = field(default_factory=asyncio.Event)
    blocks: list[int] = field(default_factory=list)
    _prefixes: Words = field(init=False)
    _block_array: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self._prefixes = prefix_sums(self.tokens)
        self._block_array = np.empty(0, dtype=np.int64)

    @property
    def pending(self) -> int:
        """Positions whose KV is not written yet; 1 in the token phase."""
        return len(self.tokens) - self.computed

    def append(self, token_id: int) -> None:
        """Take a token that was made."""
        position = len(self.tokens)
        prefix = (int(self._prefixes[position - 1]) + token_step(token_id, position)) & _MASK
        if position == len(self._prefixes):
            grown = np.empty(position + max(64, position // 4), dtype=np.uint64)
            grown[:position] = self._prefixes
            self._prefixes = grown
        self._prefixes[position] = prefix
        self.tokens.append(token_id)
        self.made += 1

    def prefixes(self, first: int, last: int) -> Words:
        """Prefix sums of positions `first` to `last` - 1."""
        return self._prefixes[first:last]

    def block_array(self) -> NDArray[np.int64]:
        """Return the block ids as an array."""
        if len(self._block_array) != len(self.blocks):
            self._block_array = np.array(self.blocks, dtype=np.int64)
        return self._block_array

    def forget(self) -> list[int]:
        """Give up all blocks and what was computed in them; returns the blocks."""
        blocks, self.blocks = self.blocks, []
        self._block_array = np.empty(0, dtype=np.int64)
        self.computed = 0
        self.pushed = 0
        self.published = 0
        return blocks

    def block_keys(self, first: int, last: int, block_tokens: int) -> list[BlockKey]:
        """Return the prefix cache's keys of blocks `first` to `last` - 1, all of them full."""
        ends = self._prefixes[(first + 1) * block_tokens - 1 : last * block_tokens : block_tokens]
        return [(first + number, int(end)) for number, end in enumerate(ends)]
