"""Where a request runs: the routing rules as kernels over `ClusterState`.

`choose_pair` is the cluster scheduler's decision (Splitwise paper, section IV-A): the
prompt machine and the token machine are chosen together at arrival. Each phase looks in
its own pool, then in the mixed pool, then borrows from the opposite pool; when one of
the phases finds no place, one machine takes both. A *policy* only says which machine of
a pool is looked at first; `TOGETHER` leaves the pools out and never splits a request.

Thresholds come in `limits`, an int64 array with the ``LIMIT`` constants as indices.
"""

from __future__ import annotations

import numpy as np

from splitwise.scheduling.arrays import (
    BATCH_FULL,
    KV_BLOCKS,
    KV_FOREIGN,
    KV_OWN,
    NONE,
    PHASE_PROMPT,
    PHASE_TOKEN,
    POOL_MIXED,
    POOL_PROMPT,
    POOL_TOKEN,
    POOLS,
    PROMPT_KEY,
    TOKEN_KEY,
    ClusterState,
    Int64s,
    add_prompt,
    add_token,
    comes_first,
    enter,
    least_loaded,
    leave,
    tree_of,
)
from splitwise.scheduling.candidates import weigh
from splitwise.scheduling.compiled import compiled

# Policies, by the number that stands in `limits[LIMIT_POLICY]`.
JSQ, POWER_OF_TWO, ROUND_ROBIN, RANDOM, PREFIX_AWARE, TOGETHER = range(6)
POLICIES = {
    "jsq": JSQ,
    "power-of-two": POWER_OF_TWO,
    "round-robin": ROUND_ROBIN,
    "random": RANDOM,
    "prefix-aware": PREFIX_AWARE,
    "together": TOGETHER,
}

LIMIT_POLICY = 0
LIMIT_QUEUE_TOKENS = 1  # a machine with work takes a prompt only up to so many pending tokens
LIMIT_LAST_RESORT_TOKENS = 2  # the same when one machine takes both phases
LIMIT_SEED = 3
LIMITS = 4

# How a machine was found; the codes of `choose_pair`'s third and fourth answer.
HOW_NONE, HOW_OWN_POOL, HOW_MIXED, HOW_BORROWED, HOW_LAST_RESORT, HOW_PREFIX, HOW_NOT_NEEDED = range(7)

ANY_MEMORY = -(1 << 40)  # a demand that any machine's memory meets
NO_HINTS = np.zeros((0, 2), np.int64)  # `hints` of a request whose prefix is cached nowhere


def new_limits(policy: str, queue_tokens: int, last_resort_tokens: int, seed: int) -> Int64s:
    """Return the `limits` array; `policy` is a key of `POLICIES`."""
    if policy not in POLICIES:
        message = f"unknown scheduling policy {policy!r}: choose one of {', '.join(POLICIES)}"
        raise ValueError(message)
    limits = np.zeros(LIMITS, np.int64)
    limits[LIMIT_POLICY] = POLICIES[policy]
    limits[LIMIT_QUEUE_TOKENS] = queue_tokens
    limits[LIMIT_LAST_RESORT_TOKENS] = last_resort_tokens
    limits[LIMIT_SEED] = seed & 0xFFFFFFFF
    return limits


@compiled
def hash32(value: int) -> int:
    """Mix 32 bits (two rounds of multiply and xor-shift); never leaves 63 bits on the way."""
    value &= 0xFFFFFFFF
    value = (((value >> 16) ^ value) * 0x45D9F3B) & 0xFFFFFFFF
    value = (((value >> 16) ^ value) * 0x45D9F3B) & 0xFFFFFFFF
    return (value >> 16) ^ value


@compiled
def _preferred(state: ClusterState, limits: Int64s, group: int, pool: int, phase: int, draw: int) -> int:
    """Return the machine of a pool that the policy looks at first, or NONE if it is empty."""
    which = group * POOLS + pool
    size = state.sizes[which]
    policy = limits[LIMIT_POLICY]
    if size == 0 or policy in (JSQ, PREFIX_AWARE):
        return least_loaded(state, group, pool, phase)
    if policy == ROUND_ROBIN:
        tree = tree_of(group, pool, phase)
        state.cursors[tree] += 1
        return int(state.members[which, (state.cursors[tree] - 1) % size])
    bits = hash32(hash32(limits[LIMIT_SEED] + phase) ^ hash32(draw))
    first = int(state.members[which, bits % size])
    if policy == RANDOM or size == 1:
        return first
    step = 1 + hash32(bits + 1) % (size - 1)
    second = int(state.members[which, (bits % size + step) % size])
    key = PROMPT_KEY if phase == PHASE_PROMPT else TOKEN_KEY
    return second if state.machines[key, second] < state.machines[key, first] else first


