"""The cluster scheduler inside a compiled loop: the live router's kernels and bookkeeping.

`choose_pair` and the array kernels of ``splitwise.scheduling`` decide; this module does
what `ClusterScheduler` and `Placement` do around them, in the same order: booking what
a pair holds, borrowing and returning machines, serving the waiting line first come first
served, restarting what a lost machine took along. A test drives `ClusterScheduler` itself
with a naive simulator and compares every request.

Machines tell the scheduler what happened at once, as their streams do, or collect it for
their next periodic report (`REPORT_SECONDS`), as the paper has it.
"""

from __future__ import annotations

from splitwise.scheduling.arrays import (
    FOREIGN_AT_US,
    HOME,
    NONE,
    POOL,
    POOL_MIXED,
    POOL_PROMPT,
    POOL_TOKEN,
    POSITION,
    add_prompt,
    add_token,
    change_kv,
    end_prompt,
    end_token,
    enter,
    leave,
    move,
    wants_home,
)
from splitwise.scheduling.batching import BLOCKS, KNOWN, MOST, PREEMPTED, TAKEN, blocks_for
from splitwise.scheduling.policies import NO_HINTS, choose_pair
from splitwise.sim.batches import HOME_AGAIN, kick, reserve, start
from splitwise.sim.compiled import compiled
from splitwise.sim.job import (
    ATTEMPT,
    BLOCK_TOKENS,
    FINISHED,
    HEARD_OPEN,
    HEARD_PROMPT,
    HEARD_TOKEN,
    HEARD_TOKENS,
    HOLD_US,
    HOME_AT_US,
    IDLE,
    MAX_QUEUED,
    NOTHING,
    OUTBOX,
    PROMISED,
    PROMPT_STAGE,
    QUEUE,
    REJECTED,
    REPORT_SECONDS,
    RESERVE,
    RESERVED,
    RUN,
    SERIAL,
    SHUNNED,
    STATUS,
    TOKEN_STAGE,
    UNFINISHED,
    WAIT,
    WAITING,
    Sim,
)
from splitwise.sim.world import (
    HOW,
    HOW_BASE,
    PROMPT_MACHINE,
    TOKEN_MACHINE,
    append,
    insert_sorted,
    push,
)

# What machines tell; a message is one of these plus MESSAGES times the job.
FIRST_MADE, KV_THERE, GREW, ENDED = 0, 1, 2, 3
MESSAGES = 4


@compiled
def micros(now: float) -> int:
    """Return a moment as the kernels count it."""
    return round(now * 1e6)


@compiled
def wake(sim: Sim, machine: int, now: float) -> None:
    """Let a machine see that something is new in its lists."""
    if sim.world.whole[RUN, machine] == IDLE:
        start(sim.world, machine, now)
    else:
        kick(sim.world, machine, now)


@compiled
def _choose(sim: Sim, job: int) -> tuple[int, int, int]:
    """Ask the kernel for a pair, first without the machine of the pair that failed.

    Returns (prompt machine, token machine, how).
    """
    world, cluster = sim.world, sim.cluster
    tokens, size = world.jobs[job, KNOWN], world.setup[BLOCK_TOKENS]
    left = world.jobs[job, MOST] - tokens
    first = most = 0
    if left > 1:
        first = blocks_for(tokens + min(left, world.setup[RESERVE]), size)
        most = blocks_for(tokens + left, size)
    prompt_blocks = blocks_for(tokens, size)
    draw = world.setup[SERIAL] + 1
    shunned = world.jobs[job, SHUNNED] - 1
    if shunned != NONE and cluster.machines[POSITION, shunned] != NONE:
        leave(cluster, shunned)
        pair = choose_pair(cluster, sim.limits, 0, tokens, prompt_blocks, first, most, draw, NO_HINTS)
        enter(cluster, shunned)
        if pair[0] != NONE:
            return pair[0], pair[1], pair[2] * HOW_BASE + pair[3]
    pair = choose_pair(cluster, sim.limits, 0, tokens, prompt_blocks, first, most, draw, NO_HINTS)
    return pair[0], pair[1], pair[2] * HOW_BASE + pair[3]


