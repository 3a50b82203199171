"""The machines of a cluster by name: who is there, in which state, in which slot of the arrays."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.scheduling import arrays, reasons
from splitwise.scheduling.arrays import POOL_MIXED, POOL_PROMPT, POOL_TOKEN
from splitwise.scheduling.events import Pool
from splitwise.scheduling.states import MACHINE_TABLE, MachineInput, MachineState
from splitwise.scheduling.waiting import WaitingLine

if TYPE_CHECKING:
    from splitwise.scheduling.events import LoadReported, MachineSpec
    from splitwise.scheduling.requests import Request

POOL_CODE = {Pool.PROMPT: POOL_PROMPT, Pool.TOKEN: POOL_TOKEN, Pool.MIXED: POOL_MIXED}

REMEMBERED_IDS = 4096
"""Machine ids whose last incarnation is remembered after they are lost."""


@dataclass(slots=True)
class Machine:
    """One live machine. `open` holds its open attempts by assignment serial, oldest first."""

    spec: MachineSpec
    slot: int
    group: Group
    pool: Pool
    state: MachineState = MachineState.JOINING
    sequence: int = -1  # of the newest load report
    reported_at: float | None = None
    aside_until: float | None = None  # gets no work until then: its engine refused or failed
    paused_at: float | None = None  # it said then that it cannot take work for now
    given_up: bool = False  # it was paused for longer than requests wait
    open: dict[int, Request] = field(default_factory=dict)

    def advance(self, happened: MachineInput) -> None:
        """Take the way that the machine table says; KeyError when there is none."""
        self.state = MACHINE_TABLE[self.state, happened]

    @property
    def stays(self) -> bool:
        """Whether requests may wait for it."""
        return self.state is not MachineState.DRAINING and not self.given_up

    @property
    def condition(self) -> str:
        """Its state in a word, for operators: ``paused`` when it cannot take the work that it should."""
        paused = self.paused_at is not None and self.state is not MachineState.DRAINING
        return "paused" if paused else self.state.value

    @property
    def takes_work(self) -> bool:
        """Whether it is given new work now."""
        return self.stays and self.paused_at is None and self.aside_until is None

    def blocks(self, tokens: int) -> int:
        """KV blocks that hold `tokens` tokens."""
        return -(-tokens // self.spec.block_tokens)


@dataclass(slots=True)
class Group:
    """The machines that serve one model; they all have one KV fingerprint."""

    model: str
    index: int
    fingerprint: str
    block_tokens: int
    machines: dict[str, Machine] = field(default_factory=dict)
    line: WaitingLine = field(default_factory=WaitingLine)
    serving: int = 0  # machines that take work, now or after a pause
    paused: int = 0  # of them, those that said that they cannot now
    roomiest: tuple[int, int] = (0, 0)  # KV blocks of the two largest of them
    departed_at: float | None = None
    departure_interval: float = 0.0  # seconds between the ends of requests, smoothed

    def departed(self, now: float) -> None:
        """Note that a request ended, for estimates of how fast the queue moves."""
        if self.departed_at is not None:
            self.departure_interval += (now - self.departed_at - self.departure_interval) / 16
        self.departed_at = now

    def count_in(self, machine: Machine) -> None:
        """Take account of a machine that joined: thousands may, so without looking at the others."""
        self.serving += 1
        first, second, _ = sorted((*self.roomiest, machine.spec.kv_blocks), reverse=True)
        self.roomiest = (first, second)

    def measure(self) -> None:
        """Find out again who serves and what fits into it, after machines came or went."""
        staying = [machine for machine in self.machines.values() if machine.stays]
        sizes = sorted((machine.spec.kv_blocks for machine in staying), reverse=True)
        self.serving = len(staying)
        self.paused = sum(machine.paused_at is not None for machine in staying)
        self.roomiest = (sizes[0] if sizes else 0, sizes[1] if len(sizes) > 1 else 0)

    def ever_fits(self, prompt_blocks: int, most_blocks: int) -> bool:
        """Whether an empty cluster could hold the request, on two machines or both phases on one."""
        first, second = self.roomiest
        needs = sorted((prompt_blocks, most_blocks))
        return (needs[1] <= first and needs[0] <= second) or sum(needs) <= first


class Fleet:
    """All live machines and model groups, and the arrays that the kernels work on."""

    def __init__(self) -> None:
        self.state = arrays.new_state(capacity=16, groups=1)
        self.machines: dict[str, Machine] = {}
        self.groups: dict[str, Group] = {}
        self.borrowed: dict[int, Machine] = {}
        self.aside: dict[int, Machine] = {}
        self.paused: dict[int, Machine] = {}
        self.by_slot: list[Machine | None] = [None] * self.state.machines.shape[1]
        self.names = [""] * len(self.by_slot)  # by slot; of a lost machine until the slot is used again
        self._free_slots = list(range(len(self.by_slot) - 1, -1, -1))
        self._free_groups = [0]
        self._last_incarnation: OrderedDict[str, int] = OrderedDict()

    def refusal(self, spec: MachineSpec) -> str | None:
        """Why a machine may not join: a code of `RefuseMachine`, or None."""
        known = self.machines.get(spec.machine_id)
        if not isinstance(spec.home, Pool) or min(spec.kv_blocks, spec.block_tokens, spec.max_running) < 1:
            return reasons.BAD_DESCRIPTION
        if known is not None and spec.incarnation == known.spec.incarnation:
            return None if spec == known.spec else reasons.IDENTITY_CONFLICT
        last = known.spec.incarnation if known else self._last_incarnation.get(spec.machine_id, 0)
        if spec.incarnation < last:
            return reasons.STALE_INCARNATION
        group = self.groups.get(spec.model)
        if group is None or set(group.machines) <= {spec.machine_id}:
            return None
        same = (spec.kv_fingerprint, spec.block_tokens) == (group.fingerprint, group.block_tokens)
        return None if same else reasons.KV_FINGERPRINT

    def join(self, spec: MachineSpec) -> Machine:
        """Add a machine that `refusal` let pass, serving in its home pool."""
        group = self.groups.get(spec.model)
        if group is None:
            group = self._new_group(spec)
        if not group.machines:
            group.fingerprint, group.block_tokens = spec.kv_fingerprint, spec.block_tokens
        if not self._free_slots:
            self._grow(2 * len(self.by_slot), self._group_room())
        slot = self._free_slots.pop()
        machine = Machine(spec, slot, group, spec.home)
        self.by_slot[slot] = self.machines[spec.machine_id] = machine
        self.names[slot] = spec.machine_id
        group.machines[spec.machine_id] = machine
        arrays.install(self.state, slot, group.index, POOL_CODE[spec.home], spec.kv_blocks, spec.max_running)
        machine.advance(MachineInput.ADMIT)
        group.count_in(machine)
        return machine

    def remove(self, machine: Machine) -> None:
        """Forget a lost machine; its requests must have been taken off before."""
        machine.advance(MachineInput.LOSE)
        arrays.leave(self.state, machine.slot)
        self.by_slot[machine.slot] = None
        self._free_slots.append(machine.slot)
        del self.machines[machine.spec.machine_id]
        del machine.group.machines[machine.spec.machine_id]
        self.borrowed.pop(machine.slot, None)
        self.aside.pop(machine.slot, None)
        self.paused.pop(machine.slot, None)
        machine.group.measure()
        self._last_incarnation[machine.spec.machine_id] = machine.spec.incarnation
        self._last_incarnation.move_to_end(machine.spec.machine_id)
        if len(self._last_incarnation) > REMEMBERED_IDS:
            self._last_incarnation.popitem(last=False)

    def drop_group_if_empty(self, group: Group) -> None:
        """Free a model's arrays when it has no machine any more."""
        if not group.machines and self.groups.get(group.model) is group:
            del self.groups[group.model]
            self._free_groups.append(group.index)

    def move(self, machine: Machine, pool: Pool) -> None:
        """Put a machine into another pool: borrowed (to MIXED) or home again."""
        machine.advance(MachineInput.BORROW if pool is Pool.MIXED else MachineInput.RETURN)
        machine.pool = pool
        arrays.move(self.state, machine.slot, POOL_CODE[pool])
        if pool is Pool.MIXED:
            self.borrowed[machine.slot] = machine
        else:
            self.borrowed.pop(machine.slot, None)

    def drain(self, machine: Machine) -> None:
        """Give a machine no new work; what runs there goes on."""
        machine.advance(MachineInput.DRAIN)
        arrays.leave(self.state, machine.slot)
        machine.group.measure()

    def undrain(self, machine: Machine) -> None:
        """Take work again."""
        machine.advance(MachineInput.UNDRAIN)
        if machine.pool is not machine.spec.home:
            machine.advance(MachineInput.BORROW)
        self._enter(machine)
        machine.group.measure()

    def pause(self, machine: Machine, now: float) -> None:
        """Give a machine no new work until `resume`; requests wait for it."""
        machine.paused_at = now
        self.paused[machine.slot] = machine
        arrays.leave(self.state, machine.slot)
        machine.group.measure()

    def resume(self, machine: Machine) -> None:
        """Give a machine work again that had paused."""
        machine.paused_at = None
        machine.given_up = False
        self.paused.pop(machine.slot, None)
        self._enter(machine)
        machine.group.measure()

    def paused_too_long(self, since: float) -> list[Machine]:
        """Stop waiting for machines that paused at `since` or before, and return them."""
        late = [m for m in self.paused.values() if m.paused_at is not None and m.paused_at <= since]
        for machine in late:
            machine.given_up = True
            del self.paused[machine.slot]
            machine.group.measure()
        return late

    def _enter(self, machine: Machine) -> None:
        if machine.takes_work:
            arrays.enter(self.state, machine.slot)

    def set_aside(self, machine: Machine, until: float) -> None:
        """Give a machine no new work until a moment has passed."""
        machine.aside_until = until
        self.aside[machine.slot] = machine
        arrays.leave(self.state, machine.slot)

    def back_from_aside(self, now: float) -> list[Machine]:
        """Let machines whose time has passed take work again, and return them."""
        back = [m for m in self.aside.values() if m.aside_until is not None and m.aside_until <= now]
        for machine in back:
            machine.aside_until = None
            del self.aside[machine.slot]
            self._enter(machine)
        return back

    def report(self, machine: Machine, event: LoadReported) -> None:
        """Believe a load report, adding back what was assigned after it."""
        machine.sequence = event.sequence
        machine.reported_at = event.at
        tokens = requests = blocks = 0
        for serial in reversed(machine.open):
            if serial <= event.assigned_through:
                break
            request = machine.open[serial]
            for hold in (request.prompt, request.token):
                if hold is not None and hold.machine is machine:
                    tokens += hold.tokens if hold.running else 0
                    blocks += hold.blocks
            requests += request.token is not None and request.token.machine is machine
        reported = (event.prompt_tokens, event.token_requests, event.kv_blocks_used)
        arrays.take_report(self.state, machine.slot, reported, (tokens, requests, blocks))

    def _new_group(self, spec: MachineSpec) -> Group:
        if not self._free_groups:
            room = self._group_room()
            self._grow(len(self.by_slot), 2 * room)
        group = Group(spec.model, self._free_groups.pop(), spec.kv_fingerprint, spec.block_tokens)
        self.groups[spec.model] = group
        return group

    def _group_room(self) -> int:
        return len(self.state.sizes) // arrays.POOLS

    def _grow(self, capacity: int, groups: int) -> None:
        old_capacity, old_groups = len(self.by_slot), self._group_room()
        self.state = arrays.grown(self.state, capacity, groups)
        new_capacity = self.state.machines.shape[1]
        self.by_slot.extend([None] * (new_capacity - old_capacity))
        self.names.extend([""] * (new_capacity - old_capacity))
        self._free_slots[:0] = range(new_capacity - 1, old_capacity - 1, -1)
        self._free_groups[:0] = range(groups - 1, old_groups - 1, -1)