@compiled
def free_blocks(state: ClusterState, slot: int) -> int:
    """KV blocks of a machine that nobody uses or was promised (negative: it outgrew its promises)."""
    rows = state.machines
    return int(rows[KV_BLOCKS, slot] - rows[KV_OWN, slot] - rows[KV_FOREIGN, slot])


@compiled
def takes_prompt(state: ClusterState, slot: int, tokens: int, blocks: int, limit: int) -> bool:
    """Whether a machine may be given a prompt: its queue is short (or empty) and its KV has room."""
    load = state.machines[PROMPT_KEY, slot]
    return bool((load == 0 or load + tokens <= limit) and blocks <= free_blocks(state, slot))


@compiled
def takes_token(state: ClusterState, slot: int, blocks: int, most_blocks: int) -> bool:
    """Whether a machine may be given a token phase.

    `blocks` are promised now, for the prompt and the first stretch of output; `most_blocks`
    is what the request needs at its longest, and must fit into the machine as a whole.
    """
    rows = state.machines
    return bool(
        rows[TOKEN_KEY, slot] < BATCH_FULL // 2
        and blocks <= free_blocks(state, slot)
        and most_blocks <= rows[KV_BLOCKS, slot]
    )


@compiled
def _prompt_in(
    state: ClusterState,
    limits: Int64s,
    group: int,
    pool: int,
    tokens: int,
    blocks: int,
    draw: int,
) -> int:
    """Return the machine of one pool for a prompt, or NONE when the pool is past its threshold."""
    limit = limits[LIMIT_QUEUE_TOKENS]
    slot = _preferred(state, limits, group, pool, PHASE_PROMPT, draw)
    if slot == NONE or takes_prompt(state, slot, tokens, blocks, limit):
        return slot
    least = least_loaded(state, group, pool, PHASE_PROMPT)
    if least != slot and takes_prompt(state, least, tokens, blocks, limit):
        return least
    if takes_prompt(state, least, tokens, ANY_MEMORY, limit):  # short queue, full KV: one with room?
        roomy = least_loaded(state, group, pool, PHASE_TOKEN)
        if takes_prompt(state, roomy, tokens, blocks, limit):
            return roomy
    return NONE


@compiled
def _token_in(
    state: ClusterState,
    limits: Int64s,
    group: int,
    pool: int,
    blocks: int,
    most_blocks: int,
    draw: int,
    beside: int,
    beside_blocks: int,
) -> int:
    """Return the machine of one pool for a token phase, or NONE when none has the memory.

    `beside` is the chosen prompt machine: `beside_blocks` of its KV are already spoken for.
    """
    slot = _preferred(state, limits, group, pool, PHASE_TOKEN, draw)
    if slot == NONE:
        return NONE
    extra = beside_blocks if slot == beside else 0
    if takes_token(state, slot, blocks + extra, most_blocks + extra):
        return slot
    least = least_loaded(state, group, pool, PHASE_TOKEN)
    if not takes_token(state, least, blocks, 0):
        return NONE  # no machine of the pool has more free memory than this one
    # The roomiest machine is too small as a whole, or takes the prompt too: look at the others.
    which = group * POOLS + pool
    best = NONE
    for k in range(state.sizes[which]):
        other = int(state.members[which, k])
        extra = beside_blocks if other == beside else 0
        if takes_token(state, other, blocks + extra, most_blocks + extra) and (
            best == NONE or comes_first(state.machines, PHASE_TOKEN, other, best)
        ):
            best = other
    return best