@compiled
def place(sim: Sim, job: int, now: float) -> bool:
    """Give a request to a pair, or say that it must wait."""
    world, cluster = sim.world, sim.cluster
    prompt, token, how = _choose(sim, job)
    if prompt == NONE:
        return False
    jobs, places = world.jobs, world.places
    tokens, size = jobs[job, KNOWN], world.setup[BLOCK_TOKENS]
    left = jobs[job, MOST] - tokens
    world.setup[SERIAL] += 1
    jobs[job, ATTEMPT] += 1
    jobs[job, SHUNNED] = 0
    places[job, PROMPT_MACHINE], places[job, TOKEN_MACHINE], places[job, HOW] = prompt, token, how
    held = blocks_for(tokens, size)
    if cluster.machines[POOL, prompt] == POOL_TOKEN:
        move(cluster, prompt, POOL_MIXED)
    add_prompt(cluster, prompt, tokens, held, micros(now))
    jobs[job, HEARD_TOKENS] = tokens
    jobs[job, HEARD_PROMPT] = held
    jobs[job, HEARD_TOKEN] = jobs[job, BLOCKS] = 0
    jobs[job, PREEMPTED] = jobs[job, TAKEN] = 0
    jobs[job, TOKEN_STAGE] = NOTHING
    if left > 1:
        promised = blocks_for(tokens + min(left, world.setup[RESERVE]), size)
        if cluster.machines[POOL, token] == POOL_PROMPT:
            move(cluster, token, POOL_MIXED)
        add_token(cluster, token, promised, micros(now))
        jobs[job, HEARD_TOKEN] = jobs[job, PROMISED] = promised
        jobs[job, TOKEN_STAGE] = RESERVED
        jobs[job, BLOCKS] = held
        reserve(world, token, held, now)
    jobs[job, PROMPT_STAGE] = WAITING
    append(world, WAIT, prompt, job)
    wake(sim, prompt, now)
    return True


@compiled
def end_badly(sim: Sim, job: int, status: int) -> None:
    """Close a request that will not be finished."""
    sim.world.jobs[job, STATUS] = status
    sim.world.jobs[job, HEARD_OPEN] = 0
    sim.world.setup[UNFINISHED] -= 1


@compiled
def place_or_park(sim: Sim, job: int, now: float, fresh: bool) -> None:
    """Place a request, or put it in the waiting line, or turn it away when that is full."""
    world = sim.world
    waiting = world.sizes[QUEUE, 0]
    if (waiting == 0 or job < world.items[QUEUE, 0, 0]) and place(sim, job, now):
        return
    if fresh and waiting >= world.setup[MAX_QUEUED]:
        end_badly(sim, job, REJECTED)
        return
    insert_sorted(world, QUEUE, 0, job)


@compiled
def arrive(sim: Sim, job: int, now: float) -> None:
    """Take a new request in."""
    sim.world.jobs[job, HEARD_OPEN] = 1
    if sim.cluster.sizes.sum() == 0:
        end_badly(sim, job, REJECTED)
        return
    place_or_park(sim, job, now, True)


@compiled
def serve(sim: Sim, now: float) -> None:
    """Give waiting requests to machines, in order, until one finds no place."""
    world = sim.world
    taken = 0
    while world.sizes[QUEUE, 0] > taken:
        if not place(sim, world.items[QUEUE, 0, taken], now):
            break
        taken += 1
    if taken:
        size = world.sizes[QUEUE, 0]
        for index in range(taken, size):
            world.items[QUEUE, 0, index - taken] = world.items[QUEUE, 0, index]
        world.sizes[QUEUE, 0] = size - taken


@compiled
def send_home(sim: Sim, machine: int, now: float) -> None:
    """Return a borrowed machine to its pool if it is time to, or look again when it will be."""
    rows = sim.cluster.machines
    if rows[POOL, machine] == rows[HOME, machine]:
        return
    held = sim.world.setup[HOLD_US]
    if wants_home(sim.cluster, machine, held, micros(now)):
        move(sim.cluster, machine, rows[HOME, machine])
    elif wants_home(sim.cluster, machine, 0, micros(now)):
        due = rows[FOREIGN_AT_US, machine] + held
        if sim.world.whole[HOME_AT_US, machine] != due:
            sim.world.whole[HOME_AT_US, machine] = due
            push(sim.world, max(due * 1e-6, now) + 1e-6, HOME_AGAIN, machine, 0)


