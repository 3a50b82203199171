"""What the router tells machines about their power."""

from __future__ import annotations

import time
from typing import Any

import pytest
from structlog.testing import capture_logs

from services.router.power import PowerShares, role_of
from splitwise.power import Role
from splitwise.rpc.v1.common_pb2 import POOL_MIXED, POOL_PROMPT, POOL_TOKEN, LoadReport, PowerReport
from splitwise.rpc.v1.machine_pb2 import PowerOrder
from splitwise.scheduling.events import Pool, Tick
from tests.unit.router.test_dispatcher import Cluster


class Told:
    """A router's shares, and every order that it sent."""

    def __init__(self, budget: float | None = None) -> None:
        self.orders: list[tuple[str, PowerOrder]] = []
        self.shares = PowerShares(budget, lambda name, order: self.orders.append((name, order)))

    def last(self, name: str) -> PowerOrder:
        return [order for machine, order in self.orders if machine == name][-1]

    def report(self, name: str, enforced: float, wanted: float, draw: float = 0.0) -> None:
        """Eight H100s: 5,600 W, 2,800 W as a token machine. They obey their last order."""
        power = PowerReport(
            gpus=8,
            floor_watts=1600,
            prompt_watts=5600,
            token_watts=2800,
            mixed_watts=5600,
            borrowed_watts=5600,
            wanted_watts=wanted,
            requested_watts=enforced,
            enforced_watts=enforced,
            draw_watts=draw,
            order_serial=self.last(name).serial,
        )
        self.shares.reported(name, LoadReport(power=power))


def test_pools_are_told_without_a_budget() -> None:
    told = Told()
    told.shares.joined("t", Pool.TOKEN)
    told.report("t", 2800, 2800)
    told.shares.moved("t", Pool.MIXED)
    told.shares.moved("t", Pool.TOKEN)
    pools = [(order.pool, order.share_watts) for _, order in told.orders]
    assert pools == [(POOL_TOKEN, 0), (POOL_MIXED, 0), (POOL_TOKEN, 0)]
    assert told.shares.share("t") == (0.0, "")


def test_a_move_of_a_machine_that_is_gone_is_nothing() -> None:
    told = Told(8400)
    told.shares.moved("t", Pool.MIXED)
    told.shares.reported("t", LoadReport())
    assert not told.orders


def test_the_budget_is_shared_as_machines_report() -> None:
    told = Told(8400)
    told.shares.joined("p", Pool.PROMPT)
    told.shares.joined("t", Pool.TOKEN)
    assert [order.share_watts for _, order in told.orders] == [0, 0]
    told.report("p", 5600, 5600, draw=5000)
    told.report("t", 2800, 2800, draw=2000)
    assert told.last("p") == PowerOrder(pool=POOL_PROMPT, share_watts=5600, reason="within-budget", serial=1)
    assert told.last("t").share_watts == 2800
    told.shares.moved("t", Pool.MIXED)
    assert (told.last("p").share_watts, told.last("t").share_watts) == (4200, 2800)
    assert told.last("t").pool == POOL_MIXED  # it is told at once, whatever its share
    told.report("p", 4200, 5600)
    assert (told.last("t").share_watts, told.last("t").reason) == (4200, "reduced")
    assert told.last("t").pool == POOL_MIXED
    described = told.shares.describe()
    assert (described.budget_watts, described.enforced_watts, described.draw_watts) == (8400, 7000, 2000)
    assert (described.missing_watts, described.unmanaged) == (0, 0)


def test_a_budget_that_cannot_be_met_is_said_once() -> None:
    told = Told(3000)
    told.shares.joined("p", Pool.PROMPT)
    told.shares.joined("t", Pool.TOKEN)
    with capture_logs() as logs:
        told.report("p", 5600, 5600)
        told.report("t", 2800, 2800)
        told.report("t", 1600, 2800)
        assert told.shares.describe().missing_watts == 200
        told.shares.left("t")
    assert [line["event"] for line in logs] == ["power.budget_unmet", "power.budget_met"]
    assert logs[0]["missing_watts"] == 200
    assert "drain machines" in logs[0]["remedy"]


def test_a_budget_is_set_changed_and_lifted_while_it_runs() -> None:
    told = Told()
    told.shares.joined("t", Pool.TOKEN)
    told.report("t", 2800, 2800)
    told.shares.use(2000)
    assert told.last("t") == PowerOrder(pool=POOL_TOKEN, share_watts=2000, reason="reduced", serial=1)
    told.shares.use(2000)
    assert len(told.orders) == 2
    told.shares.use(None)
    assert told.last("t") == PowerOrder(pool=POOL_TOKEN, serial=2)
    assert told.shares.describe().budget_watts == 0


def test_machines_without_an_agent_are_counted() -> None:
    told = Told(3000)
    told.shares.joined("x", Pool.TOKEN)
    told.shares.reported("x", LoadReport())
    assert told.shares.describe().unmanaged == 1
    told.shares.reported("x", LoadReport(power=PowerReport(problem="no driver")))
    assert told.shares.describe().unmanaged == 1


def test_a_machine_that_comes_again_begins_anew() -> None:
    told = Told(8400)
    told.shares.joined("t", Pool.TOKEN)
    told.report("t", 2800, 2800)
    told.shares.joined("t", Pool.TOKEN)
    assert told.last("t").share_watts == 0
    assert told.shares.share("t") == (0.0, "")


@pytest.mark.parametrize(
    ("home", "pool", "role"),
    [
        (Pool.PROMPT, Pool.PROMPT, Role.PROMPT),
        (Pool.TOKEN, Pool.TOKEN, Role.TOKEN),
        (Pool.PROMPT, Pool.MIXED, Role.MIXED),
        (Pool.TOKEN, Pool.MIXED, Role.BORROWED),
        (Pool.TOKEN, Pool.PROMPT, Role.PROMPT),
        (Pool.PROMPT, Pool.TOKEN, Role.TOKEN),
    ],
)
def test_roles(home: Pool, pool: Pool, role: Role) -> None:
    assert role_of(home, pool) is role


def test_the_dispatcher_tells_machines_where_they_serve() -> None:
    cluster = Cluster("p1 t1 t2", queue_tokens=100)
    links = cluster.links
    assert {name: [order.pool for order in link.power] for name, link in links.items()} == {
        "p1": [POOL_PROMPT],
        "t1": [POOL_TOKEN],
        "t2": [POOL_TOKEN],
    }
    sessions: list[Any] = [cluster.submit(prompt=90, max_tokens=3) for _ in range(2)]
    borrowed = [name for name in ("t1", "t2") if links[name].power[-1].pool == POOL_MIXED]
    assert len(borrowed) == 1
    assert links["p1"].power[-1].pool == POOL_PROMPT
    for session in sessions:
        cluster.dispatcher.leave(session)
    cluster.dispatcher.feed(Tick(time.monotonic() + 60))
    assert links[borrowed[0]].power[-1].pool == POOL_TOKEN
