"""The state of `faithful` mode: what is known of every request and machine, by column.

A job is a request. The columns fall in two groups: what is true on the machines, and what
the cluster scheduler has *heard* (the ``HEARD`` columns), which lags behind when machines
report periodically. KV memory counts in blocks, as in the live scheduler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling import batching
from splitwise.scheduling.arrays import ClusterState, install, new_state
from splitwise.scheduling.policies import new_limits
from splitwise.sim.passed import Passed, passed_as_one
from splitwise.sim.world import World, new_world

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.setup import Cluster

# Columns of `World.jobs`: first those of the machine scheduler, PENDING to BLOCKS. KNOWN counts
# over all attempts; BLOCKS are those of the token phase.
END = batching.COLUMNS  # tokens known when the last one is made
ATTEMPT, PROMPT_STAGE, TOKEN_STAGE = range(END + 1, END + 4)
PROMPT_BLOCKS = END + 4  # KV blocks held for the prompt
PROMISED = END + 5  # KV blocks that the token phase was promised, or has grown to beyond that
HEARD_OPEN = END + 6  # the scheduler takes it for open
HEARD_TOKENS = END + 7  # prompt tokens pending by the scheduler's count; 0: prompt computed
HEARD_PROMPT, HEARD_TOKEN = END + 8, END + 9  # KV blocks in its books
STATUS = END + 10
SHUNNED = END + 11  # the machine, counted from 1, that the next attempt had better not get
COLUMNS = END + 12

# PROMPT_STAGE and TOKEN_STAGE. A job is in the list that its stage names.
NOTHING, WAITING, COMPUTING, COMPUTED = 0, 1, 2, 3
RESERVED, RESIDENT, EVICTED, RECOMPUTING = 4, 5, 6, 7
# STATUS
OPEN, FINISHED, REJECTED, FAILED = 0, 1, 2, 3

# Lists per machine; QUEUE is the cluster's own, kept at machine 0.
# WAIT: for memory; PROMPTS: to be computed; PHASES: token phases. All in the order they came.
WAIT, PROMPTS, PHASES, OUTBOX, QUEUE = range(5)
LISTS = 5

# Rows of `World.whole`.
USED, CAPACITY, RUN, ROUNDS, VERSION, MODEL = range(6)
RUN_SEQUENCES, RUN_CONTEXT, RUN_PROMPTS, GROWS_AT, ALIVE, HOME_AT_US = range(6, 12)
SPARE = 12  # KV blocks that a run of token phases leaves free until its end, at the least
WHOLE_ROWS = 13
# RUN: what a machine does. Only TOKENS can be cut short.
IDLE, TOKENS_RUN, PROMPTS_RUN, BETWEEN = 0, 1, 2, 3
# Rows of `World.real`: the run, and the moments from which the two directions of the link are free.
BEGAN, ENDS, SENDS_FROM, RECEIVES_FROM, LINK, VISIBLE = range(6)
REAL_ROWS = 6

# `World.setup`
TOKEN_BYTES, BLOCK_TOKENS, RESERVE, BATCH_TOKENS, MAX_PREEMPTIONS = range(5)
MAX_QUEUED, MAX_ATTEMPTS, HOLD_US, LAYERS, SERIALIZED_BELOW, SERIAL, UNFINISHED = range(5, 12)
SETUP = 12
# `World.rates`
REPORT_SECONDS, HAND_OVER_SECONDS = 0, 1


class Sim(Passed):
    """A simulation: its own arrays, and those of the live scheduler's kernels."""

    world: World
    cluster: ClusterState
    limits: NDArray[np.int64]


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
    setup[MAX_PREEMPTIONS] = cluster.max_preemptions
    setup[MAX_QUEUED] = scheduler.max_queued
    setup[MAX_ATTEMPTS] = scheduler.max_attempts
    setup[HOLD_US] = round(scheduler.borrow_hold * 1e6)
    setup[LAYERS] = cluster.layers
    setup[SERIALIZED_BELOW] = cluster.serialized_below_tokens
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
        rates=np.array([cluster.report_seconds, cluster.hand_over_seconds]),
    )
    world.jobs[:, batching.KNOWN] = prompt_tokens
    world.jobs[:, END] = prompt_tokens + output_tokens
    world.jobs[:, batching.MOST] = prompt_tokens + np.maximum(output_tokens, cluster.assumed_max_tokens)
    world.whole[CAPACITY] = [machine.kv_blocks for machine in machines]
    world.whole[MODEL] = [machine.model_row for machine in machines]
    world.whole[ALIVE] = 1
    world.real[LINK] = [machine.link_bytes for machine in machines]
    world.real[VISIBLE] = [machine.visible_seconds for machine in machines]
    state = passed_as_one(new_state(len(machines)))
    for slot, machine in enumerate(machines):
        install(state, slot, 0, machine.home, machine.kv_blocks, cluster.max_running)
    limits = new_limits(
        scheduler.policy, scheduler.queue_tokens, scheduler.last_resort_tokens, scheduler.seed
    )
    return Sim.make(world, state, limits)
