"""A machine in `faithful` mode: its queues, its batches and its iterations.

The machine scheduler's rules (Splitwise paper, section IV-B): prompts first come first
served, at most `BATCH_TOKENS` tokens in a batch (its first prompt is always taken whole);
all resident token phases in one batch; prompts go before token phases in a mixed batch,
and a token phase that had to sit out `MAX_PREEMPTIONS` iterations never has to again.

A batch of token phases that nothing changes is one *run* of many iterations whose times
are added up in closed form. A run is cut at the end of the iteration in which something
arrives that could change the batch.
"""

from __future__ import annotations

from splitwise.perf.kernels import (
    mixed_seconds,
    token_run_iterations,
    token_run_seconds,
)
from splitwise.sim.compiled import compiled
from splitwise.sim.job import (
    ACTIVE,
    BATCH,
    BATCH_TOKENS,
    BEGAN,
    BLOCK_TOKENS,
    CAPACITY,
    COMPUTING,
    ENDS,
    EVICTED,
    GROWS_AT,
    IDLE,
    JOIN,
    MADE,
    MAX_PREEMPTIONS,
    MODEL,
    OUTPUT,
    PROMPT,
    PROMPT_STAGE,
    PROMPTS,
    PROMPTS_RUN,
    RECOMPUTING,
    RESIDENT,
    ROUNDS,
    RUN,
    RUN_CONTEXT,
    RUN_PROMPT_TOKENS,
    RUN_SEQUENCES,
    SKIPPED,
    TOKEN_BLOCKS,
    TOKEN_STAGE,
    TOKENS_RUN,
    USED,
    VERSION,
    WAIT,
    context,
)
from splitwise.sim.job import MAX_SEQUENCES as MAX_RUNNING
from splitwise.sim.links import push_along
from splitwise.sim.world import (
    BUSY_MIXED,
    BUSY_PROMPT,
    BUSY_TOKEN,
    FIRST,
    GAP,
    ITERATIONS,
    LATEST,
    MAX_SEQUENCES,
    MEMORY_PEAK,
    OCCUPANCY,
    PREEMPTED,
    PREEMPTIONS,
    SECOND,
    START,
    TOKENS,
    World,
    append,
    insert,
    push,
)

# Kinds of events, in the order in which equal times are handled.
ITERATION, GROWTH, RECEIPT, HOME_AGAIN, REPORT, FAILURE, RETURN = range(7)


@compiled
def hold(world: World, machine: int, count: int) -> None:
    """Count KV blocks as held on a machine (or, negative, as free again)."""
    world.whole[USED, machine] += count
    if world.whole[USED, machine] > world.stats[machine, MEMORY_PEAK]:
        world.stats[machine, MEMORY_PEAK] = world.whole[USED, machine]


@compiled
def _evict_down(world: World, machine: int) -> None:
    """While the KV outgrows the memory, the newest token phase gives its up and is recomputed later."""
    whole, jobs = world.whole, world.jobs
    while whole[USED, machine] > whole[CAPACITY, machine] and world.sizes[BATCH, machine] > 0:
        world.sizes[BATCH, machine] -= 1
        job = world.items[BATCH, machine, world.sizes[BATCH, machine]]
        whole[USED, machine] -= jobs[job, TOKEN_BLOCKS]
        jobs[job, TOKEN_STAGE] = EVICTED
        insert(world, WAIT, machine, 0, job)
        world.places[job, PREEMPTED] += 1
        world.stats[machine, PREEMPTIONS] += 1


@compiled
def _join(world: World, machine: int) -> None:
    """Take token phases whose KV is there into the batch, first come first served."""
    taken = 0
    ready = world.sizes[JOIN, machine]
    while taken < ready and world.sizes[BATCH, machine] < world.setup[MAX_RUNNING]:
        job = world.items[JOIN, machine, taken]
        world.jobs[job, TOKEN_STAGE] = RESIDENT
        append(world, BATCH, machine, job)
        taken += 1
    if taken:
        for place in range(taken, ready):
            world.items[JOIN, machine, place - taken] = world.items[JOIN, machine, place]
        world.sizes[JOIN, machine] = ready - taken


