"""A machine in `faithful` mode: the machine scheduler's batches, run ahead in closed form.

What a batch holds, who gives way and who waits for memory is decided by the kernels of
``splitwise.scheduling.batching``, which the engines' machine scheduler runs as well.

A batch of token phases that nothing changes is one *run* of many iterations whose times
are added up in closed form. A run ends before an iteration for which the memory would not
do, and is cut at the end of the iteration in which something arrives that could change
the batch.
"""

from __future__ import annotations

from splitwise.perf.kernels import mixed_seconds, token_run_iterations, token_run_seconds
from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.batching import (
    BLOCKS,
    KNOWN,
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
from splitwise.sim.compiled import compiled
from splitwise.sim.job import (
    BATCH_TOKENS,
    BEGAN,
    BLOCK_TOKENS,
    CAPACITY,
    COMPUTING,
    END,
    ENDS,
    EVICTED,
    GROWS_AT,
    IDLE,
    MAX_PREEMPTIONS,
    MODEL,
    PHASES,
    PROMISED,
    PROMPT_BLOCKS,
    PROMPT_STAGE,
    PROMPTS,
    PROMPTS_RUN,
    RECOMPUTING,
    ROUNDS,
    RUN,
    RUN_CONTEXT,
    RUN_PROMPTS,
    RUN_SEQUENCES,
    SPARE,
    TOKEN_STAGE,
    TOKENS_RUN,
    USED,
    VERSION,
    WAIT,
)
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
    PREEMPTIONS,
    SECOND,
    START,
    TIMES_PREEMPTED,
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
    whole = world.whole
    whole[USED, machine] += count
    if whole[USED, machine] > world.stats[machine, MEMORY_PEAK]:
        world.stats[machine, MEMORY_PEAK] = whole[USED, machine]


@compiled
def reserve(world: World, machine: int, count: int, now: float) -> None:
    """Hold KV blocks for a token phase that will arrive; a run that counted on them is cut."""
    hold(world, machine, count)
    world.whole[SPARE, machine] -= count
    if world.whole[SPARE, machine] < 0:
        kick(world, machine, now)


@compiled
def _preempted(world: World, machine: int, job: int) -> None:
    world.places[job, TIMES_PREEMPTED] += 1
    world.stats[machine, PREEMPTIONS] += 1


@compiled
def _make_room(world: World, machine: int) -> None:
    """Give every token phase the block that its next token needs; evict while there are too few."""
    whole, jobs, setup = world.whole, world.jobs, world.setup
    phases, size = world.items[PHASES, machine], setup[BLOCK_TOKENS]
    count = world.sizes[PHASES, machine]
    missing = missing_blocks(jobs, phases, count, size, 0)
    while missing > whole[CAPACITY, machine] - whole[USED, machine]:
        victim = pick_victim(jobs, phases, count, setup[MAX_PREEMPTIONS])
        if victim == NONE:
            break
        job = phases[victim]
        for place in range(victim + 1, count):
            phases[place - 1] = phases[place]
        count -= 1
        whole[USED, machine] -= jobs[job, BLOCKS]
        jobs[job, BLOCKS] = 0
        jobs[job, PREEMPTED] += 1
        jobs[job, TOKEN_STAGE] = EVICTED
        insert(world, WAIT, machine, 0, job)
        _preempted(world, machine, job)
        missing = missing_blocks(jobs, phases, count, size, 0)
    world.sizes[PHASES, machine] = count
    if missing:
        _grow(world, machine, count)


@compiled
def _grow(world: World, machine: int, count: int) -> None:
    jobs, phases, size = world.jobs, world.items[PHASES, machine], world.setup[BLOCK_TOKENS]
    for place in range(count):
        job = phases[place]
        if jobs[job, KNOWN] > jobs[job, BLOCKS] * size:
            more = blocks_for(jobs[job, KNOWN], size) - jobs[job, BLOCKS]
            jobs[job, BLOCKS] += more
            hold(world, machine, more)


@compiled
def _admit(world: World, machine: int) -> None:
    """Give memory to who waits for it."""
    whole, jobs, items = world.whole, world.jobs, world.items
    waiting = world.sizes[WAIT, machine]
    kept, place = 0, 0
    while place < waiting:
        job = items[WAIT, machine, place]
        wanted = wanted_blocks(jobs, job, world.setup[BLOCK_TOKENS], world.setup[MAX_PREEMPTIONS])
        if wanted <= whole[CAPACITY, machine] - whole[USED, machine]:
            hold(world, machine, wanted)
            jobs[job, PENDING] = jobs[job, KNOWN]
            if jobs[job, TOKEN_STAGE] == EVICTED:
                jobs[job, BLOCKS] = wanted
                jobs[job, TOKEN_STAGE] = RECOMPUTING
            else:
                jobs[job, PROMPT_BLOCKS] = wanted
                jobs[job, PROMPT_STAGE] = COMPUTING
            append(world, PROMPTS, machine, job)
        elif lets_pass(jobs, job):
            items[WAIT, machine, kept] = job
            kept += 1
        else:
            break
        place += 1
    for rest in range(place, waiting):
        items[WAIT, machine, kept + rest - place] = items[WAIT, machine, rest]
    world.sizes[WAIT, machine] = kept + waiting - place


@compiled
def start(world: World, machine: int, now: float) -> None:
    """Form the next batch and begin its run, if there is something to run."""
    whole, jobs, items, setup = world.whole, world.jobs, world.items, world.setup
    _make_room(world, machine)
    if world.sizes[WAIT, machine]:
        _admit(world, machine)
    prompts, count = world.sizes[PROMPTS, machine], world.sizes[PHASES, machine]
    if prompts + count == 0:
        whole[RUN, machine] = IDLE
        return
    taken, sat_out = form_batch(
        jobs,
        items[PROMPTS, machine],
        prompts,
        items[PHASES, machine],
        count,
        setup[BATCH_TOKENS],
        setup[MAX_PREEMPTIONS],
    )
    whole[RUN_PROMPTS, machine] = taken
    whole[RUN_SEQUENCES, machine] = count - sat_out
    if taken:
        _start_prompts(world, machine, now)
    else:
        _start_phases(world, machine, now)


@compiled
def _start_prompts(world: World, machine: int, now: float) -> None:
    """Begin an iteration with prompts in it."""
    whole, jobs, items, times = world.whole, world.jobs, world.items, world.times
    tokens, read = 0, 0
    for place in range(whole[RUN_PROMPTS, machine]):
        job = items[PROMPTS, machine, place]
        tokens += jobs[job, TAKEN]
        if not times[job, START] >= 0.0:
            times[job, START] = now
    for place in range(world.sizes[PHASES, machine]):
        job = items[PHASES, machine, place]
        if jobs[job, TAKEN]:
            read += jobs[job, KNOWN]
        else:
            _preempted(world, machine, job)
    whole[RUN_CONTEXT, machine] = read
    whole[RUN, machine] = PROMPTS_RUN
    whole[ROUNDS, machine] = 1
    world.real[BEGAN, machine] = now
    seconds = mixed_seconds(
        world.rows[whole[MODEL, machine]],
        float(tokens),
        float(whole[RUN_PROMPTS, machine]),
        float(whole[RUN_SEQUENCES, machine]),
        float(read),
    )
    _ends(world, machine, now + seconds)
    push_along(world, machine)


@compiled
def _start_phases(world: World, machine: int, now: float) -> None:
    """Begin a run of token phases, as many iterations as nothing changes by itself."""
    whole, jobs, items, size = world.whole, world.jobs, world.items, world.setup[BLOCK_TOKENS]
    read, rounds, grows = 0, 1 << 30, 1 << 30
    for place in range(whole[RUN_SEQUENCES, machine]):
        job = items[PHASES, machine, place]
        known = jobs[job, KNOWN]
        read += known
        rounds = min(rounds, jobs[job, END] - known)
        grows = min(grows, jobs[job, PROMISED] * size - known + 1)
    rounds = _that_fit(world, machine, rounds)
    whole[RUN_CONTEXT, machine] = read
    whole[RUN, machine] = TOKENS_RUN
    whole[ROUNDS, machine] = rounds
    world.real[BEGAN, machine] = now
    _ends(world, machine, now + run_seconds(world, machine, rounds))
    if grows < rounds:
        schedule_growth(world, machine, grows)


@compiled
def _that_fit(world: World, machine: int, rounds: int) -> int:
    """Return how many of the next `rounds` iterations find memory; notes what is left to spare."""
    whole, size = world.whole, world.setup[BLOCK_TOKENS]
    phases, count = world.items[PHASES, machine], whole[RUN_SEQUENCES, machine]
    free = whole[CAPACITY, machine] - whole[USED, machine]
    whole[SPARE, machine] = free - count * blocks_for(rounds - 1, size)
    if whole[SPARE, machine] >= 0:
        return rounds
    fits, fails = 1, rounds + 1
    while fails - fits > 1:
        middle = (fits + fails) // 2
        if missing_blocks(world.jobs, phases, count, size, middle - 1) <= free:
            fits = middle
        else:
            fails = middle
    whole[SPARE, machine] = free - missing_blocks(world.jobs, phases, count, size, fits - 1)
    return fits


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
def schedule_growth(world: World, machine: int, rounds: int) -> None:
    """Plan for the end of a run's iteration in which a token phase outgrows what it was promised."""
    world.whole[GROWS_AT, machine] = rounds
    at = world.real[BEGAN, machine] + run_seconds(world, machine, rounds)
    push(world, at, GROWTH, machine, world.whole[VERSION, machine])


@compiled
def token_times(world: World, machine: int, rounds: int) -> tuple[float, float, float]:
    """When the first and the last of a run's first `rounds` iterations end, and the longest gap between."""
    began = world.real[BEGAN, machine]
    last = world.real[ENDS, machine]
    if rounds < world.whole[ROUNDS, machine]:
        last = began + run_seconds(world, machine, rounds)
    if rounds == 1:
        return last, last, 0.0
    before = began + run_seconds(world, machine, rounds - 1)
    return began + run_seconds(world, machine, 1), last, last - before  # iterations grow longer


@compiled
def note_tokens(world: World, job: int, rounds: int, first: float, last: float, longest: float) -> None:
    """Give a token phase the tokens of `rounds` iterations, at the times of `token_times`."""
    times = world.times
    if times[job, SECOND] == times[job, FIRST]:
        times[job, SECOND] = first
    times[job, GAP] = max(times[job, GAP], max(first - times[job, LATEST], longest))
    times[job, LATEST] = last
    world.jobs[job, KNOWN] += rounds


@compiled
def count_time(world: World, machine: int, seconds: float, rounds: int) -> None:
    """Add a run (or its part, when the machine is lost) to the machine's sums."""
    whole, stats = world.whole, world.stats
    sequences = whole[RUN_SEQUENCES, machine]
    stats[machine, TOKENS] += sequences * rounds
    kind = BUSY_TOKEN
    if whole[RUN_PROMPTS, machine]:
        kind = BUSY_MIXED if sequences else BUSY_PROMPT
        sequences += whole[RUN_PROMPTS, machine]
    stats[machine, kind] += seconds
    stats[machine, ITERATIONS] += rounds
    stats[machine, OCCUPANCY + min(sequences, MAX_SEQUENCES)] += seconds
