"""A scheduler's whole state as plain JSON values, and a scheduler made from them again.

An event log that is to be bounded cannot keep the first event for ever. It begins again
with the state of that moment, and what follows replays to the same decisions as if nothing
had been cut off: a property test holds `restore` to that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling import arrays
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.events import MachineSpec, Pool
from splitwise.scheduling.fleet import Group, Machine
from splitwise.scheduling.requests import Hold, Request
from splitwise.scheduling.states import MachineState, RequestState

if TYPE_CHECKING:
    from typing import Any

    from splitwise.scheduling.fleet import Fleet
    from splitwise.scheduling.settings import SchedulerSettings

    Plain = dict[str, Any]

# Fields that JSON has types for; the others are written out below. The trees follow from the arrays.
ARRAYS = ("machines", "members", "sizes", "cursors", "turns")
SPEC = ("machine_id", "incarnation", "model", "kv_fingerprint", "node", "kv_blocks", "block_tokens",
        "max_running")  # fmt: skip
MACHINE = ("slot", "sequence", "reported_at", "aside_until", "paused_at", "given_up")
GROUP = ("model", "index", "fingerprint", "block_tokens", "departed_at", "departure_interval")
REQUEST = ("request_id", "model", "number", "prompt_tokens", "max_tokens", "deadline", "attempt", "serial",
           "made", "first_seen", "avoid")  # fmt: skip


def capture(scheduler: ClusterScheduler) -> Plain:
    """Return all that decides about future events, apart from the settings."""
    placement = scheduler._placement
    return {
        "now": scheduler.now,
        "arrivals": scheduler._arrivals,
        "serial": placement.serial,
        "deadlines": [list(entry) for entry in scheduler._deadlines],
        "prefixes": placement.prefixes.capture(),
        "fleet": _capture_fleet(scheduler.fleet),
        "requests": [_capture_request(request) for request in scheduler._requests.values()],
    }


def restore(settings: SchedulerSettings, plain: Plain) -> ClusterScheduler:
    """Return a scheduler in a captured state; raises KeyError, TypeError or ValueError for another."""
    scheduler = ClusterScheduler(settings)
    scheduler.now = float(plain["now"])
    scheduler._arrivals = plain["arrivals"]
    scheduler._placement.serial = plain["serial"]
    scheduler._placement.prefixes.restore(plain["prefixes"])
    scheduler._deadlines = [(at, number, request_id) for at, number, request_id in plain["deadlines"]]
    _restore_fleet(scheduler.fleet, plain["fleet"])
    for entry in plain["requests"]:
        request = _restore_request(scheduler.fleet, entry)
        scheduler._requests[request.request_id] = request
    for machine in scheduler.fleet.machines.values():
        machine.open = dict(sorted(machine.open.items()))
    return scheduler


def _fields(thing: object, names: tuple[str, ...]) -> Plain:
    return {name: getattr(thing, name) for name in names}


def _capture_fleet(fleet: Fleet) -> Plain:
    return {
        "state": {name: getattr(fleet.state, name).tolist() for name in ARRAYS},
        "machines": [
            {
                "spec": {**_fields(machine.spec, SPEC), "home": machine.spec.home.value},
                "pool": machine.pool.value,
                "state": machine.state.value,
                **_fields(machine, MACHINE),
            }
            for machine in fleet.machines.values()
        ],
        "groups": [
            {**_fields(group, GROUP), "machines": list(group.machines)} for group in fleet.groups.values()
        ],
        "borrowed": list(fleet.borrowed),
        "aside": list(fleet.aside),
        "paused": list(fleet.paused),
        "free_slots": fleet._free_slots,
        "free_groups": fleet._free_groups,
        "last_incarnation": list(fleet._last_incarnation.items()),
    }


def _restore_fleet(fleet: Fleet, plain: Plain) -> None:
    state = plain["state"]
    width, groups = len(state["machines"][0]), len(state["sizes"]) // arrays.POOLS
    fleet.state = arrays.new_state(width, groups)
    for name in ARRAYS:
        array = getattr(fleet.state, name)
        array[:] = np.array(state[name], array.dtype)
    for slot in np.flatnonzero(fleet.state.machines[arrays.POSITION] != arrays.NONE).tolist():
        arrays.refresh(fleet.state, slot)
    fleet.by_slot = [None] * width
    fleet.names = [""] * width
    for entry in plain["groups"]:
        fleet.groups[entry["model"]] = Group(**{name: entry[name] for name in GROUP})
    for entry in plain["machines"]:
        spec = MachineSpec(**{**entry["spec"], "home": Pool(entry["spec"]["home"])})
        machine = Machine(spec, entry["slot"], fleet.groups[spec.model], Pool(entry["pool"]))
        machine.state = MachineState(entry["state"])
        for name in MACHINE:
            setattr(machine, name, entry[name])
        fleet.machines[spec.machine_id] = fleet.by_slot[machine.slot] = machine
        fleet.names[machine.slot] = spec.machine_id
    for entry in plain["groups"]:
        group = fleet.groups[entry["model"]]
        group.machines = {name: fleet.machines[name] for name in entry["machines"]}
        group.measure()
    for name in ("borrowed", "aside", "paused"):
        setattr(fleet, name, {slot: fleet.by_slot[slot] for slot in plain[name]})
    fleet._free_slots = plain["free_slots"]
    fleet._free_groups = plain["free_groups"]
    fleet._last_incarnation.update(plain["last_incarnation"])


def _capture_request(request: Request) -> Plain:
    return {
        **_fields(request, REQUEST),
        "prefix_hashes": list(request.prefix_hashes),
        "state": request.state.value,
        "prompt": _capture_hold(request.prompt),
        "token": _capture_hold(request.token),
    }


def _capture_hold(hold: Hold | None) -> list[Any] | None:
    return None if hold is None else [hold.machine.slot, int(hold.tokens), int(hold.blocks), hold.running]


def _restore_request(fleet: Fleet, plain: Plain) -> Request:
    """Return one request, with its place in its machines' books or in its model's line."""
    known = {name: plain[name] for name in REQUEST}
    request = Request(
        group=fleet.groups[plain["model"]],
        state=RequestState(plain["state"]),
        prefix_hashes=tuple(plain["prefix_hashes"]),
        **known,
    )
    for phase in ("prompt", "token"):
        if plain[phase] is not None:
            slot, tokens, blocks, running = plain[phase]
            machine = fleet.by_slot[slot]
            if machine is None:
                message = f"request {request.request_id} is on slot {slot}, which has no machine"
                raise ValueError(message)
            setattr(request, phase, Hold(machine, tokens, blocks, running))
            machine.open[request.serial] = request
    if request.state is RequestState.QUEUED:
        request.group.line.add(request)
    return request
