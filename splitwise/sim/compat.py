"""`compat` mode: the authors' published simulator (SplitwiseSim) in a compiled loop.

Two cluster schedulers: ``token-jsq`` (no split: the machine with the least pending tokens
takes both phases; the paper's baselines) and ``mixed-pool`` (prompt, token and mixed
pools). Facts about the rules are in ``docs/simulator.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.scheduling.policies import HOW_BORROWED, HOW_LAST_RESORT, HOW_MIXED, HOW_OWN_POOL
from splitwise.sim.compat_machine import (
    BATCH,
    BATCH_TOKENS,
    BORROWED,
    CAPACITY,
    DONE,
    ENDS,
    HOME,
    IN_BATCH,
    MADE,
    MAX_BATCH,
    MAX_BATCH_TOKENS,
    MEMORY,
    MIXED_POOL,
    PENDING,
    PROMPT_POOL,
    PROMPTS_IN_BATCH,
    QUEUE,
    QUEUED,
    REQUESTS,
    RESERVED,
    SPLIT,
    STATE,
    TASK_SIZE,
    TOKEN_BYTES,
    TOKEN_POOL,
    VERSION,
    count_iterations,
    enqueue,
    kv_bytes,
    pause,
    start_iteration,
    tokens_per_iteration,
)
from splitwise.sim.compiled import compiled
from splitwise.sim.world import (
    BYTES_SENT,
    FIRST,
    HOW,
    HOW_BASE,
    LAST,
    LATEST,
    PROMPT_MACHINE,
    SECOND,
    TOKEN_MACHINE,
    World,
    append,
    insert_sorted,
    out_of_room,
    pop,
    push,
    remove,
    waiting_events,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

QUEUE_TOKENS = 8192  # a prompt machine with a queue takes no prompt beyond this
LINK_BYTES = 200 * 1024**3  # bytes per second of every transfer, whatever else is sent
RETRY_SECONDS = 1.0  # a transfer that finds no memory asks again after this

NONE = -1
ITERATION, TRANSFER, RETRY = 0, 1, 2


@compiled
def _least(world: World, pool: int, row: int, best: int) -> int:
    """Find the first machine of a pool with the smallest number in `row`, if smaller than `best`'s."""
    whole = world.whole
    for place in range(world.sizes[pool, 0]):
        machine = world.items[pool, 0, place]
        if best == NONE or whole[row, machine] < whole[row, best]:
            best = machine
    return best


@compiled
def _find_prompt(world: World, request: int) -> tuple[int, int]:
    whole = world.whole
    for how, pool in ((HOW_OWN_POOL, PROMPT_POOL), (HOW_MIXED, MIXED_POOL)):
        machine = _least(world, pool, PENDING, NONE)
        if machine == NONE:
            continue
        pending = whole[PENDING, machine] + world.jobs[2 * request, TASK_SIZE]
        if world.sizes[QUEUE, machine] == 0 or pending <= QUEUE_TOKENS:
            return machine, how
    return NONE, HOW_BORROWED


@compiled
def _find_token(world: World, request: int) -> tuple[int, int]:
    whole = world.whole
    need = kv_bytes(world, 2 * request)
    need += kv_bytes(world, 2 * request + 1)
    for how, pool in ((HOW_OWN_POOL, TOKEN_POOL), (HOW_MIXED, MIXED_POOL)):
        machine = _least(world, pool, RESERVED, NONE)
        if machine != NONE and whole[RESERVED, machine] + need < whole[CAPACITY, machine]:
            return machine, how
    return NONE, HOW_BORROWED


@compiled
def _borrow(world: World, pool: int, row: int) -> int:
    machine = _least(world, pool, row, NONE)
    if machine != NONE:
        remove(world, pool, 0, machine)
        append(world, MIXED_POOL, 0, machine)
        world.whole[BORROWED, machine] = 1
    return machine


