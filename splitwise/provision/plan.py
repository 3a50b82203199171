"""The YAML file of ``splitwise provision``: a workload, SLOs, prices and limits, and what is asked.

The command line's options have the same names and go before the file's values. Unknown
keys, designs and machine types are refused with the nearest known name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from splitwise.config.nearest import explain, nearest
from splitwise.errors import ConfigError
from splitwise.perf.catalog import extended, load_catalog, shipped
from splitwise.perf.model import PerformanceModelError
from splitwise.provision.designs import Bounds, Budget, Size, price
from splitwise.provision.probe import Problem
from splitwise.provision.throughput import Load
from splitwise.provision.workloads import choose, read_design, with_caps
from splitwise.provision.workloads import workload as sizes_of
from splitwise.sim.config import (
    MachinesPart,
    SimulationConfig,
    TracePart,
    reference_row,
    scheduler_of,
)
from splitwise.sim.run import Mode
from splitwise.sim.slo import TABLE_VI
from splitwise.workload.synthesize import Arrivals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from splitwise.perf.catalog import Catalog
    from splitwise.provision.designs import Design

EXAMPLE = """\
workload: azure-code          # or azure-conv, or a trace file: its sizes are drawn
arrivals: poisson             # gamma: as bursty as the file; replay: the file's own gaps
rate: 70                      # requests/s to serve; or budget: 1760, or budget: 40xh100-80gb
by: cost                      # cost, power or machines: what is minimized, or what the budget is of
model: llama2-70b
slo:                          # slowdown against the request alone on slo_reference
  ttft: {50: 2, 90: 3, 99: 6}
  tbt: {50: 1.25, 90: 1.5, 99: 5}
  e2e: {50: 1.25, 90: 1.5, 99: 5}
slo_reference: a100-80gb
designs:                      # names, and own ones; without this key: the paper's six
  - Baseline-H100
  - Splitwise-HH
  - mine: {prompt: h100-80gb, token: my-a100}
  - capped: {prompt: h100-80gb, token: h100-80gb, token_cap: 0.6}
hardware:                     # own machine types; or catalog: FILE
  my-a100: {base: a100-80gb, gpus: 8}
prices: {my-a100: 12.5, h100-80gb: 38}   # dollars per machine and hour
limits: {power: 1760}         # no cluster above this; also cost, machines
caps: []                      # GPU power caps of token machines to try, such as [0.5, 0.75, 1]
search: {prompt: [1, 40], token: [1, 40], step: 1}   # numbers of machines; step of the rate
duration_s: 120               # trace per simulation; optima are confirmed on twice that
warmup_s: 0
seeds: 1
simulation: {}                # further settings of splitwise simulate, such as report_s: 0.1
"""
_COUNT = re.compile(r"(\d+)\s*[xX]\s*(\S+)")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Range = Annotated[tuple[int, int], Field(description="smallest and largest number")]
OWN = (
    "model",
    "machines",
    "trace",
    "mode",
    "seeds",
    "warmup_s",
    "until_s",
    "slo",
    "slo_reference",
    "catalog",
)


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class SearchPart(_Part):
    """Numbers of machines that are considered, and the resolution of a rate that is searched."""

    prompt: Range = (1, 40)
    token: Range = (1, 40)
    step: Positive = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> SearchPart:
        for name, (low, high) in (("prompt", self.prompt), ("token", self.token)):
            if not 1 <= low <= high:
                raise ValueError(f"{name}: [{low}, {high}]: must be two numbers from 1 up, smaller one first")
        return self


class Plan(_Part):
    """One question of an operator; `EXAMPLE` explains every key."""

    workload: str
    arrivals: Arrivals = Arrivals.POISSON
    rate: Positive | None = None
    budget: Positive | str | None = None
    by: Budget = Budget.COST
    model: str = "llama2-70b"
    mode: Mode = Mode.FAITHFUL
    slo: dict[str, dict[int, Positive]] = Field(default_factory=dict)
    slo_reference: str = "a100-80gb"
    designs: list[str | dict[str, dict[str, Any]]] = Field(default_factory=list)
    hardware: dict[str, dict[str, Any]] = Field(default_factory=dict)
    models: dict[str, dict[str, Any]] = Field(default_factory=dict)
    fits: list[str] = Field(default_factory=list)
    catalog: str | None = None
    prices: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = Field(default_factory=dict)
    limits: dict[Budget, Positive] = Field(default_factory=dict)
    caps: list[float] = Field(default_factory=list)
    search: SearchPart = SearchPart()
    duration_s: Positive = 120.0
    warmup_s: Annotated[float, Field(ge=0)] = 0.0
    seeds: Annotated[int, Field(ge=1)] = 1
    simulation: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        if (self.rate is None) == (self.budget is None):
            raise ValueError("give either rate (what must be served) or budget (what may be spent)")
        if self.warmup_s >= self.duration_s:
            raise ValueError(f"warmup_s: {self.warmup_s:g} leaves nothing of duration_s: {self.duration_s:g}")
        for metric, row in self.slo.items():
            if metric not in TABLE_VI:
                raise ValueError(f"slo: unknown metric {metric!r}{nearest(metric, TABLE_VI)}")
            for percentile in row:
                if not 0 < percentile <= 100:
                    raise ValueError(f"slo: {metric}: {percentile}: is no percentile; 1 to 100")
        return self


@dataclass(frozen=True)
class Question:
    """A plan with all names looked up: what is searched, on what, between which bounds."""

    problem: Problem
    designs: tuple[Design, ...]
    by: Budget
    rate: float | None
    budget: float | None
    bounds: Bounds
    step: float

    @property
    def throughput(self) -> bool:
        """Whether the most throughput in a budget is asked for, not the least at a rate."""
        return self.budget is not None


def read_plan(path: Path) -> dict[str, Any]:
    """Return a plan file's values as they stand there. Raises ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping; splitwise provision --example prints one")
    return data


