"""`faithful` mode: the loop over events, and what machines do when their iterations end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.scheduling.arrays import HOME, KV_BLOCKS, NONE, install, leave
from splitwise.scheduling.arrays import MAX_RUNNING as SLOT_MAX_RUNNING
from splitwise.scheduling.batching import BLOCKS, KNOWN, PENDING, TAKEN, blocks_for
from splitwise.sim.batches import (
    FAILURE,
    GROWTH,
    HOME_AGAIN,
    ITERATION,
    RECEIPT,
    REPORT,
    count_time,
    hold,
    note_tokens,
    rounds_done,
    schedule_growth,
    start,
    token_times,
)
from splitwise.sim.compiled import compiled
from splitwise.sim.front import (
    FIRST_MADE,
    GREW,
    KV_THERE,
    arrive,
    end_badly,
    finish,
    freed,
    place_or_park,
    release_prompt,
    release_token,
    report,
    send_home,
    serve,
    tell,
    wake,
)
from splitwise.sim.job import (
    ALIVE,
    ATTEMPT,
    BEGAN,
    BETWEEN,
    BLOCK_TOKENS,
    COMPUTED,
    COMPUTING,
    END,
    FAILED,
    GROWS_AT,
    HEARD_OPEN,
    HEARD_PROMPT,
    HEARD_TOKEN,
    IDLE,
    MAX_ATTEMPTS,
    NOTHING,
    OUTBOX,
    PHASES,
    PROMISED,
    PROMPT_BLOCKS,
    PROMPT_STAGE,
    PROMPTS,
    QUEUE,
    RECOMPUTING,
    REPORT_SECONDS,
    RESIDENT,
    ROUNDS,
    RUN,
    RUN_SEQUENCES,
    SHUNNED,
    TOKEN_STAGE,
    UNFINISHED,
    USED,
    VERSION,
    WAIT,
    WAITING,
    Sim,
)
from splitwise.sim.links import layerwise, push_after
from splitwise.sim.world import (
    FIRST,
    GAP,
    LAST,
    LATEST,
    LOST_AT,
    PROMPT_MACHINE,
    PROMPT_TOKENS,
    RECEIVED,
    RESTARTS,
    SECOND,
    TOKEN_MACHINE,
    append,
    out_of_room,
    pop,
    push,
    remove,
    waiting_events,
)

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@compiled
def _give_back(sim: Sim, machine: int, count: int, now: float) -> None:
    """Free KV blocks on a machine; work that waits there for memory may start."""
    hold(sim.world, machine, -count)
    if sim.world.sizes[WAIT, machine]:
        wake(sim, machine, now)


@compiled
def _over(sim: Sim, machine: int, job: int, now: float) -> None:
    """Free all that a job holds, its last token being made on `machine`, and say so."""
    jobs, places = sim.world.jobs, sim.world.places
    sim.world.times[job, LAST] = now
    if jobs[job, PROMPT_STAGE] != NOTHING:
        jobs[job, PROMPT_STAGE] = NOTHING
        _give_back(sim, places[job, PROMPT_MACHINE], jobs[job, PROMPT_BLOCKS], now)
    if jobs[job, TOKEN_STAGE] != NOTHING:
        jobs[job, TOKEN_STAGE] = NOTHING
        _give_back(sim, places[job, TOKEN_MACHINE], jobs[job, BLOCKS], now)
    finish(sim, machine, job, now)


@compiled
def _note_token(sim: Sim, job: int, now: float) -> None:
    """Note the token that a prompt iteration made: the request's first, or the next one after a recompute."""
    times = sim.world.times
    sim.world.jobs[job, KNOWN] += 1
    if not times[job, FIRST] >= 0.0:
        times[job, FIRST] = times[job, SECOND] = now
    else:
        if not times[job, SECOND] > times[job, FIRST]:
            times[job, SECOND] = now
        times[job, GAP] = max(times[job, GAP], now - times[job, LATEST])
    times[job, LATEST] = now


