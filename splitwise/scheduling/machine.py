"""The machine scheduler (MLS) of one machine: its queues around the rules of `batching`.

`MachineScheduler` says what an engine computes in its next iteration and how many KV blocks
everyone holds; which blocks these are is up to the engine's `Memory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import numpy as np

from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.batching import (
    BLOCKS,
    COLUMNS,
    KNOWN,
    MOST,
    PENDING,
    PREEMPTED,
    TAKEN,
    blocks_for,
    form_batch,
    lets_pass,
    missing_blocks,
    pick_victim,
    wanted_blocks,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable

    from splitwise.scheduling.arrays import Int32s

Key = TypeVar("Key", bound="Hashable")
Key_contra = TypeVar("Key_contra", bound="Hashable", contravariant=True)


class Memory(Protocol[Key_contra]):
    """The KV blocks of a machine, whoever numbers them."""

    @property
    def free(self) -> int:
        """Blocks that can be taken now."""

    def take(self, key: Key_contra, blocks: int, leave: int) -> int:
        """Give `blocks` blocks to work without any, if `leave` others stay free.

        Returns for how many of its tokens they hold KV already (a cached prefix; less than
        all), or NONE when nothing was given.
        """

    def grow(self, key: Key_contra, blocks: int) -> None:
        """Give work that holds blocks `blocks` more; so many are free."""

    def take_back(self, key: Key_contra) -> None:
        """Take all blocks of work that is evicted."""


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What one machine can do. Defaults are those of the paper and of SplitwiseSim."""

    block_tokens: int = 16
    max_batch_tokens: int = 2048
    max_running: int = 512  # token phases
    max_preemptions: int = 4
    headroom: int = 0
    """KV blocks that arriving KV leaves to prompts, and prompts to arriving KV: each may be
    what the other waits for, here or on another machine."""

    def __post_init__(self) -> None:
        """Refuse limits under which something could starve."""
        if min(self.block_tokens, self.max_running, self.max_preemptions) < 1 or self.headroom < 0:
            message = f"{self}: all but headroom must be 1 or more, headroom 0 or more"
            raise ValueError(message)
        if self.max_running >= self.max_batch_tokens:
            message = (
                f"max_running is {self.max_running}: it must be below max_batch_tokens"
                f" ({self.max_batch_tokens}), or token phases could leave no room for a prompt"
            )
            raise ValueError(message)


class Stage(Enum):
    """Where work stands on the machine. All but WAITING hold memory."""

    WAITING = "waiting"  # for memory
    ARRIVING = "arriving"  # for its KV cache from the prompt machine
    PROMPT = "prompt"  # to be computed, also after an eviction
    TOKEN = "token"  # noqa: S105 - in the token phase
    COMPUTED = "computed"  # a prompt whose KV cache is still to be handed over


@dataclass(slots=True)
class _Work:
    row: int
    token_side: bool
    stage: Stage = Stage.WAITING


@dataclass(frozen=True, slots=True)
class Batch(Generic[Key]):
    """One iteration: (key, tokens to compute) each, and what the performance model asks for."""

    parts: tuple[tuple[Key, int], ...] = ()
    prompt_tokens: int = 0
    prompt_sequences: int = 0
    sequences: int = 0  # in the token phase
    context: int = 0  # tokens whose KV the token phases read
    sat_out: tuple[Key, ...] = ()  # token phases for which there was no room


