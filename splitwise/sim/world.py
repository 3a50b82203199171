"""The arrays that a simulation works on, and the lists and the event heap inside them.

A compiled loop passes one `World` around. It is few arrays with named rows rather than
many named arrays, because every array that a compiled function receives costs it time.

*Lists*: ``items[list, machine, place]`` with ``sizes[list, machine]``, all with the same
room. A loop that runs out of room sets a flag and ends, and its driver starts it again
with twice the room: overload shows early and no list outgrows the requests there are.

*Heap*: events ordered by time and, at equal times, by kind and subject, so that a run is
the same on every machine and a naive simulator can repeat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitwise.sim.compiled import compiled
from splitwise.sim.passed import Passed

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Columns of `times`, one row per request, in seconds of the trace; NaN: never happened.
START, FIRST, SECOND, LAST = 0, 1, 2, 3  # first prompt iteration; first, second and last token
GAP = 4  # longest time between two tokens
LATEST = 5  # the latest token, while it runs
RECEIVED = 6  # when its KV cache is (or will be) whole at the token machine
TIMES = 7

# Columns of `places`, one row per request.
PROMPT_MACHINE, TOKEN_MACHINE, HOW, RESTARTS, TIMES_PREEMPTED, SELECTED = range(6)
PLACES = 6
HOW_BASE = 16  # HOW is the prompt's code times this plus the token's

# Columns of `stats`, one row per machine; seconds of iterations by kind, and sums.
BUSY_PROMPT, BUSY_MIXED, BUSY_TOKEN, ITERATIONS, PROMPT_TOKENS, TOKENS = range(6)
MEMORY_PEAK, MEMORY_SECONDS, BYTES_SENT, LINK_BUSY, PREEMPTIONS, LOST_AT = range(6, 12)
OCCUPANCY = 12  # from here on: seconds with 0, 1, ... MAX_SEQUENCES (or more) in the batch
MAX_SEQUENCES = 512
STATS = OCCUPANCY + MAX_SEQUENCES + 1

# Columns of `heap_entries`: kind and subject in one number, and a version. The last row is
# no event but holds the number of events.
_SUBJECT, _VERSION = 0, 1
_KIND_BASE = 1 << 40
_SIZE = 0


class World(Passed):
    """The arrays of one simulation; see the module's text.

    ``whole[row, machine]`` and ``real[row, machine]`` are the machines' numbers, `items` and
    `sizes` the lists (``sizes[-1, 0]`` is the flag "out of room"), ``jobs[job, column]`` what
    the mode takes for a job, `times` and `places` the requests' records, `stats` the
    machines', `rows` the performance models (see ``splitwise.perf.kernels``), `setup` and
    `rates` constants and counters of the whole.
    """

    whole: NDArray[np.int64]
    real: NDArray[np.float64]
    items: NDArray[np.int32]
    sizes: NDArray[np.int32]
    jobs: NDArray[np.int32]
    times: NDArray[np.float64]
    places: NDArray[np.int32]
    stats: NDArray[np.float64]
    heap_times: NDArray[np.float64]
    heap_entries: NDArray[np.int64]
    rows: NDArray[np.float64]
    setup: NDArray[np.int64]
    rates: NDArray[np.float64]


def new_world(
    *,
    machines: int,
    requests: int,
    whole_rows: int,
    real_rows: int,
    lists: int,
    room: int,
    jobs: int,
    job_columns: int,
    rows: NDArray[np.float64],
    setup: NDArray[np.int64],
    rates: NDArray[np.float64],
) -> World:
    """Return empty arrays; `room` is the places of each list and a sixteenth of the heap's."""
    times = np.full((requests, TIMES), np.nan)
    times[:, GAP] = 0.0
    places = np.zeros((requests, PLACES), np.int32)
    places[:, (PROMPT_MACHINE, TOKEN_MACHINE)] = -1
    return World.make(
        np.zeros((whole_rows, machines), np.int64),
        np.zeros((real_rows, machines)),
        np.zeros((lists, machines, max(room, machines)), np.int32),
        np.zeros((lists + 1, machines), np.int32),
        np.zeros((jobs, job_columns), np.int32),
        times,
        places,
        np.zeros((machines, STATS)),
        np.zeros(16 * room),
        np.zeros((16 * room + 1, 2), np.int64),
        rows,
        setup,
        rates,
    )


