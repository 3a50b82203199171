"""The machine scheduler and the batches of `compat` mode: the rules of SplitwiseSim.

They are repeated as they are, weaknesses included, so that results can be laid beside
the authors': the token time hardly grows with the batch, the ageing rule almost never
fires because the queue is sorted by preemptions upwards and stale after insertion, KV
sizes are known in advance. ``docs/simulator.md`` lists them; `faithful` mode has none.

A *task* is a phase of a request: ``2 * request`` its prompt, ``2 * request + 1`` its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitwise.perf.kernels import compat_mixed_seconds, compat_prompt_seconds, compat_token_seconds
from splitwise.sim.compiled import compiled
from splitwise.sim.world import (
    BUSY_MIXED,
    BUSY_PROMPT,
    BUSY_TOKEN,
    GAP,
    ITERATIONS,
    LATEST,
    MAX_SEQUENCES,
    MEMORY_PEAK,
    OCCUPANCY,
    PREEMPTIONS,
    PROMPT_TOKENS,
    SECOND,
    SELECTED,
    START,
    TIMES_PREEMPTED,
    TOKENS,
    World,
    append,
    insert,
    new_world,
    remove,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BATCH = 512
MAX_BATCH_TOKENS = 2048
MAX_PREEMPTIONS = 4

# Lists per machine, then the pools: lists of machines at machine 0.
QUEUE, PROMPTS, BLOCKED, BATCH, REQUESTS, CHOICE = range(6)
PROMPT_POOL, TOKEN_POOL, MIXED_POOL = 6, 7, 8
LISTS = 9
# States of a task.
NEW, QUEUED, RUNNING, STOPPED, DONE = range(5)
# Columns of `World.jobs`. SIZE_: the prompt's tokens, or the tokens after the first.
TASK_SIZE, STATE, AGED, MADE, IN_BATCH = range(5)
TASK_COLUMNS = 5
# Rows of `World.whole`; MEMORY, CAPACITY and RESERVED are bytes.
MEMORY, CAPACITY, RESERVED, PENDING, PROMPTS_IN_BATCH, BATCH_TOKENS, PAUSED, ROUNDS = range(8)
VERSION, MODEL, HOME, BORROWED = range(8, 12)
WHOLE_ROWS = 12
# Rows of `World.real`: seconds of one iteration, end of the run of equal iterations.
SECONDS, ENDS = 0, 1
# `World.setup`.
TOKEN_BYTES, SPLIT = 0, 1


def compat_world(
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    *,
    models: NDArray[np.int64],
    homes: NDArray[np.int64],
    memory: int,
    weights: int,
    token_bytes: int,
    rows: NDArray[np.float64],
    room: int,
) -> World:
    """Return idle machines that hold nothing but the weights, and the tasks of all requests.

    `models` is each machine's row in `rows`, `homes` each machine's pool; without a machine
    in the token pool nothing is split. `memory`, `weights` and `token_bytes` are bytes.
    """
    split = bool(np.any(homes == TOKEN_POOL))
    world = new_world(
        machines=len(models),
        requests=len(prompt_tokens),
        whole_rows=WHOLE_ROWS,
        real_rows=2,
        lists=LISTS,
        room=room,
        jobs=2 * len(prompt_tokens),
        job_columns=TASK_COLUMNS,
        rows=rows,
        setup=np.array([token_bytes, int(split)], np.int64),
        rates=np.zeros(0),
    )
    world.whole[CAPACITY] = memory
    world.whole[MEMORY] = world.whole[RESERVED] = weights
    world.whole[MODEL] = models
    world.whole[HOME] = homes
    for pool in (PROMPT_POOL, TOKEN_POOL):
        members = np.flatnonzero(homes == pool)
        world.items[pool, 0, : len(members)] = members
        world.sizes[pool, 0] = len(members)
    world.jobs[0::2, TASK_SIZE] = prompt_tokens
    world.jobs[1::2, TASK_SIZE] = output_tokens - 1
    return world


@compiled
def kv_bytes(world: World, task: int) -> int:
    """Bytes that a task allocates when it starts: the prompt's and its first token's, or the rest's."""
    extra = 1 if task & 1 == 0 else 0
    return int((world.jobs[task, TASK_SIZE] + extra) * world.setup[TOKEN_BYTES])


@compiled
def tokens_per_iteration(world: World, task: int) -> int:
    """Tokens that a task adds to a batch's token budget."""
    return int(world.jobs[task, TASK_SIZE]) if task & 1 == 0 else 1


@compiled
def first_task(world: World, request: int) -> int:
    """Return the task of a request that is to be run next."""
    return 2 * request if world.jobs[2 * request, STATE] != DONE else 2 * request + 1