@compiled
def _by_prefix(
    state: ClusterState,
    limits: Int64s,
    tokens: int,
    blocks: int,
    hints: Int64s,
    instead_of: int,
) -> int:
    """Return the machine whose queue plus uncached prompt is shortest, if below `instead_of`'s."""
    rows = state.machines
    best = NONE
    cost = rows[PROMPT_KEY, instead_of] + tokens if instead_of != NONE else 0
    for k in range(hints.shape[0]):
        slot = int(hints[k, 0])
        uncached = max(1, tokens - hints[k, 1])
        its_cost = rows[PROMPT_KEY, slot] + uncached
        shorter = its_cost < cost or (best == NONE and instead_of == NONE)
        if shorter and takes_prompt(state, slot, uncached, blocks, limits[LIMIT_QUEUE_TOKENS]):
            best, cost = slot, its_cost
    return best


@compiled
def choose_prompt(
    state: ClusterState,
    limits: Int64s,
    group: int,
    tokens: int,
    blocks: int,
    draw: int,
    hints: Int64s,
) -> tuple[int, int]:
    """Return (slot, how) for a prompt phase, or (NONE, HOW_NONE)."""
    slot = _prompt_in(state, limits, group, POOL_PROMPT, tokens, blocks, draw)
    how = HOW_OWN_POOL
    if slot == NONE:
        slot = _prompt_in(state, limits, group, POOL_MIXED, tokens, blocks, draw)
        how = HOW_MIXED
    if limits[LIMIT_POLICY] == PREFIX_AWARE and hints.shape[0] > 0:
        cached = _by_prefix(state, limits, tokens, blocks, hints, slot)
        if cached != NONE:
            return cached, HOW_PREFIX
    if slot == NONE:
        slot = _prompt_in(state, limits, group, POOL_TOKEN, tokens, blocks, draw)
        how = HOW_BORROWED
    return slot, how if slot != NONE else HOW_NONE


@compiled
def choose_token(
    state: ClusterState,
    limits: Int64s,
    group: int,
    blocks: int,
    most_blocks: int,
    draw: int,
    beside: int,
    beside_blocks: int,
) -> tuple[int, int]:
    """Return (slot, how) for a token phase, or (NONE, HOW_NONE)."""
    for how, pool in ((HOW_OWN_POOL, POOL_TOKEN), (HOW_MIXED, POOL_MIXED), (HOW_BORROWED, POOL_PROMPT)):
        slot = _token_in(state, limits, group, pool, blocks, most_blocks, draw, beside, beside_blocks)
        if slot != NONE:
            return slot, how
    return NONE, HOW_NONE


@compiled
def choose_one_for_both(
    state: ClusterState,
    limits: Int64s,
    group: int,
    tokens: int,
    prompt_blocks: int,
    token_blocks: int,
    most_blocks: int,
) -> int:
    """Return the least loaded machine of all pools that can take both phases, or NONE."""
    rows = state.machines
    best = NONE
    limit = limits[LIMIT_LAST_RESORT_TOKENS]
    for pool in range(POOLS):
        for phase in (PHASE_PROMPT, PHASE_TOKEN):
            slot = least_loaded(state, group, pool, phase)
            if slot == NONE or not takes_prompt(state, slot, tokens, prompt_blocks, limit):
                continue
            if token_blocks and not takes_token(
                state, slot, prompt_blocks + token_blocks, prompt_blocks + most_blocks
            ):
                continue
            if best == NONE or _less_to_do(rows, slot, best):
                best = slot
    return best


@compiled
def _less_to_do(rows: Int64s, slot: int, other: int) -> bool:
    """Whether a machine has the shorter prompt queue, or an equal one and less in its token phase."""
    if rows[PROMPT_KEY, slot] != rows[PROMPT_KEY, other]:
        return bool(rows[PROMPT_KEY, slot] < rows[PROMPT_KEY, other])
    return bool(rows[TOKEN_KEY, slot] < rows[TOKEN_KEY, other])


@compiled
def _largest_memory(state: ClusterState, group: int) -> int:
    """Return the KV blocks of the machine that has most of them."""
    most = 0
    for which in range(group * POOLS, (group + 1) * POOLS):
        for place in range(state.sizes[which]):
            most = max(most, int(state.machines[KV_BLOCKS, state.members[which, place]]))
    return most