@compiled
def out_of_room(world: World) -> bool:
    """Whether a list or the heap was full: the run is to be thrown away."""
    return bool(world.sizes[-1, 0] != 0)


@compiled
def insert(world: World, kind: int, machine: int, place: int, item: int) -> None:
    """Put `item` at `place` of a list, moving what follows."""
    items = world.items
    size = world.sizes[kind, machine]
    if size == items.shape[2]:
        world.sizes[-1, 0] = 1
        return
    for index in range(size, place, -1):
        items[kind, machine, index] = items[kind, machine, index - 1]
    items[kind, machine, place] = item
    world.sizes[kind, machine] = size + 1


@compiled
def append(world: World, kind: int, machine: int, item: int) -> None:
    """Put `item` at the end of a list."""
    size = world.sizes[kind, machine]
    if size == world.items.shape[2]:
        world.sizes[-1, 0] = 1
        return
    world.items[kind, machine, size] = item
    world.sizes[kind, machine] = size + 1


@compiled
def remove(world: World, kind: int, machine: int, item: int) -> bool:
    """Take the first `item` out of a list, keeping the order; False when it is not there."""
    items = world.items
    size = world.sizes[kind, machine]
    place = 0
    while place < size and items[kind, machine, place] != item:
        place += 1
    if place == size:
        return False
    for index in range(place, size - 1):
        items[kind, machine, index] = items[kind, machine, index + 1]
    world.sizes[kind, machine] = size - 1
    return True


@compiled
def insert_sorted(world: World, kind: int, machine: int, item: int) -> None:
    """Put `item` in its place in a growing list, after its equals."""
    items = world.items
    place = world.sizes[kind, machine]
    while place > 0 and item < items[kind, machine, place - 1]:
        place -= 1
    insert(world, kind, machine, place, item)


@compiled
def waiting_events(world: World) -> int:
    """Count the events in the heap."""
    return int(world.heap_entries[-1, _SIZE])


@compiled
def push(world: World, time: float, kind: int, subject: int, version: int) -> None:
    """Add an event; a full heap sets the flag that `out_of_room` reads."""
    times, entries = world.heap_times, world.heap_entries
    place = entries[-1, _SIZE]
    if place == len(times):
        world.sizes[-1, 0] = 1
        return
    entries[-1, _SIZE] += 1
    key = kind * _KIND_BASE + int(subject)
    while place > 0:
        parent = (place - 1) >> 1
        if times[parent] < time or (times[parent] == time and entries[parent, _SUBJECT] <= key):
            break
        times[place] = times[parent]
        entries[place, 0] = entries[parent, 0]
        entries[place, 1] = entries[parent, 1]
        place = parent
    times[place] = time
    entries[place, _SUBJECT] = key
    entries[place, _VERSION] = version


@compiled
def pop(world: World) -> tuple[float, int, int, int]:
    """Take the earliest event out: (time, kind, subject, version). The heap must not be empty."""
    times, entries = world.heap_times, world.heap_entries
    first, version = times[0], entries[0, _VERSION]
    kind, subject = entries[0, _SUBJECT] // _KIND_BASE, entries[0, _SUBJECT] % _KIND_BASE
    entries[-1, _SIZE] -= 1
    size = entries[-1, _SIZE]
    time, key = times[size], entries[size, _SUBJECT]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and (
            times[child + 1] < times[child]
            or (times[child + 1] == times[child] and entries[child + 1, _SUBJECT] < entries[child, _SUBJECT])
        ):
            child += 1
        if time < times[child] or (time == times[child] and key <= entries[child, _SUBJECT]):
            break
        times[place] = times[child]
        entries[place, 0] = entries[child, 0]
        entries[place, 1] = entries[child, 1]
        place = child
    times[place] = time
    entries[place, 0] = entries[size, 0]
    entries[place, 1] = entries[size, 1]
    return first, kind, subject, version
