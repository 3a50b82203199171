"""The arrays that a simulation works on, and the lists and the event heap inside them.

A compiled loop passes one `World` around. It is few arrays with named rows rather than
many named arrays, because every array that a compiled function receives costs it time.

*Lists*: ``items[list, machine, place]`` with ``sizes[list, machine]``, all with the same
room. A loop that runs out of room sets a flag and ends, and its driver starts it again
with twice the room: overload shows early and no list outgrows the requests there are.

*Heap*: events ordered by time and, at equal times, in the order in which they were
pushed, so that a run is the same on every machine and a naive simulator can repeat it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from splitwise.scheduling.compiled import compiled

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Columns of `times`, one row per request, in seconds of the trace; NaN: never happened.
START, FIRST, SECOND, LAST = 0, 1, 2, 3  # first prompt iteration; first, second and last token
GAP = 4  # longest time between two tokens
LATEST = 5  # the latest token, while it runs
TIMES = 6

# Columns of `places`, one row per request.
PROMPT_MACHINE, TOKEN_MACHINE, HOW, RESTARTS, PREEMPTED, SELECTED = range(6)
PLACES = 6
HOW_BASE = 16  # HOW is the prompt's code times this plus the token's

# Columns of `stats`, one row per machine; seconds of iterations by kind, and sums.
BUSY_PROMPT, BUSY_MIXED, BUSY_TOKEN, ITERATIONS, PROMPT_TOKENS, TOKENS = range(6)
MEMORY_PEAK, MEMORY_SECONDS, BYTES_SENT, LINK_BUSY, PREEMPTIONS, LOST_AT = range(6, 12)
OCCUPANCY = 12  # from here on: seconds with 0, 1, ... MAX_SEQUENCES (or more) in the batch
MAX_SEQUENCES = 512
STATS = OCCUPANCY + MAX_SEQUENCES + 1

# Columns of `heap_entries`; the last row is no event but holds SIZE and SERIAL.
_SERIAL, _KIND, _SUBJECT, _VERSION = range(4)
SIZE, SERIAL = 0, 1


class World(NamedTuple):
    """The arrays of one simulation; see the module's text."""

    whole: NDArray[np.int64]  # [row, machine]
    real: NDArray[np.float64]  # [row, machine]
    items: NDArray[np.int32]
    sizes: NDArray[np.int32]  # one row more than lists: [lists, 0] is the flag "out of room"
    tasks: NDArray[np.int32]  # [task, column]
    times: NDArray[np.float64]
    places: NDArray[np.int32]
    stats: NDArray[np.float64]
    heap_times: NDArray[np.float64]
    heap_entries: NDArray[np.int64]
    rows: NDArray[np.float64]  # performance models, see splitwise.perf.kernels
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
    task_columns: int,
    rows: NDArray[np.float64],
    setup: NDArray[np.int64],
    rates: NDArray[np.float64],
) -> World:
    """Return empty arrays; `room` is the places of each list and a sixteenth of the heap's."""
    times = np.full((requests, TIMES), np.nan)
    times[:, GAP] = 0.0
    places = np.zeros((requests, PLACES), np.int32)
    places[:, (PROMPT_MACHINE, TOKEN_MACHINE)] = -1
    return World(
        whole=np.zeros((whole_rows, machines), np.int64),
        real=np.zeros((real_rows, machines)),
        items=np.zeros((lists, machines, max(room, machines)), np.int32),
        sizes=np.zeros((lists + 1, machines), np.int32),
        tasks=np.zeros((2 * requests, task_columns), np.int32),
        times=times,
        places=places,
        stats=np.zeros((machines, STATS)),
        heap_times=np.zeros(16 * room),
        heap_entries=np.zeros((16 * room + 1, 4), np.int64),
        rows=rows,
        setup=setup,
        rates=rates,
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
    return int(world.heap_entries[-1, SIZE])


@compiled
def push(world: World, time: float, kind: int, subject: int, version: int) -> None:
    """Add an event; a full heap sets the flag that `out_of_room` reads."""
    times, entries = world.heap_times, world.heap_entries
    place = entries[-1, SIZE]
    if place == len(times):
        world.sizes[-1, 0] = 1
        return
    serial = entries[-1, SERIAL]
    entries[-1, SIZE] += 1
    entries[-1, SERIAL] += 1
    while place > 0:
        parent = (place - 1) >> 1
        if times[parent] <= time:  # an equal one that is there already goes first
            break
        times[place] = times[parent]
        for column in range(4):
            entries[place, column] = entries[parent, column]
        place = parent
    times[place] = time
    entries[place, _SERIAL] = serial
    entries[place, _KIND] = kind
    entries[place, _SUBJECT] = subject
    entries[place, _VERSION] = version


@compiled
def pop(world: World) -> tuple[float, int, int, int]:
    """Take the earliest event out: (time, kind, subject, version). The heap must not be empty."""
    times, entries = world.heap_times, world.heap_entries
    first = times[0], entries[0, _KIND], entries[0, _SUBJECT], entries[0, _VERSION]
    entries[-1, SIZE] -= 1
    size = entries[-1, SIZE]
    time, serial = times[size], entries[size, _SERIAL]
    place = 0
    while True:
        child = 2 * place + 1
        if child >= size:
            break
        if child + 1 < size and (
            times[child + 1] < times[child]
            or (times[child + 1] == times[child] and entries[child + 1, _SERIAL] < entries[child, _SERIAL])
        ):
            child += 1
        if time < times[child] or (time == times[child] and serial < entries[child, _SERIAL]):
            break
        times[place] = times[child]
        for column in range(4):
            entries[place, column] = entries[child, column]
        place = child
    times[place] = time
    for column in range(4):
        entries[place, column] = entries[size, column]
    return first
