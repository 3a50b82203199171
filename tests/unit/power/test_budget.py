"""Sharing a power budget out."""

from __future__ import annotations

from splitwise.power import BudgetKeeper, Demand, Order, Role, Wishes, share_out
from splitwise.power import budget as why

ROLES = {Role.PROMPT: 5600.0, Role.TOKEN: 2800.0, Role.MIXED: 5600.0, Role.BORROWED: 5600.0}


def demand(name: str, wanted: float, *, token: bool, floor: float = 1600) -> Demand:
    return Demand(name, floor, wanted, first_to_give=token)


def machine(enforced: float, wanted: float, serial: int = 99) -> Wishes:
    """Eight H100s: 5,600 W, 2,800 W as a token machine, never below 1,600 W. It obeys all orders."""
    return Wishes(1600, ROLES, wanted, enforced, serial)


PAIR = [demand("p", 5600, token=False), demand("t", 2800, token=True)]


def test_there_is_enough() -> None:
    shares = share_out(9000, PAIR)
    assert shares.watts == {"p": 5600, "t": 2800}
    assert shares.missing == 0


def test_token_machines_give_first() -> None:
    assert share_out(8000, PAIR).watts == {"p": 5600, "t": 2400}
    assert share_out(7200, PAIR).watts == {"p": 5600, "t": 1600}
    assert share_out(5000, PAIR).watts == {"p": 3400, "t": 1600}


def test_the_same_part_of_what_each_can_give() -> None:
    demands = [demand("t1", 2800, token=True), demand("t2", 2200, token=True)]
    assert share_out(4100, demands).watts == {"t1": 2200, "t2": 1900}


def test_a_budget_below_the_floors() -> None:
    shares = share_out(3000, PAIR)
    assert shares.watts == {"p": 1600, "t": 1600}
    assert shares.missing == 200


def test_nobody() -> None:
    assert share_out(1000, []).watts == {}


def keeper(budget: float | None = 8400) -> BudgetKeeper:
    """A prompt and a token machine that have what they want."""
    made = BudgetKeeper(budget)
    made.changed("p", Role.PROMPT, first_to_give=False)
    made.changed("t", Role.TOKEN, first_to_give=True)
    made.reported("p", machine(5600, 5600))
    made.reported("t", machine(2800, 2800))
    return made


def test_without_a_budget_nothing_is_ordered() -> None:
    made = keeper(None)
    assert made.changed("t", Role.BORROWED, first_to_give=False) == []
    assert made.share("t") == (0.0, "")


def test_shares_are_ordered_as_machines_report() -> None:
    made = BudgetKeeper(8400)
    assert made.changed("p", Role.PROMPT, first_to_give=False) == []
    assert made.unmanaged == 1
    assert made.reported("p", machine(5600, 5600)) == [Order("p", 5600, why.WITHIN)]
    assert made.reported("p", machine(5600, 5600)) == []
    assert made.unmanaged == 0
    assert made.share("p") == (5600, why.WITHIN)


def test_a_borrowed_machine_waits_for_what_others_give_up() -> None:
    made = keeper()
    # With 8,400 W for two machines that both want 5,600 W, each has to give.
    orders = made.changed("t", Role.BORROWED, first_to_give=False)
    assert orders == [Order("p", 4200, why.REDUCED), Order("t", 2800, why.WAITING)]
    assert made.reported("p", machine(5600, 5600)) == []  # not yet
    assert made.reported("p", machine(4200, 5600)) == [Order("t", 4200, why.REDUCED)]


def test_what_was_given_up_is_taken_back_later() -> None:
    made = keeper()
    made.changed("t", Role.BORROWED, first_to_give=False)
    made.reported("p", machine(4200, 5600))
    made.reported("t", machine(4200, 5600))
    # It is a token machine again, and still wants what it had until its agent caps it.
    assert made.changed("t", Role.TOKEN, first_to_give=True) == [
        Order("p", 4200, why.WAITING),
        Order("t", 2800, why.REDUCED),
    ]
    assert made.reported("t", machine(2800, 2800)) == [
        Order("p", 5600, why.WITHIN),
        Order("t", 2800, why.WITHIN),
    ]


