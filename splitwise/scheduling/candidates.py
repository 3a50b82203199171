"""Which machines an assignment was weighed between: noted in the kernel, named when asked.

Noting happens on the decision path, so it costs a few microseconds and no scan: `weigh`
walks the tournament trees best first and copies numbers into an array; `Noted` keeps that
array as bytes beside the machines' names. Only who asks (`splitwise explain`) pays for
turning it into `Candidate` objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling.arrays import (
    KV_BLOCKS,
    KV_FOREIGN,
    KV_OWN,
    NONE,
    PHASE_PROMPT,
    PHASE_TOKEN,
    POOL,
    POOL_MIXED,
    POOL_PROMPT,
    POOL_TOKEN,
    POOLS,
    PROMPT_KEY,
    ClusterState,
    Int64s,
    comes_first,
    tree_of,
)
from splitwise.scheduling.compiled import compiled
from splitwise.scheduling.events import Phase, Pool

if TYPE_CHECKING:
    from collections.abc import Sequence

SHOWN = 8
"""Machines noted per phase, shared among the pools that were looked at; and the chosen one."""

# Columns of a note. Row 0 holds how many rows follow, and how many machines of the prompt's and
# of the token phase's pools were left out.
PHASE, SLOT, IN_POOL, QUEUE_TOKENS, KV_USED, KV_TOTAL, CACHED_TOKENS, CHOSEN = range(8)
COLUMNS = 8
ROWS = 2 * (SHOWN + 1)

NO_NOTES = np.zeros((0, COLUMNS), np.int64)  # for callers that do not want any
PHASES = {PHASE_PROMPT: Phase.PROMPT, PHASE_TOKEN: Phase.TOKEN}
POOL_WORDS = {POOL_PROMPT: Pool.PROMPT, POOL_TOKEN: Pool.TOKEN, POOL_MIXED: Pool.MIXED}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One machine that was weighed for an assignment, as the scheduler saw it just before.

    `queue_tokens`: pending prompt tokens and one per token phase there. `kv_blocks_used`
    of `kv_blocks` are in use or promised. `cached_tokens` of the prompt are thought to be in
    its prefix cache (prefix-aware policy).
    """

    machine_id: str
    phase: Phase
    pool: Pool
    queue_tokens: int
    kv_blocks_used: int
    kv_blocks: int
    cached_tokens: int
    chosen: bool


@dataclass(frozen=True, slots=True)
class Noted:
    """The machines weighed for one assignment, packed: a name per row, and the rows as bytes."""

    names: tuple[str, ...] = ()
    rows: bytes = b""

    def unpack(self) -> tuple[Candidate, ...]:
        """Return the candidates, per phase and pool the least loaded first."""
        return tuple(
            Candidate(
                name, PHASES[row[PHASE]], POOL_WORDS[row[IN_POOL]], row[QUEUE_TOKENS], row[KV_USED],
                row[KV_TOTAL], row[CACHED_TOKENS], bool(row[CHOSEN]),
            )
            for name, row in zip(self.names, self._table()[1:], strict=True)
        )  # fmt: skip

    def left_out(self, phase: Phase) -> int:
        """Return how many more machines were in the pools looked at for this phase."""
        table = self._table()
        return table[0][1 if phase is Phase.PROMPT else 2] if table else 0

    def _table(self) -> list[list[int]]:
        table: list[list[int]] = np.frombuffer(self.rows, np.int64).reshape(-1, COLUMNS).tolist()
        return table


NOTHING = Noted()


def new_notes() -> Int64s:
    """Return an array that `weigh` fills."""
    return np.zeros((ROWS + 1, COLUMNS), np.int64)


def pack(notes: Int64s, name_of: Sequence[str]) -> Noted:
    """Keep what `weigh` noted; `name_of[slot]` is a machine's name now (slots are used again)."""
    end = int(notes[0, 0]) + 1
    return Noted(tuple([name_of[slot] for slot in notes[1:end, SLOT].tolist()]), notes[:end].tobytes())


@compiled
def weigh(
    state: ClusterState, group: int, phase: int, pools: int, chosen: int, hints: Int64s, notes: Int64s
) -> None:
    """Note the best machines of the first `pools` pools that a phase looks in, and the chosen one.

    To be called before the choice is booked. The order of pools is the one of `policies`: the
    phase's own, mixed, the opposite one.
    """
    own = POOL_PROMPT if phase == PHASE_PROMPT else POOL_TOKEN
    before = notes[0, 0]
    total = 0
    for turn in range(pools):
        pool = own if turn == 0 else POOL_MIXED if turn == 1 else POOL_PROMPT + POOL_TOKEN - own
        total += state.sizes[group * POOLS + pool]
        _note_best(state, group, pool, phase, SHOWN // pools, notes)
    seen = False
    for row in range(before + 1, notes[0, 0] + 1):
        if notes[row, SLOT] == chosen:
            notes[row, CHOSEN] = 1
            seen = True
    if not seen:
        _note(state, phase, chosen, notes)
        notes[notes[0, 0], CHOSEN] = 1
    for row in range(before + 1, notes[0, 0] + 1):
        for k in range(hints.shape[0]):
            if hints[k, 0] == notes[row, SLOT]:
                notes[row, CACHED_TOKENS] = hints[k, 1]
    notes[0, 1 + phase] = max(0, total - (notes[0, 0] - before))


@compiled
def _note(state: ClusterState, phase: int, slot: int, notes: Int64s) -> None:
    rows = state.machines
    notes[0, 0] += 1
    row = notes[0, 0]
    notes[row, PHASE] = phase
    notes[row, SLOT] = slot
    notes[row, IN_POOL] = rows[POOL, slot]
    notes[row, QUEUE_TOKENS] = rows[PROMPT_KEY, slot]
    notes[row, KV_USED] = rows[KV_OWN, slot] + rows[KV_FOREIGN, slot]
    notes[row, KV_TOTAL] = rows[KV_BLOCKS, slot]
    notes[row, CACHED_TOKENS] = 0
    notes[row, CHOSEN] = 0


@compiled
def _note_best(state: ClusterState, group: int, pool: int, phase: int, count: int, notes: Int64s) -> None:
    """Note the first `count` machines of one pool, in order, from its tournament tree.

    A node holds the winner of all leaves below it. When a winner is taken, the next one is
    among the losers that it met on its way up: these are looked at instead of all machines.
    """
    tree = state.trees[tree_of(group, pool, phase)]
    width = tree.shape[0] // 2
    nodes = np.empty(64 * count, np.int64)  # a tree is never deeper
    size = 0
    if tree[1] != NONE:
        nodes[0] = 1
        size = 1
    while size > 0 and count > 0:
        best = 0
        for k in range(1, size):
            if comes_first(state.machines, phase, tree[nodes[k]], tree[nodes[best]]):
                best = k
        node = nodes[best]
        slot = tree[node]
        _note(state, phase, slot, notes)
        count -= 1
        size -= 1
        nodes[best] = nodes[size]
        while node < width:
            left = 2 * node
            loser = left + 1 if tree[left] == slot else left
            if tree[loser] != NONE:
                nodes[size] = loser
                size += 1
            node = 2 * left + 1 - loser