@compiled
def _outgrow(sim: Sim, machine: int, job: int, known: int, now: float) -> None:
    """Tell when a token phase of `known` tokens needs more memory than it was promised."""
    jobs = sim.world.jobs
    if known > jobs[job, PROMISED] * sim.world.setup[BLOCK_TOKENS]:
        jobs[job, PROMISED] += 1
        tell(sim, machine, GREW, job, now)


@compiled
def _prompt_made(sim: Sim, machine: int, job: int, now: float) -> None:
    """Hand the KV cache of a computed prompt over, or (also after a recompute) go on here."""
    world = sim.world
    jobs = world.jobs
    tokens = jobs[job, KNOWN]
    _note_token(sim, job, now)
    if jobs[job, TOKEN_STAGE] == RECOMPUTING:
        _outgrow(sim, machine, job, tokens + 1, now)
        if jobs[job, KNOWN] == jobs[job, END]:
            _over(sim, machine, job, now)
        else:
            jobs[job, TOKEN_STAGE] = RESIDENT
            append(world, PHASES, machine, job)
        return
    jobs[job, PROMPT_STAGE] = COMPUTED
    if jobs[job, KNOWN] == jobs[job, END]:
        _over(sim, machine, job, now)
        return
    tell(sim, machine, FIRST_MADE, job, now)
    if world.places[job, TOKEN_MACHINE] == machine:
        _received(sim, job, now)
        return
    if not layerwise(world, tokens):
        push_after(world, machine, job, tokens, now)
    push(world, max(world.times[job, RECEIVED], now), RECEIPT, job, jobs[job, ATTEMPT])


@compiled
def _received(sim: Sim, job: int, now: float) -> None:
    """Let the token phase begin: its KV cache is whole at the token machine."""
    world = sim.world
    source, target = world.places[job, PROMPT_MACHINE], world.places[job, TOKEN_MACHINE]
    world.times[job, RECEIVED] = now
    world.jobs[job, PROMPT_STAGE] = NOTHING
    world.jobs[job, TOKEN_STAGE] = RESIDENT
    append(world, PHASES, target, job)
    _give_back(sim, source, world.jobs[job, PROMPT_BLOCKS], now)
    tell(sim, target, KV_THERE, job, now)
    wake(sim, target, now)


@compiled
def _end_prompts(sim: Sim, machine: int, now: float) -> None:
    """Book the prompt tokens that were computed; those taken are the first of the list."""
    world = sim.world
    jobs, items = world.jobs, world.items
    size, done, place = world.sizes[PROMPTS, machine], 0, 0
    while place < size and jobs[items[PROMPTS, machine, place], TAKEN] > 0:
        job = items[PROMPTS, machine, place]
        jobs[job, PENDING] -= jobs[job, TAKEN]
        world.stats[machine, PROMPT_TOKENS] += jobs[job, TAKEN]
        jobs[job, TAKEN] = 0
        if jobs[job, PENDING] == 0:  # else it is the only one, and goes on
            done += 1
            _prompt_made(sim, machine, job, now)
        place += 1
    for place in range(done, size):
        items[PROMPTS, machine, place - done] = items[PROMPTS, machine, place]
    world.sizes[PROMPTS, machine] = size - done


@compiled
def _end_phases(sim: Sim, machine: int, rounds: int, now: float) -> None:
    """Give every token phase that ran its tokens; let go those that are complete."""
    world = sim.world
    jobs, items, block = world.jobs, world.items, world.setup[BLOCK_TOKENS]
    first, last, longest = token_times(world, machine, rounds)
    kept = 0
    for place in range(world.sizes[PHASES, machine]):
        job = items[PHASES, machine, place]
        if jobs[job, TAKEN]:
            jobs[job, TAKEN] = 0
            note_tokens(world, job, rounds, first, last, longest)
            known = jobs[job, KNOWN]
            if known - 1 > jobs[job, BLOCKS] * block:  # what the run's last iteration needed
                more = blocks_for(known - 1, block) - jobs[job, BLOCKS]
                jobs[job, BLOCKS] += more
                hold(world, machine, more)
            _outgrow(sim, machine, job, known, now)
            if known == jobs[job, END]:
                _over(sim, machine, job, now)
                continue
        items[PHASES, machine, kept] = job
        kept += 1
    world.sizes[PHASES, machine] = kept


