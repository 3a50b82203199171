"""The state of `faithful` mode: what is known of every request and machine, by column.

A job is a request. The columns fall in two groups: what is true on the machines, and what
the cluster scheduler has *heard* (the ``KNOWN`` columns), which lags behind when machines
report periodically. KV memory counts in blocks, as in the live scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba.experimental import structref

from splitwise.scheduling.arrays import ClusterState, install, new_state
from splitwise.scheduling.policies import new_limits
from splitwise.sim.compiled import compiled
from splitwise.sim.passed import Passed, SimType
from splitwise.sim.world import World, new_world

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.setup import Cluster

# Columns of `World.jobs`.
PROMPT, OUTPUT, LIMIT = 0, 1, 2  # prompt tokens; output tokens made in the end; most it may make
MADE = 3  # output tokens so far, over all attempts
ATTEMPT = 4
SKIPPED = 5  # iterations that its token phase had to sit out
PROMPT_STAGE, TOKEN_STAGE = 6, 7
PROMPT_BLOCKS, TOKEN_BLOCKS = 8, 9  # KV blocks held on its machines
KNOWN_OPEN = 10  # the scheduler takes it for open
KNOWN_TOKENS = 11  # prompt tokens pending by the scheduler's count; 0: prompt computed
KNOWN_PROMPT, KNOWN_TOKEN = 12, 13  # KV blocks it believes to be held
STATUS = 14
SHUNNED = 15  # the machine, counted from 1, that the next attempt had better not get
COLUMNS = 16

# PROMPT_STAGE and TOKEN_STAGE. A job is in the list that its stage names.
NOTHING, WAITING, COMPUTING, COMPUTED = 0, 1, 2, 3
RESERVED, READY, RESIDENT, EVICTED, RECOMPUTING = 4, 5, 6, 7, 8
# STATUS
OPEN, FINISHED, REJECTED, FAILED = 0, 1, 2, 3

# Lists per machine; QUEUE is the cluster's own, kept at machine 0.
WAIT, PROMPTS, JOIN, BATCH, ACTIVE, OUTBOX, QUEUE = range(7)
LISTS = 7

# Rows of `World.whole`.
USED, CAPACITY, RUN, ROUNDS, VERSION, MODEL = range(6)
RUN_SEQUENCES, RUN_CONTEXT, RUN_PROMPT_TOKENS, GROWS_AT, ALIVE, HOME_AT_US = range(6, 12)
WHOLE_ROWS = 12
# RUN: what a machine does. Only TOKENS can be cut short.
IDLE, TOKENS_RUN, PROMPTS_RUN, BETWEEN = 0, 1, 2, 3
# Rows of `World.real`: the run, and the moments from which the two directions of the link are free.
BEGAN, ENDS, SENDS_FROM, RECEIVES_FROM, LINK, VISIBLE = range(6)
REAL_ROWS = 6

# `World.setup`
TOKEN_BYTES, BLOCK_TOKENS, RESERVE, BATCH_TOKENS, MAX_SEQUENCES, MAX_PREEMPTIONS = range(6)
MAX_QUEUED, MAX_ATTEMPTS, HOLD_US, LAYERS, LAYERWISE_FROM, SERIAL, UNFINISHED = range(6, 13)
SETUP = 13
# `World.rates`
REPORT_SECONDS, HANDOFF_SECONDS = 0, 1


class Sim(Passed):
    """A simulation: its own arrays, and those of the live scheduler's kernels."""

    world: World
    cluster: ClusterState
    limits: NDArray[np.int64]


structref.define_proxy(Sim, SimType, list(Sim.__annotations__))


def new_sim(
    prompt_tokens: NDArray[np.int32],
    output_tokens: NDArray[np.int32],
    cluster: Cluster,
    scheduler: SchedulerSettings,
    room: int,
) -> Sim:
    """Return idle machines and requests that have not arrived."""
    machines = cluster.machines
    setup = np.zeros(SETUP, np.int64)
    setup[TOKEN_BYTES] = cluster.token_bytes
    setup[BLOCK_TOKENS] = cluster.block_tokens
    setup[RESERVE] = scheduler.reserve_output_tokens
    setup[BATCH_TOKENS] = cluster.max_batch_tokens
    setup[MAX_SEQUENCES] = cluster.max_running
    setup[MAX_PREEMPTIONS] = cluster.max_preemptions
    setup[MAX_QUEUED] = scheduler.max_queued
    setup[MAX_ATTEMPTS] = scheduler.max_attempts
    setup[HOLD_US] = round(scheduler.borrow_hold * 1e6)
    setup[LAYERS] = cluster.layers
    setup[LAYERWISE_FROM] = cluster.layerwise_from_tokens
    setup[UNFINISHED] = len(prompt_tokens)
    world = new_world(
        machines=len(machines),
        requests=len(prompt_tokens),
        whole_rows=WHOLE_ROWS,
        real_rows=REAL_ROWS,
        lists=LISTS,
        room=room,
        jobs=len(prompt_tokens),
        job_columns=COLUMNS,
        rows=cluster.rows,
        setup=setup,
        rates=np.array([cluster.report_seconds, cluster.handoff_seconds]),
    )
    world.jobs[:, PROMPT] = prompt_tokens
    world.jobs[:, OUTPUT] = output_tokens
    world.jobs[:, LIMIT] = np.maximum(output_tokens, cluster.assumed_max_tokens)
    world.whole[CAPACITY] = [machine.kv_blocks for machine in machines]
    world.whole[MODEL] = [machine.model_row for machine in machines]
    world.whole[ALIVE] = 1
    world.real[LINK] = [machine.link_bytes for machine in machines]
    world.real[VISIBLE] = [machine.visible_seconds for machine in machines]
    state = new_state(len(machines))
    for slot, machine in enumerate(machines):
        install(state, slot, 0, machine.home, machine.kv_blocks, cluster.max_running)
    limits = new_limits(
        scheduler.policy, scheduler.queue_tokens, scheduler.last_resort_tokens, scheduler.seed
    )
    return Sim.make(world, state, limits)


@compiled
def context(world: World, job: int) -> int:
    """Tokens of a job that are known so far: its prompt and its output."""
    return int(world.jobs[job, PROMPT] + world.jobs[job, MADE])


@compiled
def blocks(world: World, tokens: int) -> int:
    """KV blocks that hold `tokens` tokens."""
    size = world.setup[BLOCK_TOKENS]
    return int((tokens + size - 1) // size)