def test_an_order_that_may_still_be_carried_out_counts() -> None:
    made = BudgetKeeper(700)
    made.changed("a", Role.PROMPT, first_to_give=False)
    made.changed("b", Role.PROMPT, first_to_give=False)
    roles = {Role.PROMPT: 700.0, Role.TOKEN: 350.0}
    made.reported("b", Wishes(200, roles, 700, 200))
    (raised,) = [
        order for order in made.reported("a", Wishes(200, roles, 700, 200)) if order.machine_id == "a"
    ]
    assert raised.share == 200  # b has been promised the rest
    made.reported("b", Wishes(200, roles, 700, 350, 2))
    assert made.share("a")[0] == 350
    # It is to give that back again, but may not even have heard that it had it.
    (lowered,) = [one for one in made.changed("a", Role.TOKEN, first_to_give=True) if one.machine_id == "a"]
    assert made.share("b") == (350, why.WAITING)
    made.reported("a", Wishes(200, roles, 350, 200, lowered.serial - 1))
    assert made.share("b") == (350, why.WAITING)
    made.reported("a", Wishes(200, roles, 350, 200, lowered.serial))
    assert made.share("b") == (500, why.REDUCED)


def test_a_machine_that_leaves_makes_room() -> None:
    made = keeper(7000)
    assert made.share("t") == (1600, why.AT_FLOOR)
    assert made.share("p") == (5400, why.REDUCED)
    assert made.left("t") == [Order("p", 5600, why.WITHIN)]
    assert made.left("t") == []


def test_a_budget_that_cannot_be_met_is_said() -> None:
    made = keeper(3000)
    assert made.missing == 200
    assert made.share("p") == (1600, why.AT_FLOOR)
    made.left("t")
    assert made.missing == 0


def test_a_machine_whose_limits_cannot_be_set_counts_with_what_it_has() -> None:
    made = keeper(8400)
    fixed = Wishes(5600, dict.fromkeys(Role, 5600.0), 5600, 5600, 99)
    made.reported("t", fixed)  # its agent may only report
    assert made.share("t") == (5600, why.WITHIN)
    assert made.share("p") == (2800, why.REDUCED)
    assert made.missing == 0


def test_a_machine_without_a_power_agent_is_outside() -> None:
    made = keeper()
    made.changed("x", Role.TOKEN, first_to_give=True)
    assert made.reported("x", None) == []
    assert made.unmanaged == 1
    assert made.share("x") == (0.0, "")


def test_the_budget_changes_while_it_runs() -> None:
    made = keeper(None)
    assert made.use(8000) == [Order("p", 5600, why.WITHIN), Order("t", 2400, why.REDUCED)]
    made.reported("t", machine(2400, 2800))
    assert made.use(8400) == [Order("t", 2800, why.WITHIN)]
    assert made.use(3000) == [Order("p", 1600, why.AT_FLOOR), Order("t", 1600, why.AT_FLOOR)]
    assert made.missing == 200
    assert made.use(None) == [Order("p", 0, ""), Order("t", 0, "")]  # 0 watts: no share
    assert made.missing == 0
    assert made.use(None) == []


def test_a_share_that_was_lifted_counts_until_it_is_given_back() -> None:
    made = keeper(7000)
    made.use(None)
    made.reported("p", machine(5600, 5600, serial=0))  # it has not heard of that yet
    made.changed("t", Role.BORROWED, first_to_give=False)
    made.use(10_000)
    # t was last seen with 1,600 W and may have all it wants by now: this order takes, and waits for none.
    assert made.share("t") == (5000, why.REDUCED)
    assert made.share("p") == (5000, why.REDUCED)