@compiled
def enqueue(world: World, machine: int, task: int) -> None:
    """Put a task in the queue: bisection by (preemptions now, arrival), as the authors do it.

    Preemption counts grow while tasks wait, so the list need not be sorted.
    """
    items = world.items[QUEUE, machine]
    low, high = 0, world.sizes[QUEUE, machine]
    while low < high:
        middle = (low + high) >> 1
        other = items[middle]
        less = world.jobs[task, AGED] < world.jobs[other, AGED]
        if less or (world.jobs[task, AGED] == world.jobs[other, AGED] and task >> 1 < other >> 1):
            high = middle
        else:
            low = middle + 1
    insert(world, QUEUE, machine, low, task)
    if task & 1 == 0:
        append(world, PROMPTS, machine, task)


@compiled
def _take(world: World, machine: int, task: int, free: int) -> int:
    """Choose a task for the next batch; returns the memory that is left."""
    append(world, CHOICE, machine, task)
    world.places[task >> 1, SELECTED] = 1
    world.whole[BATCH_TOKENS, machine] += tokens_per_iteration(world, task)
    return free


@compiled
def _no_room(world: World, machine: int, task: int) -> bool:
    """Whether the batch is full for this task; the first task always finds room."""
    size = world.sizes[CHOICE, machine]
    if size == MAX_BATCH:
        return True
    total = world.whole[BATCH_TOKENS, machine] + tokens_per_iteration(world, task)
    return bool(size > 0 and total > MAX_BATCH_TOKENS)


@compiled
def _select_waiting(world: World, machine: int) -> int:
    """First choices: tasks that waited too long, then prompts. Returns the free memory."""
    free = world.whole[CAPACITY, machine] - world.whole[MEMORY, machine]
    for place in range(world.sizes[QUEUE, machine]):
        task = world.items[QUEUE, machine, place]
        if world.jobs[task, AGED] < MAX_PREEMPTIONS or _no_room(world, machine, task):
            break
        if world.places[task >> 1, SELECTED]:
            continue
        if world.jobs[task, STATE] == STOPPED:
            _take(world, machine, task, free)
        elif kv_bytes(world, task) <= free:
            free -= kv_bytes(world, task)
            _take(world, machine, task, free)
    for place in range(world.sizes[PROMPTS, machine]):
        task = world.items[PROMPTS, machine, place]
        if _no_room(world, machine, task):
            break
        if world.places[task >> 1, SELECTED]:
            continue
        if kv_bytes(world, task) > free:
            break
        free -= kv_bytes(world, task)
        _take(world, machine, task, free)
    return int(free)


@compiled
def select_batch(world: World, machine: int) -> None:
    """Fill the SELECTED list: aged tasks, prompts, stopped tasks, running ones, then new ones."""
    world.sizes[CHOICE, machine] = 0
    world.whole[BATCH_TOKENS, machine] = 0
    free = _select_waiting(world, machine)
    for kind in (BLOCKED, BATCH):
        for place in range(world.sizes[kind, machine]):
            task = world.items[kind, machine, place]
            if _no_room(world, machine, task):
                break
            if not world.places[task >> 1, SELECTED]:
                _take(world, machine, task, free)
    for place in range(world.sizes[REQUESTS, machine]):
        request = world.items[REQUESTS, machine, place]
        if world.sizes[CHOICE, machine] == MAX_BATCH:
            break
        if world.places[request, SELECTED]:
            continue
        task = first_task(world, request)
        if _no_room(world, machine, task):
            break
        if world.jobs[task, STATE] == STOPPED:
            _take(world, machine, task, free)
            continue
        if kv_bytes(world, task) > free:
            break
        free -= kv_bytes(world, task)
        _take(world, machine, task, free)


@compiled
def _preempt_left_out(world: World, machine: int) -> None:
    """Send running tasks that were not selected back to the queue."""
    kept = 0
    size = world.sizes[BATCH, machine]
    for place in range(size):
        task = world.items[BATCH, machine, place]
        if world.places[task >> 1, SELECTED]:
            world.items[BATCH, machine, kept] = task
            kept += 1
            continue
        world.jobs[task, STATE] = STOPPED
        world.jobs[task, IN_BATCH] = 0
        enqueue(world, machine, task)
        append(world, BLOCKED, machine, task)
        world.stats[machine, PREEMPTIONS] += 1
        world.places[task >> 1, TIMES_PREEMPTED] += 1
    world.sizes[BATCH, machine] = kept