def question(values: Mapping[str, Any], where: Path) -> Question:
    """Check a plan's values, read from `where` (paths are relative to it), and look names up.

    Raises ConfigError, and TraceError for a workload file that cannot be used.
    """
    try:
        plan = Plan.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, Plan)}") from None
    catalog = _catalog(plan, where)
    try:
        catalog, designs = _designs(plan, where, catalog)
        config = _config(plan, where, designs[0], catalog)
        budget = None if plan.budget is None else _amount(plan, where, catalog)
        for name in {name for one in designs for name in (one.prompt, one.token) if name is not None}:
            catalog.performance(plan.model, name, config.tensor_parallel)
    except PerformanceModelError as error:
        raise ConfigError(f"{where}: {error}") from None
    load = Load(
        sizes_of(plan.workload, where.parent),
        plan.duration_s,
        reference_row(config, catalog),
        slo=plan.slo or TABLE_VI,
        seeds=tuple(range(plan.seeds)),
        warmup=plan.warmup_s,
        joint=plan.mode is not Mode.COMPAT,
        arrivals=plan.arrivals,
    )
    bounds = Bounds(
        most=Size(plan.search.prompt[1], plan.search.token[1]),
        least=Size(plan.search.prompt[0], plan.search.token[0]),
        limits=plan.limits,
    )
    if budget is not None and "search" not in values:
        bounds = replace(bounds, most=_room(budget, plan.by, designs, catalog))
    return Question(
        Problem(config, catalog, load), tuple(designs), plan.by, plan.rate, budget, bounds, plan.search.step
    )


def _catalog(plan: Plan, where: Path) -> Catalog:
    own = {"hardware": plan.hardware, "models": plan.models, "fits": plan.fits}
    try:
        catalog = shipped() if plan.catalog is None else load_catalog(where.parent / plan.catalog)
        catalog = extended(catalog, own, where)
        hardware = dict(catalog.hardware)
        for name, dollars in plan.prices.items():
            hardware[name] = catalog.machine(name).model_copy(update={"cost_per_hour": dollars})
    except PerformanceModelError as error:
        raise ConfigError(str(error)) from None
    return replace(catalog, hardware=hardware)


def _designs(plan: Plan, where: Path, catalog: Catalog) -> tuple[Catalog, list[Design]]:
    own: dict[str, Design] = {}
    names: list[str] = []
    for entry in plan.designs:
        if isinstance(entry, str):
            names.append(entry)
            continue
        for name, parts in entry.items():
            catalog, own[name] = read_design(f"{where}: designs: {name}", name, parts, catalog)
            names.append(name)
    found: list[Design] = []
    for design in choose(names or ["all"], own):
        if plan.caps and design.token is not None and catalog.machine(design.token).gpu_power_cap == 1:
            catalog, several = with_caps(design, plan.caps, catalog)
            found += several
        else:
            found.append(design)
    return catalog, found


def _config(plan: Plan, where: Path, design: Design, catalog: Catalog) -> SimulationConfig:
    """Return what every simulation of the search has in common."""
    for key in plan.simulation:
        if key in OWN or key not in SimulationConfig.model_fields:
            others = [name for name in SimulationConfig.model_fields if name not in OWN]
            raise ConfigError(f"{where}: simulation: unknown key {key!r}{nearest(key, others)}")
    catalog.language_model(plan.model)
    values = {
        **plan.simulation,
        "model": plan.model,
        "machines": [MachinesPart(home="prompt", hardware=design.prompt, count=1)],
        "trace": TracePart(file=Path(plan.workload)),
        "mode": plan.mode,
        "slo_reference": plan.slo_reference,
    }
    try:
        config = SimulationConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: simulation: {explain(error, SimulationConfig)}") from None
    scheduler_of(config)
    return config


def _amount(plan: Plan, where: Path, catalog: Catalog) -> float:
    """Return a budget as a number; ``40xh100-80gb`` is what so many of these machines take."""
    if not isinstance(plan.budget, str):
        return float(plan.budget or 0.0)
    found = _COUNT.fullmatch(plan.budget.strip())
    if found is None or int(found[1]) < 1:
        raise ConfigError(
            f"{where}: budget: {plan.budget!r} is neither a number nor like 40xh100-80gb (as much as 40 take)"
        )
    return int(found[1]) * price(catalog.machine(found[2]), plan.by)


def _room(budget: float, by: Budget, designs: list[Design], catalog: Catalog) -> Size:
    """Return the most machines of each pool that any design gets for a budget."""
    prices = [price(catalog.machine(name), by) for one in designs for name in (one.prompt, one.token) if name]
    cheapest = min(prices)
    if cheapest <= 0:
        raise ConfigError(f"a machine type has no {by.value}: a budget of it bounds nothing")
    most = max(1, int(budget / cheapest + 1))
    return Size(most, most)
