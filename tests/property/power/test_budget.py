"""Whatever happens, a budget that can be met is kept."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from splitwise.power import BudgetKeeper, Demand, Order, Role, Wishes, share_out

WATTS = st.floats(0, 10_000, allow_nan=False)
CLOSE = 1e-6


@st.composite
def demands(draw: st.DrawFn) -> list[Demand]:
    count = draw(st.integers(0, 6))
    made = []
    for index in range(count):
        floor = draw(WATTS)
        made.append(Demand(f"m{index}", floor, floor + draw(WATTS), draw(st.booleans())))
    return made


@given(WATTS, demands())
def test_shares_fit_the_budget_whenever_that_is_possible(budget: float, asked: list[Demand]) -> None:
    shares = share_out(budget, asked)
    floors = sum(demand.floor for demand in asked)
    total = sum(shares.watts.values())
    if floors <= budget:
        assert total <= budget + CLOSE
        assert shares.missing < CLOSE
    else:
        assert abs(shares.missing - (floors - budget)) < CLOSE
        assert abs(total - floors) < CLOSE
    for demand in asked:
        assert demand.floor - CLOSE <= shares.watts[demand.name] <= demand.wanted + CLOSE


@given(WATTS, demands())
def test_no_watt_is_left_while_somebody_wants_it(budget: float, asked: list[Demand]) -> None:
    shares = share_out(budget, asked)
    reduced = any(shares.watts[demand.name] < demand.wanted - CLOSE for demand in asked)
    if reduced and shares.missing == 0:
        assert sum(shares.watts.values()) >= budget - CLOSE


@given(WATTS, demands())
def test_prompt_machines_give_only_when_token_machines_cannot(budget: float, asked: list[Demand]) -> None:
    shares = share_out(budget, asked).watts
    if any(not d.first_to_give and shares[d.name] < d.wanted - CLOSE for d in asked):
        assert all(shares[d.name] <= d.floor + CLOSE for d in asked if d.first_to_give)


@given(WATTS, WATTS, demands())
def test_a_larger_budget_never_gives_less(budget: float, more: float, asked: list[Demand]) -> None:
    small, large = share_out(budget, asked).watts, share_out(budget + more, asked).watts
    assert all(large[name] >= small[name] - CLOSE for name in small)


@dataclass
class Machine:
    """A machine that carries orders out late, one after the other, and whose reports travel."""

    gpus: int
    role: Role
    enforced: float
    share: float | None = None
    serial: int = 0
    orders: deque[Order] = field(default_factory=deque)
    reports: deque[Wishes] = field(default_factory=deque)

    @property
    def wishes(self) -> Wishes:
        by_role = {role: self.gpus * (350.0 if role is Role.TOKEN else 700.0) for role in Role}
        return Wishes(self.gpus * 200.0, by_role, by_role[self.role], self.enforced, self.serial)

    def obey(self) -> None:
        if self.orders:
            order = self.orders.popleft()
            self.share, self.serial = order.share, order.serial
        if self.share is not None:
            self.enforced = max(self.gpus * 200.0, min(self.wishes.wanted, self.share))


class Cluster:
    """A keeper and its machines, which have joined: one that comes is too much for a moment."""

    def __init__(self, fleet: list[tuple[int, Role]], part: float) -> None:
        self.budget = part * sum(700.0 * gpus for gpus, _ in fleet)
        self.floors = sum(200.0 * gpus for gpus, _ in fleet)
        self.keeper = BudgetKeeper(self.budget)
        self.machines = {str(i): Machine(gpus, role, 200.0 * gpus) for i, (gpus, role) in enumerate(fleet)}
        for name, machine in self.machines.items():
            self.tell(self.keeper.changed(name, machine.role, first_to_give=machine.role is Role.TOKEN))
            self.tell(self.keeper.reported(name, machine.wishes))
        self.checks = False
        self.settle(10)
        self.checks = True

    def settle(self, rounds: int) -> None:
        for _ in range(rounds):
            for name, machine in self.machines.items():
                for what in ("obey", "report", "arrive", "arrive"):
                    self.step(name, what, machine.role)

    def tell(self, orders: list[Order]) -> None:
        for order in orders:
            if order.machine_id in self.machines:
                self.machines[order.machine_id].orders.append(order)

    def step(self, name: str, what: str, role: Role) -> None:
        machine = self.machines[name]
        if what == "role":
            machine.role = role
            self.tell(self.keeper.changed(name, role, first_to_give=role is Role.TOKEN))
        elif what == "obey":
            machine.obey()
        elif what == "report":
            machine.reports.append(machine.wishes)
        elif what == "arrive" and machine.reports:
            self.tell(self.keeper.reported(name, machine.reports.popleft()))
        elif what == "leave":
            del self.machines[name]
            self.tell(self.keeper.left(name))
        self.check()

    def check(self) -> None:
        if self.checks and self.floors <= self.budget:
            assert sum(machine.enforced for machine in self.machines.values()) <= self.budget + CLOSE


@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from(list(Role))), min_size=1, max_size=5),
    st.floats(0.2, 1.2),
    st.lists(
        st.tuples(
            st.integers(0, 4),
            st.sampled_from(["obey", "report", "arrive", "role", "leave"]),
            st.sampled_from(list(Role)),
        ),
        max_size=60,
    ),
)
def test_limits_in_force_never_exceed_the_budget(
    fleet: list[tuple[int, Role]], part: float, steps: list[tuple[int, str, Role]]
) -> None:
    """Roles change, orders are carried out late, reports are old, machines vanish: in any order."""
    cluster = Cluster(fleet, part)
    for index, what, role in steps:
        if str(index) in cluster.machines:
            cluster.step(str(index), what, role)
    # Left alone, everybody ends with what the rule says, to the watt.
    cluster.settle(20 + 4 * len(steps))
    asked = [
        Demand(name, m.wishes.floor, m.wishes.wanted, m.role is Role.TOKEN)
        for name, m in cluster.machines.items()
    ]
    final = share_out(cluster.budget, asked).watts
    for name, machine in cluster.machines.items():
        assert abs(machine.enforced - final[name]) <= 1.0 + CLOSE, (name, final, machine)