@compiled
def _choose(world: World, request: int) -> tuple[int, int, int]:
    """Return (prompt machine, token machine, how) and change the pools as the choice demands."""
    if not world.setup[SPLIT]:
        machine = _least(world, PROMPT_POOL, PENDING, NONE)
        return machine, machine, HOW_OWN_POOL * HOW_BASE + HOW_OWN_POOL
    prompt, prompt_how = _find_prompt(world, request)
    token, token_how = _find_token(world, request)
    if prompt == NONE:
        prompt = _borrow(world, TOKEN_POOL, PENDING)
    if token == NONE:
        token = _borrow(world, PROMPT_POOL, RESERVED)
    if prompt == NONE or token == NONE:
        prompt = _least(world, PROMPT_POOL, PENDING, NONE)
        prompt = _least(world, MIXED_POOL, PENDING, prompt)
        prompt = _least(world, TOKEN_POOL, PENDING, prompt)
        return prompt, prompt, HOW_LAST_RESORT * HOW_BASE + HOW_LAST_RESORT
    return prompt, token, prompt_how * HOW_BASE + token_how


@compiled
def _arrive(world: World, request: int, now: float) -> None:
    """Take a request in: choose its pair, count it there and hand its prompt over."""
    whole = world.whole
    prompt, token, how = _choose(world, request)
    prompt_bytes = kv_bytes(world, 2 * request)
    token_bytes = kv_bytes(world, 2 * request + 1)
    (
        world.places[request, PROMPT_MACHINE],
        world.places[request, TOKEN_MACHINE],
        world.places[request, HOW],
    ) = prompt, token, how
    if world.setup[SPLIT]:
        whole[RESERVED, token] += prompt_bytes + token_bytes
        if prompt != token:
            whole[RESERVED, prompt] += prompt_bytes
    whole[PENDING, prompt] += world.jobs[2 * request, TASK_SIZE]
    whole[PENDING, token] += 1
    _task_arrives(world, prompt, 2 * request, now)
    if prompt == token:
        _task_arrives(world, token, 2 * request + 1, now)


@compiled
def _task_arrives(world: World, machine: int, task: int, now: float) -> None:
    whole = world.whole
    world.jobs[task, STATE] = QUEUED
    alone = task & 1 == 0 or world.places[task >> 1, PROMPT_MACHINE] != machine
    if alone:
        insert_sorted(world, REQUESTS, machine, task >> 1)
    enqueue(world, machine, task)
    size = world.sizes[BATCH, machine]
    if size == 0:
        if whole[MEMORY, machine] + kv_bytes(world, task) <= whole[CAPACITY, machine]:
            _run(world, machine, now)
        return
    joins = whole[BATCH_TOKENS, machine] + tokens_per_iteration(world, task) <= MAX_BATCH_TOKENS
    if size < MAX_BATCH and joins:
        _pause(world, machine, now)
    elif task & 1 == 0 and whole[PROMPTS_IN_BATCH, machine] < size:
        prompt_tokens = whole[BATCH_TOKENS, machine] - (size - whole[PROMPTS_IN_BATCH, machine])
        if prompt_tokens + world.jobs[task, TASK_SIZE] <= MAX_BATCH_TOKENS:
            _pause(world, machine, now)


@compiled
def _schedule(world: World, machine: int) -> None:
    world.whole[VERSION, machine] += 1
    push(world, world.real[ENDS, machine], ITERATION, machine, world.whole[VERSION, machine])


@compiled
def _pause(world: World, machine: int, now: float) -> None:
    if pause(world, machine, now):
        _schedule(world, machine)


@compiled
def _run(world: World, machine: int, now: float) -> None:
    """Start the next batch; an empty machine without requests goes back to its pool."""
    if start_iteration(world, machine, now):
        _schedule(world, machine)
    elif world.whole[BORROWED, machine] and world.sizes[REQUESTS, machine] == 0:
        world.whole[BORROWED, machine] = 0
        remove(world, MIXED_POOL, 0, machine)
        append(world, world.whole[HOME, machine], 0, machine)


@compiled
def _free(world: World, machine: int, size: int) -> None:
    world.whole[MEMORY, machine] -= size
    if world.setup[SPLIT]:
        world.whole[RESERVED, machine] -= size


