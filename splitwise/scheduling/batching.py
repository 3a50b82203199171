"""The rules of the machine scheduler (MLS), as kernels: who is computed next, who gives way.

The rules (Splitwise paper, section IV-B), pure and without a clock:

- Prompts run first come first served, together at most `max_tokens` tokens; one that is
  longer than a batch is computed in chunks.
- Token phases batch as much as memory allows. Beside prompts they take the tokens that
  are left, those that were preempted most often first: priority grows with age.
- KV blocks are taken as the output grows, since its length is unknown. When none is free,
  the token phase that was preempted least (the newest among equals) gives its blocks up,
  and its known tokens are computed again, as a prompt, once there is memory.
- *Preempted* is a token phase on the machine that does not run in an iteration: it sat out
  or was evicted. Nobody is preempted more than `max_preemptions` times. The last one is
  kept for an eviction, after which the request returns with all the memory that it can
  ever need; so whoever may not be preempted any more cannot be short of memory either.
- Prompts wait for memory in order of arrival. The evicted go first, but let others pass
  while there is too little for them: what those hold may be what they wait for.

Work is a row of ``works[work, column]``; lists of rows are given with their length. The
simulator's compiled loop calls these on its table of requests, `MachineScheduler` on the
table of one machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.compiled import compiled

if TYPE_CHECKING:
    from splitwise.scheduling.arrays import Int32s

# Columns of `works`.
PENDING = 0  # prompt tokens still to be computed; 0 in the token phase
TAKEN = 1  # of these (or, in the token phase, 1) computed in the batch that runs; 0 outside it
PREEMPTED = 2  # how often its token phase was preempted on this machine
KNOWN = 3  # tokens known: the prompt and the output so far
MOST = 4  # tokens at the longest
BLOCKS = 5  # KV blocks held
COLUMNS = 6


@compiled
def blocks_for(tokens: int, block_tokens: int) -> int:
    """KV blocks that hold `tokens` tokens."""
    return (tokens + block_tokens - 1) // block_tokens


@compiled
def wanted_blocks(works: Int32s, work: int, block_tokens: int, max_preemptions: int) -> int:
    """KV blocks with which work begins: for the known tokens, or all if it must not be evicted again."""
    kept = works[work, PREEMPTED] >= max_preemptions
    return int(blocks_for(works[work, MOST] if kept else works[work, KNOWN], block_tokens))


@compiled
def lets_pass(works: Int32s, work: int) -> bool:
    """Whether work that finds no memory lets those behind it pass: an evicted token phase does."""
    return bool(works[work, PREEMPTED] > 0)


@compiled
def missing_blocks(works: Int32s, phases: Int32s, count: int, block_tokens: int, ahead: int) -> int:
    """KV blocks that token phases lack to compute their next token, or the one `ahead` iterations later."""
    missing = 0
    for place in range(count):
        known, held = works[phases[place], KNOWN] + ahead, works[phases[place], BLOCKS]
        if known > held * block_tokens:
            missing += blocks_for(known, block_tokens) - held
    return missing


@compiled
def pick_victim(works: Int32s, phases: Int32s, count: int, max_preemptions: int) -> int:
    """Return the place of the token phase that gives up its memory, or NONE.

    It is the least preempted, and of those the newest, that may be preempted again.
    """
    victim, fewest = NONE, max_preemptions
    for place in range(count - 1, -1, -1):
        if works[phases[place], PREEMPTED] < fewest:
            victim, fewest = place, works[phases[place], PREEMPTED]
    return victim


@compiled
def form_batch(
    works: Int32s,
    prompts: Int32s,
    prompt_count: int,
    phases: Int32s,
    count: int,
    max_tokens: int,
    max_preemptions: int,
) -> tuple[int, int]:
    """Say in column TAKEN what is computed next; returns (prompts that are, token phases that sit out).

    `prompts` are in order of arrival, and those taken are the first of them; `phases` are the
    token phases, in the order in which they joined. Who sits out is counted as preempted.
    """
    if prompt_count == 0:
        for place in range(count):
            works[phases[place], TAKEN] = 1
        return 0, 0
    most = max(0, max_preemptions - 1)
    room = max_tokens
    for place in range(count):
        must = works[phases[place], PREEMPTED] >= most
        works[phases[place], TAKEN] = must
        room -= must
    taken = 0
    while taken < prompt_count:
        pending = works[prompts[taken], PENDING]
        if pending > room and taken > 0:
            break
        works[prompts[taken], TAKEN] = max(1, min(pending, room))
        room -= works[prompts[taken], TAKEN]
        taken += 1
    return taken, _fill(works, phases, count, room, most)


@compiled
def _fill(works: Int32s, phases: Int32s, count: int, room: int, most: int) -> int:
    """Let token phases run in the tokens left beside prompts; returns how many sit out."""
    for level in range(most - 1, -1, -1):
        for place in range(count):
            if room <= 0:
                break
            work = phases[place]
            if works[work, PREEMPTED] == level and works[work, TAKEN] == 0:
                works[work, TAKEN] = 1
                room -= 1
    sat_out = 0
    for place in range(count):
        if works[phases[place], TAKEN] == 0:
            works[phases[place], PREEMPTED] += 1
            sat_out += 1
    return sat_out
