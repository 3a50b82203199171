"""The cluster's machines as flat arrays, and the kernels that keep them consistent.

`ClusterState` is six arrays, so that a compiled loop can hold it and the live
scheduler can pass it cheaply:

``machines[ROW, slot]``
    One column per machine, one row per number (the ``ROW`` constants below).
``trees[tree, 2 * capacity]``
    Tournament trees: per model group, pool and phase the least loaded machine is at
    index 1, found without a scan. Leaf ``capacity + slot`` holds the slot or -1.
``members[list, k]`` and ``sizes[list]``
    Per model group and pool the slots in it, in no particular order, for the policies
    that draw a machine instead of the least loaded one.
``cursors[tree]``
    Where round-robin stands.
``turns[0]``
    Counts the phases that were ever booked. A machine remembers the turn of its newest
    one, so that of equally loaded machines the one that waited longest comes first.

Only the kernels here write these arrays. After any change of a machine's counters they
call `refresh`, which costs two walks up a tree: O(log machines).
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from splitwise.scheduling.compiled import compiled

Int64s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
Int32s: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.int32]]

NONE = -1

# Pools and phases as they are counted in the arrays.
POOL_PROMPT, POOL_TOKEN, POOL_MIXED, POOLS = 0, 1, 2, 3
PHASE_PROMPT, PHASE_TOKEN, PHASES = 0, 1, 2

# Rows of `ClusterState.machines`.
GROUP = 0  # machines of one group serve the same model with the same KV fingerprint
POOL = 1  # where it serves now
HOME = 2  # where it belongs
POSITION = 3  # index in its `members` list; NONE: takes no new work
KV_BLOCKS = 4  # capacity
MAX_RUNNING = 5  # requests in its token batch
PROMPT_TOKENS = 6  # of our open prompt phases
OPEN_PROMPTS = 7  # our open prompt phases
TOKEN_REQUESTS = 8  # our open token phases
KV_OWN = 9  # blocks promised to our open attempts
PROMPT_OFFSET = 10  # what the last report said beyond (or below) our own prompt tokens
TOKEN_OFFSET = 11  # the same for requests in the token phase
KV_FOREIGN = 12  # blocks in use beyond what we promised, by the last report
FOREIGN_AT_US = 13  # when it last got work of the kind it is not at home with
PROMPT_KEY = 14  # order in the prompt trees: pending tokens, one per token phase
TOKEN_KEY = 15  # order in the token trees: used minus total KV blocks
PROMPT_TURN = 16  # when it last got a prompt, in turns; 0: never. Decides between equal keys
TOKEN_TURN = 17  # the same for token phases
ROWS = 18

# Added to TOKEN_KEY when the token batch has no place: such machines sort last.
BATCH_FULL = 1 << 40


class ClusterState(NamedTuple):
    """All machines of a cluster; see the module's text for the shapes."""

    machines: Int64s
    trees: Int32s
    members: Int32s
    sizes: Int64s
    cursors: Int64s
    turns: Int64s


def new_state(capacity: int, groups: int = 1) -> ClusterState:
    """Return empty arrays for at least `capacity` machines in `groups` model groups."""
    width = 1 << max(1, (capacity - 1).bit_length())
    machines = np.zeros((ROWS, width), np.int64)
    machines[GROUP] = machines[POSITION] = NONE
    return ClusterState(
        machines=machines,
        trees=np.full((groups * POOLS * PHASES, 2 * width), NONE, np.int32),
        members=np.full((groups * POOLS, width), NONE, np.int32),
        sizes=np.zeros(groups * POOLS, np.int64),
        cursors=np.zeros(groups * POOLS * PHASES, np.int64),
        turns=np.zeros(1, np.int64),
    )


def grown(state: ClusterState, capacity: int, groups: int) -> ClusterState:
    """Return a copy of `state` with room for more machines or model groups."""
    larger = new_state(capacity, groups)
    old_width, old_lists = state.machines.shape[1], len(state.sizes)
    larger.machines[:, :old_width] = state.machines
    larger.members[:old_lists, :old_width] = state.members
    larger.sizes[:old_lists] = state.sizes
    larger.cursors[: len(state.cursors)] = state.cursors
    larger.turns[:] = state.turns
    for slot in range(old_width):
        if larger.machines[POSITION, slot] != NONE:
            refresh(larger, slot)
    return larger