@compiled
def _finish_iteration(world: World, machine: int, now: float) -> None:
    """Count the tokens, complete what is complete, and start the next batch."""
    count_iterations(world, machine, now)
    kept = 0
    for place in range(world.sizes[BATCH, machine]):
        task = world.items[BATCH, machine, place]
        complete = task & 1 == 0 or world.jobs[task, MADE] == world.jobs[task, TASK_SIZE]
        if not complete:
            world.items[BATCH, machine, kept] = task
            kept += 1
            continue
        world.jobs[task, STATE] = DONE
        world.jobs[task, IN_BATCH] = 0
        _complete(world, machine, task, now)
    world.sizes[BATCH, machine] = kept
    world.whole[PROMPTS_IN_BATCH, machine] = 0
    _run(world, machine, now)


@compiled
def _complete(world: World, machine: int, task: int, now: float) -> None:
    whole, request = world.whole, task >> 1
    together = world.places[request, PROMPT_MACHINE] == world.places[request, TOKEN_MACHINE]
    if task & 1 == 0:
        whole[PENDING, machine] -= world.jobs[task, TASK_SIZE]
        world.times[request, FIRST] = world.times[request, SECOND] = world.times[request, LATEST] = now
        if not together:
            remove(world, REQUESTS, machine, request)
            _send(world, request, now)
        return
    whole[PENDING, machine] -= 1
    remove(world, REQUESTS, machine, request)
    world.times[request, LAST] = now
    size = kv_bytes(world, task) + kv_bytes(world, task - 1)
    _free(world, machine, size)


@compiled
def _send(world: World, request: int, now: float) -> None:
    """Begin the KV transfer if the token machine has memory for the prompt, else ask again later."""
    whole = world.whole
    token = world.places[request, TOKEN_MACHINE]
    size = kv_bytes(world, 2 * request)
    if whole[MEMORY, token] + size <= whole[CAPACITY, token]:
        whole[MEMORY, token] += size
        sent = world.jobs[2 * request, TASK_SIZE] * world.setup[TOKEN_BYTES]
        world.stats[world.places[request, PROMPT_MACHINE], BYTES_SENT] += sent
        push(world, now + sent / LINK_BYTES, TRANSFER, request, 0)
    else:
        push(world, now + RETRY_SECONDS, RETRY, request, 0)


@compiled
def _received(world: World, request: int, now: float) -> None:
    """Take the whole KV cache in: the prompt machine frees it, the token machine goes on."""
    whole = world.whole
    source = world.places[request, PROMPT_MACHINE]
    _free(world, source, kv_bytes(world, 2 * request))
    _task_arrives(world, world.places[request, TOKEN_MACHINE], 2 * request + 1, now)
    if world.sizes[QUEUE, source] == 0:
        return
    head = world.items[QUEUE, source, 0]
    if world.sizes[BATCH, source] == 0:
        if whole[MEMORY, source] + kv_bytes(world, head) <= whole[CAPACITY, source]:
            _run(world, source, now)
    elif world.sizes[BATCH, source] < MAX_BATCH and whole[BATCH_TOKENS, source] < MAX_BATCH_TOKENS:
        _pause(world, source, now)


@compiled
def run_compat(world: World, arrival: NDArray[np.float64], until: float) -> int:
    """Run until all is done or `until` seconds; returns the events handled, or -1 when out of room."""
    request, events = 0, 0
    while request < len(arrival) or waiting_events(world) > 0:
        if out_of_room(world):
            return -1
        events += 1
        if request < len(arrival) and (waiting_events(world) == 0 or arrival[request] <= world.heap_times[0]):
            if arrival[request] > until:
                break
            _arrive(world, request, arrival[request])
            request += 1
            continue
        now, kind, subject, version = pop(world)
        if now > until:
            break
        if kind == ITERATION:
            if version == world.whole[VERSION, subject]:
                _finish_iteration(world, subject, now)
        elif kind == TRANSFER:
            _received(world, subject, now)
        else:
            _send(world, subject, now)
    return events