@compiled
def _end_run(sim: Sim, machine: int, now: float) -> None:
    """End a run: give out its tokens, let go what is complete, begin the next one."""
    world = sim.world
    rounds = world.whole[ROUNDS, machine]
    count_time(world, machine, now - world.real[BEGAN, machine], rounds)
    world.whole[RUN, machine] = BETWEEN
    if world.sizes[PROMPTS, machine]:
        _end_prompts(sim, machine, now)
    if world.whole[RUN_SEQUENCES, machine]:
        _end_phases(sim, machine, rounds, now)
    start(world, machine, now)


@compiled
def _outgrow_all(sim: Sim, machine: int, now: float) -> None:
    """In the middle of a run: tell who needs more memory than it was promised, and plan for the next."""
    world = sim.world
    jobs, items, size = world.jobs, world.items, world.setup[BLOCK_TOKENS]
    done, next_one = world.whole[GROWS_AT, machine], 1 << 30
    for place in range(world.sizes[PHASES, machine]):
        job = items[PHASES, machine, place]
        if jobs[job, TAKEN]:
            _outgrow(sim, machine, job, jobs[job, KNOWN] + done, now)
            next_one = min(next_one, jobs[job, PROMISED] * size - jobs[job, KNOWN] + 1)
    if next_one < world.whole[ROUNDS, machine]:
        schedule_growth(world, machine, next_one)


@compiled
def _drop(sim: Sim, job: int, lost: int, now: float) -> None:
    """Stop what an attempt still does on the machine of its pair that is not lost."""
    world = sim.world
    jobs = world.jobs
    prompt, token = world.places[job, PROMPT_MACHINE], world.places[job, TOKEN_MACHINE]
    if jobs[job, PROMPT_STAGE] != NOTHING:
        if prompt != lost:
            if jobs[job, PROMPT_STAGE] == WAITING:
                remove(world, WAIT, prompt, job)
            else:
                if jobs[job, PROMPT_STAGE] == COMPUTING:
                    remove(world, PROMPTS, prompt, job)
                _give_back(sim, prompt, jobs[job, PROMPT_BLOCKS], now)
        jobs[job, PROMPT_STAGE] = NOTHING
    if jobs[job, TOKEN_STAGE] != NOTHING:
        if token != lost:
            _give_back(sim, token, jobs[job, BLOCKS], now)
        jobs[job, TOKEN_STAGE] = NOTHING


@compiled
def _power_off(sim: Sim, machine: int, now: float) -> None:
    """Take a machine away with all it held; tokens of finished iterations had been sent."""
    world = sim.world
    whole = world.whole
    if whole[RUN, machine] != IDLE:
        done = rounds_done(world, machine, now)
        if done:
            first, last, longest = token_times(world, machine, done)
            for place in range(world.sizes[PHASES, machine]):
                job = world.items[PHASES, machine, place]
                if world.jobs[job, TAKEN]:
                    note_tokens(world, job, done, first, last, longest)
        count_time(world, machine, now - world.real[BEGAN, machine], done)
    for kind in range(QUEUE):
        world.sizes[kind, machine] = 0
    whole[USED, machine] = 0
    whole[RUN, machine] = BETWEEN
    whole[VERSION, machine] += 1
    whole[ALIVE, machine] = 0
    world.stats[machine, LOST_AT] = now


@compiled
def _orphans(sim: Sim, machine: int, arrived: int) -> list[int]:
    """Return the open requests that the scheduler believes to hold something on a machine."""
    jobs, places = sim.world.jobs, sim.world.places
    found = [0 for _ in range(0)]
    for job in range(arrived):
        prompt = jobs[job, HEARD_PROMPT] > 0 and places[job, PROMPT_MACHINE] == machine
        token = jobs[job, HEARD_TOKEN] > 0 and places[job, TOKEN_MACHINE] == machine
        if jobs[job, HEARD_OPEN] and (prompt or token):
            found.append(job)
    return found