@compiled
def choose_pair(
    state: ClusterState,
    limits: Int64s,
    group: int,
    tokens: int,
    prompt_blocks: int,
    token_blocks: int,
    most_blocks: int,
    draw: int,
    hints: Int64s,
) -> tuple[int, int, int, int]:
    """Return (prompt slot, token slot, how, how) for a request, or NONE twice when it must wait.

    `tokens` is the prompt's length; `prompt_blocks`, `token_blocks` and `most_blocks` are
    the KV blocks held on the prompt machine, promised on the token machine, and needed
    there at the longest. ``token_blocks == 0`` means that no token phase follows. `draw` is a
    counter from which random policies derive their numbers. `hints` holds rows of (slot,
    cached tokens) for the prefix-aware policy.
    No counter of a machine is changed: the caller books the choice with `add_prompt` and
    `add_token`.
    """
    if limits[LIMIT_POLICY] == TOGETHER:
        one = choose_one_for_both(state, limits, group, tokens, prompt_blocks, token_blocks, most_blocks)
        if one != NONE:
            return one, one, HOW_LAST_RESORT, HOW_NOT_NEEDED if token_blocks == 0 else HOW_LAST_RESORT
        if prompt_blocks + most_blocks <= _largest_memory(state, group):
            return NONE, NONE, HOW_NONE, HOW_NONE
        # No machine will ever hold both phases: better split than waiting for good.
    prompt, prompt_how = choose_prompt(state, limits, group, tokens, prompt_blocks, draw, hints)
    if prompt != NONE:
        if token_blocks == 0:
            return prompt, prompt, prompt_how, HOW_NOT_NEEDED
        token, token_how = choose_token(
            state, limits, group, token_blocks, most_blocks, draw, prompt, prompt_blocks
        )
        if token != NONE:
            return prompt, token, prompt_how, token_how
        # The prompt may have taken the only machine large enough for the token phase.
        token, token_how = choose_token(state, limits, group, token_blocks, most_blocks, draw, NONE, 0)
        if token != NONE:
            leave(state, token)
            prompt, prompt_how = choose_prompt(state, limits, group, tokens, prompt_blocks, draw, hints[:0])
            enter(state, token)
            if prompt != NONE:
                return prompt, token, prompt_how, token_how
    one = choose_one_for_both(state, limits, group, tokens, prompt_blocks, token_blocks, most_blocks)
    if one == NONE:
        return NONE, NONE, HOW_NONE, HOW_NONE
    return one, one, HOW_LAST_RESORT, HOW_NOT_NEEDED if token_blocks == 0 else HOW_LAST_RESORT


@compiled
def _pools_asked(how: int) -> int:
    """How many pools were looked in, in order, until a machine was found that way."""
    if how == HOW_OWN_POOL:
        return 1
    return 2 if how in (HOW_MIXED, HOW_PREFIX) else POOLS


@compiled
def place_pair(
    state: ClusterState,
    limits: Int64s,
    group: int,
    tokens: int,
    prompt_blocks: int,
    token_blocks: int,
    most_blocks: int,
    draw: int,
    now_us: int,
    hints: Int64s,
    notes: Int64s,
) -> tuple[int, int, int, int, int]:
    """Choose a pair as `choose_pair` does and book it: one call from Python instead of three.

    Returns `choose_pair`'s answers and the prompt tokens booked as pending (without those
    cached at the machine, when its cached prefix was why it was chosen). The machines that
    were weighed are written to `notes` (see `candidates`), unless it has no rows.
    """
    prompt, token, prompt_how, token_how = choose_pair(
        state, limits, group, tokens, prompt_blocks, token_blocks, most_blocks, draw, hints
    )
    if prompt == NONE:
        return prompt, token, prompt_how, token_how, 0
    if notes.shape[0] > 0:
        notes[0, 0] = notes[0, 2] = 0
        weigh(state, group, PHASE_PROMPT, _pools_asked(prompt_how), prompt, hints, notes)
        if token_blocks:
            weigh(state, group, PHASE_TOKEN, _pools_asked(token_how), token, hints[:0], notes)
    if prompt_how == HOW_PREFIX:
        for k in range(hints.shape[0]):
            if hints[k, 0] == prompt:
                tokens = max(1, tokens - hints[k, 1])
                break
    add_prompt(state, prompt, tokens, prompt_blocks, now_us)
    if token_blocks:
        add_token(state, token, token_blocks, now_us)
    return prompt, token, prompt_how, token_how, tokens
