"""The cluster's power: machines are told their pool, and their share of the budget if there is one.

What is decided is `splitwise.power.BudgetKeeper`'s; this turns pool moves and load reports
into its events, and its orders into commands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.power import BudgetKeeper, Role, Wishes
from splitwise.rpc.v1.common_pb2 import POOL_MIXED, POOL_PROMPT, POOL_TOKEN
from splitwise.rpc.v1.machine_pb2 import PowerOrder
from splitwise.rpc.v1.router_pb2 import PowerBudget
from splitwise.scheduling.events import Pool
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from splitwise.power import Order
    from splitwise.rpc.v1.common_pb2 import LoadReport, PowerReport

POOLS = {Pool.PROMPT: POOL_PROMPT, Pool.TOKEN: POOL_TOKEN, Pool.MIXED: POOL_MIXED}


class PowerShares:
    """One router's view of its machines' power. `send(machine_id, order)` tells a machine."""

    def __init__(self, budget: float | None, send: Callable[[str, PowerOrder], None]) -> None:
        self._keeper = BudgetKeeper(budget)
        self._send = send
        self._homes: dict[str, Pool] = {}
        self._told: dict[str, PowerOrder] = {}
        self._reports: dict[str, PowerReport] = {}
        self._short = False

    def use(self, budget: float | None) -> None:
        """Share this budget out from now on; None: there is none."""
        if budget != self._keeper.budget:
            self._carry_out(self._keeper.use(budget))

    def joined(self, machine_id: str, home: Pool) -> None:
        """A machine joined; it serves in its home pool."""
        self.left(machine_id)
        self._homes[machine_id] = home
        self.moved(machine_id, home)

    def moved(self, machine_id: str, pool: Pool) -> None:
        """A machine serves in another pool from now on."""
        if machine_id not in self._homes:
            return
        told = PowerOrder()
        told.CopyFrom(self._told.get(machine_id, PowerOrder()))
        told.pool = POOLS[pool]
        self._told[machine_id] = told
        role = role_of(self._homes[machine_id], pool)
        orders = self._keeper.changed(machine_id, role, first_to_give=pool is Pool.TOKEN)
        if all(order.machine_id != machine_id for order in orders):
            self._send(machine_id, told)
        self._carry_out(orders)

    def reported(self, machine_id: str, load: LoadReport) -> None:
        """A machine reported its load, and with it what its GPUs may and do draw."""
        if machine_id not in self._homes:
            return
        if load.HasField("power"):
            self._reports[machine_id] = load.power
        else:
            self._reports.pop(machine_id, None)
        self._carry_out(self._keeper.reported(machine_id, wishes(load)))

    def left(self, machine_id: str) -> None:
        """A machine is lost."""
        for known in (self._homes, self._told, self._reports):
            known.pop(machine_id, None)
        self._carry_out(self._keeper.left(machine_id))

    def share(self, machine_id: str) -> tuple[float, str]:
        """Return a machine's share in watts (0: there is no budget), and why it is that."""
        return self._keeper.share(machine_id)

    def describe(self) -> PowerBudget:
        """Return the cluster's power."""
        reports = list(self._reports.values())
        return PowerBudget(
            budget_watts=self._keeper.budget or 0.0,
            requested_watts=sum(report.requested_watts for report in reports),
            enforced_watts=sum(report.enforced_watts for report in reports),
            draw_watts=sum(report.draw_watts for report in reports),
            missing_watts=self._keeper.missing,
            unmanaged=self._keeper.unmanaged,
        )

    def _carry_out(self, orders: Iterable[Order]) -> None:
        for order in orders:
            told = PowerOrder(
                pool=self._told[order.machine_id].pool,
                share_watts=order.share,
                reason=order.reason,
                serial=order.serial,
            )
            self._told[order.machine_id] = told
            self._send(order.machine_id, told)
        short = self._keeper.missing > 0
        if short and not self._short:
            get_logger().warning(
                "power.budget_unmet",
                missing_watts=round(self._keeper.missing, 1),
                remedy="raise router.power_budget_watts or drain machines: GPUs cannot be set lower",
            )
        elif self._short and not short:
            get_logger().info("power.budget_met")
        self._short = short


def role_of(home: Pool, pool: Pool) -> Role:
    """Return what a machine of this home does in this pool."""
    if pool is Pool.MIXED:
        return Role.BORROWED if home is Pool.TOKEN else Role.MIXED
    return Role.PROMPT if pool is Pool.PROMPT else Role.TOKEN


def wishes(load: LoadReport) -> Wishes | None:
    """Return what a load report says about power; None when nobody manages the machine's."""
    power = load.power
    if not power.gpus:
        return None
    by_role = {
        Role.PROMPT: power.prompt_watts,
        Role.TOKEN: power.token_watts,
        Role.MIXED: power.mixed_watts,
        Role.BORROWED: power.borrowed_watts,
    }
    return Wishes(power.floor_watts, by_role, power.wanted_watts, power.enforced_watts, power.order_serial)