@compiled
def _lose(sim: Sim, machine: int, arrived: int, now: float) -> None:
    """Lose a machine: its requests start again on other pairs, from all tokens made."""
    world = sim.world
    jobs, places = world.jobs, world.places
    for other in range(world.whole.shape[1]):
        report(sim, other, now)
    if not world.whole[ALIVE, machine]:
        return
    orphans = _orphans(sim, machine, arrived)
    _power_off(sim, machine, now)
    leave(sim.cluster, machine)
    freed_there = [NONE for _ in range(0)]
    for index in range(len(orphans)):
        job = orphans[index]
        for other in (release_prompt(sim, job), release_token(sim, job)):
            if other != NONE and other != machine:
                jobs[job, SHUNNED] = other + 1
                freed_there.append(other)
        _drop(sim, job, machine, now)
        places[job, RESTARTS] += 1
    left = sim.cluster.sizes.sum() > 0
    for index in range(len(orphans)):
        job = orphans[index]
        if jobs[job, ATTEMPT] >= world.setup[MAX_ATTEMPTS] or not left:
            end_badly(sim, job, FAILED)
        else:
            place_or_park(sim, job, now, False)
    for other in freed_there:
        send_home(sim, other, now)
    if orphans:
        serve(sim, now)
    if not left:
        for place in range(world.sizes[QUEUE, 0]):
            end_badly(sim, world.items[QUEUE, 0, place], FAILED)
        world.sizes[QUEUE, 0] = 0
    serve(sim, now)


@compiled
def _return(sim: Sim, machine: int, now: float) -> None:
    """Take a lost machine back, empty, into its home pool."""
    if sim.world.whole[ALIVE, machine]:
        return
    rows = sim.cluster.machines
    sim.world.whole[ALIVE, machine] = 1
    sim.world.whole[RUN, machine] = IDLE
    install(
        sim.cluster,
        machine,
        0,
        rows[HOME, machine],
        rows[KV_BLOCKS, machine],
        rows[SLOT_MAX_RUNNING, machine],
    )
    serve(sim, now)


@compiled
def _report_again(sim: Sim, machine: int, now: float, more: bool) -> None:
    """Deliver a report, and plan the next one while anything can still change."""
    world = sim.world
    report(sim, machine, now)
    busy = more or world.setup[UNFINISHED] > world.sizes[QUEUE, 0]
    if busy or world.sizes[OUTBOX].sum() > 0:
        push(world, now + world.rates[REPORT_SECONDS], REPORT, machine, 0)


@compiled
def handle(sim: Sim, now: float, kind: int, subject: int, version: int, arrived: int) -> None:
    """Carry out one event; the first `arrived` requests have arrived."""
    world = sim.world
    if kind == ITERATION:
        if version == world.whole[VERSION, subject]:
            _end_run(sim, subject, now)
    elif kind == GROWTH:
        if version == world.whole[VERSION, subject]:
            _outgrow_all(sim, subject, now)
    elif kind == RECEIPT:
        if version == world.jobs[subject, ATTEMPT] and world.jobs[subject, PROMPT_STAGE] == COMPUTED:
            _received(sim, subject, now)
    elif kind == HOME_AGAIN:
        freed(sim, subject, NONE, now)
    elif kind == FAILURE:
        _lose(sim, subject, arrived, now)
    elif kind == REPORT:
        _report_again(sim, subject, now, arrived < len(world.jobs))
    else:
        _return(sim, subject, now)


@compiled
def run_faithful(sim: Sim, arrival: NDArray[np.float64], until: float) -> int:
    """Run until all is done or `until` seconds; returns the events handled, or -1 when out of room.

    Failures and reports must have been pushed before.
    """
    world = sim.world
    job, events = 0, 0
    while job < len(arrival) or waiting_events(world) > 0:
        if out_of_room(world):
            return -1
        events += 1
        if job < len(arrival) and (waiting_events(world) == 0 or arrival[job] <= world.heap_times[0]):
            if arrival[job] > until:
                break
            arrive(sim, job, arrival[job])
            job += 1
            continue
        now, kind, subject, version = pop(world)
        if now > until:
            break
        handle(sim, now, kind, subject, version, job)
    return -1 if out_of_room(world) else events
