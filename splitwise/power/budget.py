"""A power budget, shared out: token machines give first, down to their floor, then the others.

`share_out` is the rule. `BudgetKeeper` keeps a whole cluster within its budget while machines
come, go and change pools: a share is raised only by what others have been *seen* to give up,
since a cap is lowered later than it is ordered. So the limits that are in force never add up
to more than the budget, once they did not, as long as the budget can be met at all.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.power.caps import Role

WITHIN = "within-budget"  # it has what its role asks for
REDUCED = "reduced"  # the budget is short
AT_FLOOR = "at-floor"  # the budget is short, and the device takes no less
WAITING = "waits-for-others"  # others have to be seen to give up what it gets


@dataclass(frozen=True, slots=True)
class Demand:
    """What one machine (or one GPU) wants, and the least that it can be set to, in watts."""

    name: str
    floor: float
    wanted: float
    first_to_give: bool  # a token machine


@dataclass(frozen=True, slots=True)
class Shares:
    """Watts by name. `missing`: by how much the floors alone are above the budget."""

    watts: dict[str, float]
    missing: float = 0.0


def share_out(budget: float, demands: Sequence[Demand]) -> Shares:
    """Divide `budget` watts: each gets what it wants, or all of a kind give in proportion.

    A machine gives up part of what lies between its floor and its wish. Nobody goes below its
    floor or above its wish; a larger budget never gives anybody less.
    """
    watts = {demand.name: max(demand.wanted, demand.floor) for demand in demands}
    short = sum(watts.values()) - budget
    for kind in (True, False):
        givers = [demand for demand in demands if demand.first_to_give is kind]
        room = sum(watts[demand.name] - demand.floor for demand in givers)
        if short <= 0 or room <= 0:
            continue
        part = min(1.0, short / room)
        for demand in givers:
            above = watts[demand.name] - demand.floor
            watts[demand.name] = demand.floor + (1.0 - part) * above
        short -= min(short, room)
    return Shares(watts, max(0.0, short))


@dataclass(frozen=True, slots=True)
class Wishes:
    """What a machine says about its GPUs together, in watts.

    `floor` is the least they can be set to, `by_role` what they take in each role when there
    is no budget, `wanted` the same for what the machine does now, `enforced` the limits that
    are in force, and `serial` the newest order that they obey (0: none yet).
    """

    floor: float
    by_role: dict[Role, float]
    wanted: float
    enforced: float
    serial: int = 0


@dataclass(frozen=True, slots=True)
class Order:
    """A machine's share of the budget from now on, in watts of all its GPUs, and why.

    `serial` grows with each order; a machine reports the newest one that it obeys.
    """

    machine_id: str
    share: float
    reason: str
    serial: int = field(default=0, compare=False)


@dataclass(slots=True)
class _Machine:
    role: Role
    first_to_give: bool
    wishes: Wishes | None = None
    ordered: float | None = None
    reason: str = ""
    # Orders that may be in force now or later: serial to watts, from the last one that is known
    # to be obeyed. Of these a later one that is higher replaces all before it.
    open_orders: dict[int, float] = field(default_factory=dict)

    @property
    def committed(self) -> float:
        """The most that it may have now: what was last seen, or what was ordered since."""
        enforced = 0.0 if self.wishes is None else self.wishes.enforced
        return max([enforced, self.ordered or 0.0, *self.open_orders.values()])

    def obeys(self, wishes: Wishes | None) -> None:
        """Take its report: orders before the one that it obeys are over."""
        self.wishes = wishes
        serial = 0 if wishes is None else wishes.serial
        self.open_orders = {s: watts for s, watts in self.open_orders.items() if s >= serial}

    def send(self, serial: int) -> None:
        """Note that `ordered` is sent as this order; None is all that the machine may ever want."""
        most = max(self.wishes.by_role.values(), default=0.0) if self.wishes is not None else 0.0
        watts = most if self.ordered is None else self.ordered
        self.open_orders = {s: w for s, w in self.open_orders.items() if w > watts}
        self.open_orders[serial] = watts


@dataclass(slots=True)
class BudgetKeeper:
    """The shares of all machines of one router. `budget` watts; None: there is none."""

    budget: float | None
    missing: float = 0.0
    _serial: int = 0
    _machines: dict[str, _Machine] = field(default_factory=dict)

    def changed(self, machine_id: str, role: Role, *, first_to_give: bool) -> list[Order]:
        """A machine joined, or does something else now."""
        known = self._machines.setdefault(machine_id, _Machine(role, first_to_give))
        known.role, known.first_to_give = role, first_to_give
        return self._orders()

    def reported(self, machine_id: str, wishes: Wishes | None) -> list[Order]:
        """A machine said what its GPUs want and have; None: their power is not managed."""
        known = self._machines.get(machine_id)
        if known is None or known.wishes == wishes:
            return []
        known.obeys(wishes)
        return self._orders()

    def left(self, machine_id: str) -> list[Order]:
        """A machine is gone; its GPUs have nothing to do."""
        return self._orders() if self._machines.pop(machine_id, None) is not None else []

    def use(self, budget: float | None) -> list[Order]:
        """Another budget counts from now on; without one, shares are lifted (0 watts)."""
        self.budget = budget
        if budget is not None:
            return self._orders()
        self.missing = 0.0
        had = [name for name, one in sorted(self._machines.items()) if one.ordered is not None]
        for name in had:
            self._machines[name].ordered, self._machines[name].reason = None, ""
        return [self._order(name, self._machines[name]) for name in had]

    def share(self, machine_id: str) -> tuple[float, str]:
        """Return a machine's share in watts (0: none) and why it is that."""
        known = self._machines.get(machine_id)
        return (0.0, "") if known is None or known.ordered is None else (known.ordered, known.reason)

    @property
    def unmanaged(self) -> int:
        """Machines whose power nobody can limit: they are outside the budget."""
        return sum(machine.wishes is None for machine in self._machines.values())

    def _demand(self, name: str, machine: _Machine, wishes: Wishes) -> Demand:
        # What the machine still has from its last role counts until it has given it back.
        wanted = max(wishes.by_role.get(machine.role, wishes.wanted), wishes.wanted)
        return Demand(name, wishes.floor, wanted, machine.first_to_give)

    def _orders(self) -> list[Order]:
        """Lower at once; raise by what is free beside all that is in force or ordered."""
        if self.budget is None:
            return []
        managed = {name: one for name, one in sorted(self._machines.items()) if one.wishes is not None}
        demands = [self._demand(name, one, one.wishes) for name, one in managed.items() if one.wishes]
        shares = share_out(self.budget, demands)
        self.missing = shares.missing
        before = {name: (machine.ordered, machine.reason) for name, machine in managed.items()}
        for demand in demands:
            machine, share = managed[demand.name], _whole(shares.watts[demand.name], demand)
            limit = max(machine.committed, demand.floor) if machine.ordered is None else machine.ordered
            machine.ordered = min(share, limit)
        free = self.budget - sum(machine.committed for machine in managed.values())
        for demand in sorted(demands, key=lambda one: one.first_to_give):  # prompts are raised first
            machine, share = managed[demand.name], _whole(shares.watts[demand.name], demand)
            committed = machine.committed
            reach = _whole(min(share, committed + max(0.0, free)), demand)
            machine.ordered = max(machine.ordered or 0.0, reach)
            free -= machine.committed - committed
            machine.reason = _reason(machine.ordered, share, demand)
        return [
            self._order(name, machine)
            for name, machine in managed.items()
            if (machine.ordered, machine.reason) != before[name]
        ]

    def _order(self, name: str, machine: _Machine) -> Order:
        self._serial += 1
        machine.send(self._serial)
        return Order(name, machine.ordered or 0.0, machine.reason, self._serial)


def _whole(watts: float, demand: Demand) -> float:
    """Round down to whole watts, but for a wish or a floor, so that shares do not tremble."""
    return watts if watts >= demand.wanted else max(demand.floor, float(math.floor(watts)))


def _reason(ordered: float, share: float, demand: Demand) -> str:
    if ordered < share:
        return WAITING
    if share >= demand.wanted:
        return WITHIN
    return REDUCED if share > demand.floor else AT_FLOOR