class MachineScheduler(Generic[Key]):
    """The queues of one machine. Keys are the engine's names for work.

    Before each iteration: `make_room`, `admit`, `next_batch`; after it `complete`. `reserve`
    whenever a token phase was added or memory became free.
    """

    def __init__(self, limits: MachineLimits, memory: Memory[Key]) -> None:
        self.limits = limits
        self._memory = memory
        self._works: dict[Key, _Work] = {}
        self._table: Int32s = np.zeros((16, COLUMNS), np.int32)
        self._keys: dict[int, Key] = {}  # by row
        self._free_rows = list(range(16))
        self._waiting: list[Key] = []  # prompts, and before them the evicted
        self._arrivals: list[Key] = []  # token phases without memory
        self._prompts: list[int] = []  # rows
        self._phases: list[int] = []  # rows

    # ---- work in and out

    def add_prompt(self, key: Key, tokens: int) -> None:
        """Queue a prompt; raises ValueError when the key is in use."""
        self._add(key, tokens, tokens, token_side=False)
        self._waiting.append(key)

    def add_token(self, key: Key, tokens: int, most: int) -> None:
        """Queue a token phase that may grow to `most` tokens and whose KV of `tokens` will arrive.

        The machine must be able to hold `most`. Raises ValueError when the key is in use.
        """
        self._add(key, tokens, most, token_side=True)
        self._arrivals.append(key)

    def _add(self, key: Key, known: int, most: int, *, token_side: bool) -> None:
        if key in self._works:
            message = f"work {key!r} is already on this machine"
            raise ValueError(message)
        if not self._free_rows:
            rows = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._free_rows = list(range(rows, 2 * rows))
        row = self._free_rows.pop()
        self._keys[row] = key
        self._table[row] = 0
        self._table[row, KNOWN], self._table[row, MOST] = known, most
        self._works[key] = _Work(row, token_side)

    def remove(self, key: Key) -> None:
        """Forget work: it ended, was aborted, or its KV is handed over. Its memory is the caller's."""
        work = self._works.pop(key)
        del self._keys[work.row]
        self._free_rows.append(work.row)
        for keys in (self._waiting, self._arrivals):
            if key in keys:
                keys.remove(key)
        for rows in (self._prompts, self._phases):
            if work.row in rows:
                rows.remove(work.row)

    def stage(self, key: Key) -> Stage:
        """Return where work stands; KeyError when there is none of this key."""
        return self._works[key].stage

    def preemptions(self, key: Key) -> int:
        """How often its token phase sat out or was evicted."""
        return int(self._table[self._works[key].row, PREEMPTED])

    def held(self, key: Key) -> int:
        """KV blocks that work holds."""
        return int(self._table[self._works[key].row, BLOCKS])

    # ---- memory

    def admit(self) -> list[Key]:
        """Give memory to prompts, and the evicted before them, in order; returns who has it now."""
        admitted: list[Key] = []
        for key in list(self._waiting):
            leave = self.limits.headroom if self._arrivals and self._prompts_hold() else 0
            if self._begin(key, leave, Stage.PROMPT):
                self._waiting.remove(key)
                self._prompts.append(self._works[key].row)
                admitted.append(key)
            elif not lets_pass(self._table, self._works[key].row):
                break
        return admitted

    def reserve(self) -> list[Key]:
        """Give memory to token phases whose KV is to arrive, in order; returns who has it now."""
        reserved: list[Key] = []
        while self._arrivals and self._places() > 0:
            key = self._arrivals[0]
            leave = self.limits.headroom if self._count(lambda w: w.stage is Stage.ARRIVING) else 0
            if not self._begin(key, leave, Stage.ARRIVING):
                break
            self._arrivals.pop(0)
            reserved.append(key)
        return reserved

    def _count(self, chosen: Callable[[_Work], bool]) -> int:
        return sum(chosen(work) for work in self._works.values())

    def _prompts_hold(self) -> bool:
        return bool(self._count(lambda w: not w.token_side and w.stage is not Stage.WAITING))

    def _places(self) -> int:
        """Token phases that may still be taken in; one that is evicted keeps its place."""
        return self.limits.max_running - self._count(lambda w: w.token_side) + len(self._arrivals)

    def _begin(self, key: Key, leave: int, stage: Stage) -> bool:
        work, limits = self._works[key], self.limits
        blocks = int(wanted_blocks(self._table, work.row, limits.block_tokens, limits.max_preemptions))
        cached = self._memory.take(key, blocks, leave)
        if cached == NONE:
            return False
        self._table[work.row, BLOCKS] = blocks
        self._table[work.row, PENDING] = self._table[work.row, KNOWN] - cached
        work.stage = stage
        return True

    def make_room(self) -> list[Key]:
        """Give every token phase the block that its next token needs; returns who was evicted for it.

        The evicted have given their KV up; it is computed again when there is memory.
        """
        size, evicted = self.limits.block_tokens, []
        while self._phases:
            phases = np.array(self._phases, np.int32)
            if missing_blocks(self._table, phases, len(phases), size, 0) <= self._memory.free:
                break
            victim = int(pick_victim(self._table, phases, len(phases), self.limits.max_preemptions))
            if victim == NONE:  # all have the memory they can ever need
                break
            evicted.append(self._evict(self._phases.pop(victim)))
        for row in self._phases:
            missing = int(blocks_for(self._table[row, KNOWN], size) - self._table[row, BLOCKS])
            if missing > 0:
                self._memory.grow(self._keys[row], missing)
                self._table[row, BLOCKS] += missing
        return evicted

    def _evict(self, row: int) -> Key:
        key = self._keys[row]
        self._memory.take_back(key)
        self._table[row, BLOCKS] = 0
        self._table[row, PREEMPTED] += 1
        self._works[key].stage = Stage.WAITING
        self._waiting.insert(0, key)
        return key

    # ---- iterations

    def ready(self, key: Key) -> None:
        """The KV of a token phase is here, and the first token with it: it joins the batch."""
        work = self._works[key]
        work.stage = Stage.TOKEN
        self._table[work.row, PENDING] = 0
        self._table[work.row, KNOWN] += 1
        self._phases.append(work.row)

    def next_batch(self) -> Batch[Key]:
        """Choose what runs next."""
        limits, table = self.limits, self._table
        prompts, phases = (np.array(rows, np.int32) for rows in (self._prompts, self._phases))
        taken, _ = form_batch(
            table, prompts, len(prompts), phases, len(phases), limits.max_batch_tokens, limits.max_preemptions
        )
        first = self._prompts[:taken]
        active = [row for row in self._phases if table[row, TAKEN]]
        return Batch(
            parts=tuple((self._keys[row], int(table[row, TAKEN])) for row in (*first, *active)),
            prompt_tokens=int(table[first, TAKEN].sum()),
            prompt_sequences=taken,
            sequences=len(active),
            context=int(table[active, KNOWN].sum()),
            sat_out=tuple(self._keys[row] for row in self._phases if not table[row, TAKEN]),
        )

    def complete(self, batch: Batch[Key]) -> list[Key]:
        """Book a computed batch; returns whose token was made (a prompt's last chunk makes one)."""
        made = []
        for key, tokens in batch.parts:
            work = self._works.get(key)
            if work is None:  # aborted meanwhile
                continue
            self._table[work.row, TAKEN] = 0
            if work.stage is Stage.PROMPT:
                self._table[work.row, PENDING] -= tokens
                if self._table[work.row, PENDING] > 0:
                    continue
                self._prompts.remove(work.row)
                work.stage = Stage.COMPUTED
                if work.token_side:
                    work.stage = Stage.TOKEN
                    self._phases.append(work.row)
            self._table[work.row, KNOWN] += 1
            made.append(key)
        return made