@compiled
def tree_of(group: int, pool: int, phase: int) -> int:
    """Index of a tree in `ClusterState.trees`."""
    return (group * POOLS + pool) * PHASES + phase


@compiled
def least_loaded(state: ClusterState, group: int, pool: int, phase: int) -> int:
    """Slot of the machine that `comes_first` in a pool; or NONE."""
    return int(state.trees[tree_of(group, pool, phase), 1])


@compiled
def comes_first(rows: Int64s, phase: int, one: int, other: int) -> bool:
    """Whether `one` is less loaded than `other`; equal ones take turns.

    Without turns an idle cluster would wear out its first machines: every queue is empty
    again when the next request comes, and the lowest slot would win each time.
    """
    key, turn = PROMPT_KEY + phase, PROMPT_TURN + phase
    if rows[key, one] != rows[key, other]:
        return bool(rows[key, one] < rows[key, other])
    if rows[turn, one] != rows[turn, other]:
        return bool(rows[turn, one] < rows[turn, other])
    return one < other


@compiled
def _climb(state: ClusterState, tree: int, phase: int, slot: int, present: bool) -> None:
    trees = state.trees
    node = trees.shape[1] // 2 + slot
    trees[tree, node] = slot if present else NONE
    while node > 1:
        node >>= 1
        left = trees[tree, 2 * node]
        right = trees[tree, 2 * node + 1]
        if left < 0 or (right >= 0 and comes_first(state.machines, phase, right, left)):
            trees[tree, node] = right
        else:
            trees[tree, node] = left


@compiled
def refresh(state: ClusterState, slot: int) -> None:
    """Recompute a machine's keys from its counters and put it in its place in both trees."""
    rows = state.machines
    token_phases = max(0, rows[TOKEN_REQUESTS, slot] + rows[TOKEN_OFFSET, slot])
    pending = max(0, rows[PROMPT_TOKENS, slot] + rows[PROMPT_OFFSET, slot])
    rows[PROMPT_KEY, slot] = pending + token_phases
    rows[TOKEN_KEY, slot] = rows[KV_OWN, slot] + rows[KV_FOREIGN, slot] - rows[KV_BLOCKS, slot]
    if token_phases >= rows[MAX_RUNNING, slot]:
        rows[TOKEN_KEY, slot] += BATCH_FULL
    if rows[POSITION, slot] != NONE:
        tree = tree_of(rows[GROUP, slot], rows[POOL, slot], PHASE_PROMPT)
        _climb(state, tree, PHASE_PROMPT, slot, True)
        _climb(state, tree + 1, PHASE_TOKEN, slot, True)


@compiled
def enter(state: ClusterState, slot: int) -> None:
    """Let a machine take new work in the pool that its POOL row names."""
    rows = state.machines
    if rows[POSITION, slot] != NONE:
        return
    which = rows[GROUP, slot] * POOLS + rows[POOL, slot]
    rows[POSITION, slot] = state.sizes[which]
    state.members[which, state.sizes[which]] = slot
    state.sizes[which] += 1
    refresh(state, slot)


@compiled
def leave(state: ClusterState, slot: int) -> None:
    """Give a machine no new work; its counters stay."""
    rows = state.machines
    position = rows[POSITION, slot]
    if position == NONE:
        return
    which = rows[GROUP, slot] * POOLS + rows[POOL, slot]
    state.sizes[which] -= 1
    last = state.members[which, state.sizes[which]]
    state.members[which, position] = last
    rows[POSITION, last] = position
    rows[POSITION, slot] = NONE
    tree = which * PHASES
    _climb(state, tree, PHASE_PROMPT, slot, False)
    _climb(state, tree + 1, PHASE_TOKEN, slot, False)


@compiled
def move(state: ClusterState, slot: int, pool: int) -> None:
    """Change a machine's pool, whether or not it takes new work."""
    serving = state.machines[POSITION, slot] != NONE
    leave(state, slot)
    state.machines[POOL, slot] = pool
    if serving:
        enter(state, slot)