@compiled
def freed(sim: Sim, first: int, second: int, now: float) -> None:
    """Something on these machines was given back: home they go, and the line moves."""
    if first != NONE:
        send_home(sim, first, now)
    if second != NONE:
        send_home(sim, second, now)
    if sim.world.sizes[QUEUE, 0]:
        serve(sim, now)


@compiled
def release_prompt(sim: Sim, job: int) -> int:
    """Give back in the scheduler's books what the prompt phase held; returns its machine or NONE."""
    jobs = sim.world.jobs
    if jobs[job, HEARD_PROMPT] == 0:
        return NONE
    machine = sim.world.places[job, PROMPT_MACHINE]
    if jobs[job, HEARD_TOKENS]:
        end_prompt(sim.cluster, machine, jobs[job, HEARD_TOKENS])
        jobs[job, HEARD_TOKENS] = 0
    change_kv(sim.cluster, machine, -jobs[job, HEARD_PROMPT])
    jobs[job, HEARD_PROMPT] = 0
    return int(machine)


@compiled
def release_token(sim: Sim, job: int) -> int:
    """Give back in the scheduler's books what the token phase held; returns its machine or NONE."""
    jobs = sim.world.jobs
    if jobs[job, HEARD_TOKEN] == 0:
        return NONE
    machine = sim.world.places[job, TOKEN_MACHINE]
    end_token(sim.cluster, machine, jobs[job, HEARD_TOKEN])
    jobs[job, HEARD_TOKEN] = 0
    return int(machine)


@compiled
def hear(sim: Sim, kind: int, job: int, now: float) -> None:
    """Take one message of a machine into the scheduler's books."""
    world = sim.world
    jobs = world.jobs
    if not jobs[job, HEARD_OPEN]:
        return
    if kind == FIRST_MADE:
        machine = NONE
        if jobs[job, HEARD_PROMPT]:
            machine = world.places[job, PROMPT_MACHINE]
        if jobs[job, HEARD_TOKENS]:
            end_prompt(sim.cluster, machine, jobs[job, HEARD_TOKENS])
            jobs[job, HEARD_TOKENS] = 0
        freed(sim, machine, NONE, now)
    elif kind == KV_THERE:
        machine = release_prompt(sim, job)
        if machine != NONE:
            freed(sim, machine, NONE, now)
    elif kind == GREW:
        change_kv(sim.cluster, world.places[job, TOKEN_MACHINE], 1)
        jobs[job, HEARD_TOKEN] += 1
    else:
        prompt = release_prompt(sim, job)
        token = release_token(sim, job)
        jobs[job, HEARD_OPEN] = 0
        freed(sim, prompt, token, now)


@compiled
def tell(sim: Sim, machine: int, kind: int, job: int, now: float) -> None:
    """Say something to the scheduler, now or with the next report."""
    if sim.world.rates[REPORT_SECONDS] > 0.0:
        append(sim.world, OUTBOX, machine, kind + MESSAGES * job)
    else:
        hear(sim, kind, job, now)


@compiled
def report(sim: Sim, machine: int, now: float) -> None:
    """Deliver what a machine has collected."""
    world = sim.world
    size = world.sizes[OUTBOX, machine]
    for index in range(size):
        message = world.items[OUTBOX, machine, index]
        hear(sim, message % MESSAGES, message // MESSAGES, now)
    world.sizes[OUTBOX, machine] = 0


@compiled
def finish(sim: Sim, machine: int, job: int, now: float) -> None:
    """Close a job whose last token was made on `machine`."""
    sim.world.jobs[job, STATUS] = FINISHED
    sim.world.setup[UNFINISHED] -= 1
    tell(sim, machine, ENDED, job, now)
