"""Cluster designs: which machine types serve the two phases, and how many fit a budget.

The six designs of the Splitwise paper (section VI) by name, and any other pair of machine
types of the catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from math import floor
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitwise.perf.catalog import Catalog, Hardware

TOLERANCE = 1e-9  # of amounts: 40 machines at 44 fit 1760 whatever the rounding


class Budget(Enum):
    """What clusters have in common when they are compared."""

    POWER = "power"  # provisioned power, in the catalogue's `power_units`
    COST = "cost"  # dollars per hour
    MACHINES = "machines"


@dataclass(frozen=True, slots=True)
class Design:
    """Machine types of the prompt and the token pool; `token` is None for a cluster that is not split."""

    name: str
    prompt: str
    token: str | None = None


@dataclass(frozen=True, slots=True)
class Size:
    """How many machines of each pool."""

    prompt: int
    token: int = 0

    @property
    def machines(self) -> int:
        """Both pools together."""
        return self.prompt + self.token


@dataclass(frozen=True)
class Bounds:
    """Which clusters may be proposed: machines of each pool, and totals that must not be exceeded.

    `limits` maps budgets to amounts, such as the power that a building has.
    """

    most: Size
    least: Size = Size(1, 1)
    limits: Mapping[Budget, float] = field(default_factory=dict)

    def allow(self, design: Design, size: Size, catalog: Catalog) -> bool:
        """Say whether a cluster keeps to them."""
        return self.ranges(design, size) and all(
            total(design, size, catalog, budget) <= amount * (1 + TOLERANCE)
            for budget, amount in self.limits.items()
        )

    def ranges(self, design: Design, size: Size) -> bool:
        """Say whether the numbers of machines lie within the ranges."""
        tokens = design.token is None or self.least.token <= size.token <= self.most.token
        return self.least.prompt <= size.prompt <= self.most.prompt and tokens

    def largest(self, design: Design, catalog: Catalog) -> list[Size]:
        """Return the clusters that allow no more token machines (for unsplit designs: the largest).

        Raises ConfigError when not even the smallest is allowed.
        """
        first = range(self.least.prompt, self.most.prompt + 1)
        if design.token is None:
            sizes = [Size(p) for p in first if self.allow(design, Size(p), catalog)][-1:]
        else:
            tokens = range(self.most.token, self.least.token - 1, -1)
            columns = (next((t for t in tokens if self.allow(design, Size(p, t), catalog)), 0) for p in first)
            sizes = [Size(p, t) for p, t in zip(first, columns, strict=True) if t]
        if not sizes:
            told = " and ".join(f"{amount:g} of {budget.value}" for budget, amount in self.limits.items())
            pools = f"{self.least.prompt} prompt"
            if design.token is not None:
                pools += f" and {self.least.token} token"
            raise ConfigError(
                f"{design.name}: {told} does not pay for the smallest cluster that may be proposed, "
                f"{pools} machines"
            )
        return sizes


PAPER_DESIGNS = {
    design.name: design
    for design in (
        Design("Baseline-A100", "a100-80gb"),
        Design("Baseline-H100", "h100-80gb"),
        Design("Splitwise-AA", "a100-80gb", "a100-80gb"),
        Design("Splitwise-HH", "h100-80gb", "h100-80gb"),
        Design("Splitwise-HA", "h100-80gb", "a100-80gb"),
        Design("Splitwise-HHcap", "h100-80gb", "h100-80gb-pcap"),
    )
}


def price(hardware: Hardware, budget: Budget) -> float:
    """Return what one machine takes of a budget."""
    if budget is Budget.POWER:
        return hardware.power_units
    return hardware.cost_per_hour if budget is Budget.COST else 1.0


def total(design: Design, size: Size, catalog: Catalog, budget: Budget) -> float:
    """Return what a cluster takes of a budget."""
    both = size.prompt * price(catalog.machine(design.prompt), budget)
    if design.token is not None:
        both += size.token * price(catalog.machine(design.token), budget)
    return both


def sizes_within(design: Design, catalog: Catalog, budget: Budget, amount: float) -> list[Size]:
    """Return the largest clusters of a design within a budget, one per number of prompt machines.

    A split design gives every prompt count with the most token machines that the rest pays
    for, both at least 1. Raises ConfigError when not even the smallest cluster fits.
    """
    tolerance = TOLERANCE * max(amount, 1.0)
    first = price(catalog.machine(design.prompt), budget)
    most = floor((amount + tolerance) / first)
    if design.token is None:
        sizes = [Size(most)] if most >= 1 else []
    else:
        second = price(catalog.machine(design.token), budget)
        pairs = ((p, floor((amount + tolerance - p * first) / second)) for p in range(1, most + 1))
        sizes = [Size(p, t) for p, t in pairs if t >= 1]
    if not sizes:
        raise ConfigError(
            f"{design.name}: {amount:g} of {budget.value} does not pay for one machine per pool"
        )
    return sizes