@compiled
def install(state: ClusterState, slot: int, group: int, home: int, kv_blocks: int, max_running: int) -> None:
    """Make `slot` a new machine without work, serving in its home pool."""
    rows = state.machines
    leave(state, slot)
    rows[:, slot] = 0
    rows[GROUP, slot] = group
    rows[POOL, slot] = home
    rows[HOME, slot] = home
    rows[POSITION, slot] = NONE
    rows[KV_BLOCKS, slot] = kv_blocks
    rows[MAX_RUNNING, slot] = max_running
    enter(state, slot)


@compiled
def add_prompt(state: ClusterState, slot: int, tokens: int, blocks: int, now_us: int) -> None:
    """Book a prompt phase of `tokens` tokens, holding `blocks` KV blocks, on a machine."""
    rows = state.machines
    rows[PROMPT_TOKENS, slot] += tokens
    rows[OPEN_PROMPTS, slot] += 1
    rows[KV_OWN, slot] += blocks
    state.turns[0] += 1
    rows[PROMPT_TURN, slot] = state.turns[0]
    if rows[HOME, slot] == POOL_TOKEN:
        rows[FOREIGN_AT_US, slot] = now_us
    refresh(state, slot)


@compiled
def end_prompt(state: ClusterState, slot: int, tokens: int) -> None:
    """Book a prompt as computed; its blocks are still held for the hand-over."""
    state.machines[PROMPT_TOKENS, slot] -= tokens
    state.machines[OPEN_PROMPTS, slot] -= 1
    refresh(state, slot)


@compiled
def add_token(state: ClusterState, slot: int, blocks: int, now_us: int) -> None:
    """Book a token phase on a machine, with `blocks` KV blocks promised."""
    rows = state.machines
    rows[TOKEN_REQUESTS, slot] += 1
    rows[KV_OWN, slot] += blocks
    state.turns[0] += 1
    rows[TOKEN_TURN, slot] = state.turns[0]
    if rows[HOME, slot] == POOL_PROMPT:
        rows[FOREIGN_AT_US, slot] = now_us
    refresh(state, slot)


@compiled
def end_token(state: ClusterState, slot: int, blocks: int) -> None:
    """Book a token phase as over and its blocks as free."""
    state.machines[TOKEN_REQUESTS, slot] -= 1
    state.machines[KV_OWN, slot] -= blocks
    refresh(state, slot)


@compiled
def change_kv(state: ClusterState, slot: int, blocks: int) -> None:
    """Book `blocks` more (or, negative, fewer) KV blocks for an open attempt."""
    state.machines[KV_OWN, slot] += blocks
    refresh(state, slot)


@compiled
def take_report(
    state: ClusterState,
    slot: int,
    reported: tuple[int, int, int],
    unseen: tuple[int, int, int],
) -> None:
    """Believe a load report, with what it cannot know of yet added back.

    Both tuples are (prompt tokens, token requests, KV blocks): as reported, and of our
    own assignments that the machine had not accepted when it reported. Whatever the report
    holds beyond our acknowledged work is other routers' work; below it, prompts computed
    in part. Promised KV blocks stay promised while they are not used yet, so KV has no
    negative correction.
    """
    rows = state.machines
    rows[PROMPT_OFFSET, slot] = reported[0] - (rows[PROMPT_TOKENS, slot] - unseen[0])
    rows[TOKEN_OFFSET, slot] = reported[1] - (rows[TOKEN_REQUESTS, slot] - unseen[1])
    rows[KV_FOREIGN, slot] = max(0, reported[2] - (rows[KV_OWN, slot] - unseen[2]))
    refresh(state, slot)


@compiled
def wants_home(state: ClusterState, slot: int, hold_us: int, now_us: int) -> bool:
    """Whether a borrowed machine has finished the other kind of work and stayed long enough.

    The stay counts from the last work of the other kind, so that a machine does not flap
    between the pools at every request.
    """
    rows = state.machines
    home = rows[HOME, slot]
    if rows[POOL, slot] == home:
        return False
    foreign = rows[TOKEN_REQUESTS, slot] if home == POOL_PROMPT else rows[OPEN_PROMPTS, slot]
    return bool(foreign == 0 and now_us - rows[FOREIGN_AT_US, slot] >= hold_us)