@compiled
def _take_prompts(world: World, machine: int, now: float) -> int:
    """Fill the PROMPTS list from the queue; returns the batch's tokens so far.

    An evicted token phase that finds no memory lets others pass: what they hold may be what
    it waits for.
    """
    whole, jobs, items = world.whole, world.jobs, world.items
    world.sizes[PROMPTS, machine] = 0
    waiting = world.sizes[WAIT, machine]
    if waiting == 0:
        return 0
    total = 0
    for place in range(world.sizes[BATCH, machine]):
        if jobs[items[BATCH, machine, place], SKIPPED] >= world.setup[MAX_PREEMPTIONS]:
            total += 1
    kept, place = 0, 0
    while place < waiting:
        job = items[WAIT, machine, place]
        tokens = context(world, job)
        if world.sizes[PROMPTS, machine] > 0 and total + tokens > world.setup[BATCH_TOKENS]:
            break
        place += 1
        if jobs[job, TOKEN_STAGE] == EVICTED:
            if jobs[job, TOKEN_BLOCKS] > whole[CAPACITY, machine] - whole[USED, machine]:
                items[WAIT, machine, kept] = job
                kept += 1
                continue
            hold(world, machine, jobs[job, TOKEN_BLOCKS])
            jobs[job, TOKEN_STAGE] = RECOMPUTING
        else:
            jobs[job, PROMPT_STAGE] = COMPUTING
            if not world.times[job, START] >= 0.0:
                world.times[job, START] = now
        append(world, PROMPTS, machine, job)
        total += tokens
    for rest in range(place, waiting):
        items[WAIT, machine, kept + rest - place] = items[WAIT, machine, rest]
    world.sizes[WAIT, machine] = kept + waiting - place
    return total


@compiled
def _activate(world: World, machine: int, total: int) -> None:
    """Choose which resident token phases run: all, or beside prompts those that find room.

    Those that sat out most often go first, then those that came first.
    """
    jobs, items = world.jobs, world.items
    size = world.sizes[BATCH, machine]
    if world.sizes[PROMPTS, machine] == 0:
        for place in range(size):
            items[ACTIVE, machine, place] = items[BATCH, machine, place]
        world.sizes[ACTIVE, machine] = size
        return
    world.sizes[ACTIVE, machine] = 0
    most = world.setup[MAX_PREEMPTIONS]
    room = world.setup[BATCH_TOKENS] - total  # those that sat out most are counted in it
    for level in range(most, -1, -1):
        for place in range(size):
            job = items[BATCH, machine, place]
            if min(jobs[job, SKIPPED], most) == level and (level == most or room > 0):
                append(world, ACTIVE, machine, job)
                room -= 1 if level < most else 0
    if world.sizes[ACTIVE, machine] == size:
        return
    _sit_out(world, machine)


@compiled
def _sit_out(world: World, machine: int) -> None:
    """Note who is resident but does not run in this iteration."""
    for place in range(world.sizes[BATCH, machine]):
        world.jobs[world.items[BATCH, machine, place], SKIPPED] += 1
        world.places[world.items[BATCH, machine, place], PREEMPTED] += 1
    for place in range(world.sizes[ACTIVE, machine]):
        world.jobs[world.items[ACTIVE, machine, place], SKIPPED] -= 1
        world.places[world.items[ACTIVE, machine, place], PREEMPTED] -= 1
    world.stats[machine, PREEMPTIONS] += world.sizes[BATCH, machine] - world.sizes[ACTIVE, machine]


@compiled
def _survey(world: World, machine: int) -> tuple[int, int, int]:
    """Look through the active token phases once.

    Returns their total context, the iterations until one is complete, and those until one
    outgrows its KV blocks.
    """
    jobs, items, size = world.jobs, world.items, world.setup[BLOCK_TOKENS]
    read, rounds, grows = 0, 1 << 30, 1 << 30
    for place in range(world.sizes[ACTIVE, machine]):
        job = items[ACTIVE, machine, place]
        made = jobs[job, MADE]
        known = jobs[job, PROMPT] + made
        read += known
        rounds = min(rounds, jobs[job, OUTPUT] - made)
        grows = min(grows, jobs[job, TOKEN_BLOCKS] * size - known + 1)
    return read, rounds, grows


@compiled
def start(world: World, machine: int, now: float) -> bool:
    """Form the next batch and begin its run; False when there is nothing to run."""
    whole, real = world.whole, world.real
    _evict_down(world, machine)
    _join(world, machine)
    total = _take_prompts(world, machine, now)
    _activate(world, machine, total)
    prompts, active = world.sizes[PROMPTS, machine], world.sizes[ACTIVE, machine]
    if prompts + active == 0:
        whole[RUN, machine] = IDLE
        return False
    read, rounds, grows = _survey(world, machine)
    row = world.rows[whole[MODEL, machine]]
    prompt_tokens = 0
    if prompts:
        for place in range(prompts):
            prompt_tokens += context(world, world.items[PROMPTS, machine, place])
        rounds = 1
        seconds = mixed_seconds(row, float(prompt_tokens), float(prompts), float(active), float(read))
    else:
        seconds = token_run_seconds(row, float(active), float(read), float(rounds))
    whole[RUN_SEQUENCES, machine] = active
    whole[RUN_CONTEXT, machine] = read
    whole[RUN_PROMPT_TOKENS, machine] = prompt_tokens
    whole[RUN, machine] = PROMPTS_RUN if prompts else TOKENS_RUN
    whole[ROUNDS, machine] = rounds
    real[BEGAN, machine] = now
    _ends(world, machine, now + seconds)
    if prompts:
        push_along(world, machine)
    elif grows < rounds:
        _schedule_growth(world, machine, grows)
    return True