@compiled
def _admit(world: World, machine: int, now: float) -> None:
    """Let selected tasks that were not running enter the batch and allocate their memory."""
    for place in range(world.sizes[CHOICE, machine]):
        task = world.items[CHOICE, machine, place]
        world.places[task >> 1, SELECTED] = 0
        if world.jobs[task, IN_BATCH]:
            continue
        remove(world, QUEUE, machine, task)
        if world.jobs[task, STATE] == STOPPED:
            remove(world, BLOCKED, machine, task)
        else:
            world.whole[MEMORY, machine] += kv_bytes(world, task)
        if task & 1 == 0:
            remove(world, PROMPTS, machine, task)
            world.whole[PROMPTS_IN_BATCH, machine] += 1
            world.times[task >> 1, START] = now
        append(world, BATCH, machine, task)
        world.jobs[task, IN_BATCH] = 1
        world.jobs[task, STATE] = RUNNING
    held = world.whole[MEMORY, machine]
    if held > world.stats[machine, MEMORY_PEAK]:
        world.stats[machine, MEMORY_PEAK] = held


@compiled
def _batch_seconds(world: World, machine: int) -> float:
    row = world.rows[world.whole[MODEL, machine]]
    sequences = world.sizes[BATCH, machine] - world.whole[PROMPTS_IN_BATCH, machine]
    if world.whole[PROMPTS_IN_BATCH, machine] == 0:
        return compat_token_seconds(row, float(sequences))
    prompt_tokens = 0
    for place in range(world.sizes[BATCH, machine]):
        task = world.items[BATCH, machine, place]
        if task & 1 == 0:
            prompt_tokens += world.jobs[task, TASK_SIZE]
    if sequences == 0:
        return compat_prompt_seconds(row, float(prompt_tokens))
    return compat_mixed_seconds(row, float(prompt_tokens), float(sequences))


@compiled
def start_iteration(world: World, machine: int, now: float) -> bool:
    """Put the next batch together and say how long it runs unchanged; False when it is empty."""
    select_batch(world, machine)
    _preempt_left_out(world, machine)
    _admit(world, machine, now)
    for place in range(world.sizes[REQUESTS, machine]):
        task = first_task(world, world.items[REQUESTS, machine, place])
        if not world.jobs[task, IN_BATCH]:
            world.jobs[task, AGED] += 1
    size = world.sizes[BATCH, machine]
    if size == 0:
        return False
    seconds = _batch_seconds(world, machine)
    rounds = 1
    if world.whole[PROMPTS_IN_BATCH, machine] == 0:
        task = world.items[BATCH, machine, 0]
        rounds = world.jobs[task, TASK_SIZE] - world.jobs[task, MADE]
        for place in range(1, size):
            task = world.items[BATCH, machine, place]
            rounds = min(rounds, world.jobs[task, TASK_SIZE] - world.jobs[task, MADE])
    world.whole[ROUNDS, machine] = rounds
    world.whole[PAUSED, machine] = 0
    world.real[SECONDS, machine] = seconds
    world.real[ENDS, machine] = now + seconds * rounds
    return True


@compiled
def pause(world: World, machine: int, now: float) -> bool:
    """End the run at the next iteration's end, so that a new task can join; False if that changes nothing."""
    whole, real = world.whole, world.real
    if whole[PAUSED, machine] or whole[PROMPTS_IN_BATCH, machine] > 0:
        return False
    whole[PAUSED, machine] = 1
    seconds = real[SECONDS, machine]
    elapsed = now - (real[ENDS, machine] - seconds * whole[ROUNDS, machine])
    rounds = int(elapsed // seconds) + 1
    whole[ROUNDS, machine] = rounds
    real[ENDS, machine] = now + (seconds * rounds - elapsed)
    return True


@compiled
def count_iterations(world: World, machine: int, now: float) -> None:
    """Give every task of the batch its tokens and write down when they were made."""
    seconds = world.real[SECONDS, machine]
    rounds = world.whole[ROUNDS, machine]
    prompts = world.whole[PROMPTS_IN_BATCH, machine]
    size = world.sizes[BATCH, machine]
    spent = seconds * rounds
    kind = BUSY_TOKEN if prompts == 0 else BUSY_PROMPT if prompts == size else BUSY_MIXED
    stats = world.stats[machine]
    stats[kind] += spent
    stats[ITERATIONS] += rounds
    stats[OCCUPANCY + min(size, MAX_SEQUENCES)] += spent
    began = now - spent
    for place in range(size):
        task = world.items[BATCH, machine, place]
        request = task >> 1
        if task & 1 == 0:
            world.jobs[task, MADE] = 1
            stats[PROMPT_TOKENS] += world.jobs[task, TASK_SIZE]
            continue
        if rounds > 0:
            gap = began + seconds - world.times[request, LATEST]
            if world.jobs[task, MADE] == 0:
                world.times[request, SECOND] = began + seconds
            if rounds > 1:
                gap = max(gap, seconds)
            world.times[request, GAP] = max(world.times[request, GAP], gap)
            world.times[request, LATEST] = now
        world.jobs[task, MADE] += rounds
        stats[TOKENS] += rounds