@compiled
def _ends(world: World, machine: int, at: float) -> None:
    world.real[ENDS, machine] = at
    world.whole[VERSION, machine] += 1
    push(world, at, ITERATION, machine, world.whole[VERSION, machine])


@compiled
def run_seconds(world: World, machine: int, rounds: int) -> float:
    """Time of the first `rounds` iterations of a run of token phases."""
    whole = world.whole
    return token_run_seconds(
        world.rows[whole[MODEL, machine]],
        float(whole[RUN_SEQUENCES, machine]),
        float(whole[RUN_CONTEXT, machine]),
        float(rounds),
    )


@compiled
def rounds_done(world: World, machine: int, now: float) -> int:
    """Count the iterations of the present run that are over by `now`."""
    whole = world.whole
    if whole[RUN, machine] != TOKENS_RUN:
        return 0
    done = token_run_iterations(
        world.rows[whole[MODEL, machine]],
        float(whole[RUN_SEQUENCES, machine]),
        float(whole[RUN_CONTEXT, machine]),
        now - world.real[BEGAN, machine],
    )
    return min(int(done), int(whole[ROUNDS, machine]) - 1)


@compiled
def kick(world: World, machine: int, now: float) -> None:
    """Something new is there for a machine: cut a run of token phases at its next iteration's end."""
    whole = world.whole
    if whole[RUN, machine] != TOKENS_RUN:
        return
    rounds = rounds_done(world, machine, now) + 1
    if rounds < whole[ROUNDS, machine]:
        whole[ROUNDS, machine] = rounds
        _ends(world, machine, world.real[BEGAN, machine] + run_seconds(world, machine, rounds))


@compiled
def _schedule_growth(world: World, machine: int, grows: int) -> None:
    world.whole[GROWS_AT, machine] = grows
    at = world.real[BEGAN, machine] + run_seconds(world, machine, grows)
    push(world, at, GROWTH, machine, world.whole[VERSION, machine])


@compiled
def schedule_growth(world: World, machine: int) -> None:
    """Plan for the next iteration of a run after which some token phase outgrows its KV blocks."""
    _, rounds, grows = _survey(world, machine)
    if grows < world.whole[ROUNDS, machine] and grows < rounds:
        _schedule_growth(world, machine, grows)


@compiled
def make_tokens(world: World, machine: int, rounds: int) -> None:
    """Give all active token phases the tokens of the run's first `rounds` iterations."""
    active = world.sizes[ACTIVE, machine]
    if rounds == 0 or active == 0:
        return
    times, jobs, items = world.times, world.jobs, world.items
    began = world.real[BEGAN, machine]
    first = began + _part_seconds(world, machine, 1)
    last = began + _part_seconds(world, machine, rounds)
    longest = 0.0  # iterations of a run grow longer, so the last one is the longest
    if rounds > 1:
        longest = last - (began + _part_seconds(world, machine, rounds - 1))
    for place in range(active):
        job = items[ACTIVE, machine, place]
        if times[job, SECOND] == times[job, FIRST]:
            times[job, SECOND] = first
        gap = max(first - times[job, LATEST], longest)
        times[job, GAP] = max(times[job, GAP], gap)
        times[job, LATEST] = last
        jobs[job, MADE] += rounds
    world.stats[machine, TOKENS] += active * rounds


@compiled
def _part_seconds(world: World, machine: int, rounds: int) -> float:
    """Time of the first `rounds` iterations of the present run, whatever its kind."""
    if rounds == world.whole[ROUNDS, machine]:
        return float(world.real[ENDS, machine] - world.real[BEGAN, machine])
    return run_seconds(world, machine, rounds)


@compiled
def count_time(world: World, machine: int, seconds: float, rounds: int) -> None:
    """Add a run (or its part, when the machine is lost) to the machine's sums."""
    whole, stats = world.whole, world.stats
    sequences = whole[RUN_SEQUENCES, machine]
    kind = BUSY_TOKEN
    if whole[RUN_PROMPT_TOKENS, machine]:
        kind = BUSY_MIXED if sequences else BUSY_PROMPT
        sequences += world.sizes[PROMPTS, machine]
    stats[machine, kind] += seconds
    stats[machine, ITERATIONS] += rounds
    stats[machine, OCCUPANCY + min(sequences, MAX_SEQUENCES)] += seconds
