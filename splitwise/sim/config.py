"""The YAML file of ``splitwise simulate``: what may stand in it, and the cluster it describes.

Unknown keys, unknown hardware and models, and values out of range are errors that name the
key and what is known.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path  # noqa: TC003 - pydantic reads it at run time
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from splitwise.config.nearest import explain
from splitwise.errors import ConfigError
from splitwise.perf.catalog import Catalog, load_catalog, shipped
from splitwise.perf.model import PerformanceModelError, stack
from splitwise.perf.power import machine_watts
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.sim.run import Mode
from splitwise.sim.setup import HOMES, Cluster, Failure, Machine, Power
from splitwise.sim.slo import TABLE_VI
from splitwise.workload.synthesize import Arrivals

if TYPE_CHECKING:
    import numpy as np

TYPICAL_PROMPT_TOKENS = 1024  # batch at which the prompt phase's power is taken
TYPICAL_SEQUENCES = 32  # ... and the token phase's


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MachinesPart(_Part):
    """`count` equal machines with a home pool; `link_gbit_s` replaces the catalogue's.

    `kv_tokens` is their KV memory in tokens, when it is not all that the weights leave.
    """

    home: Literal["prompt", "token"]
    hardware: str
    count: int = Field(ge=1, le=100_000)
    link_gbit_s: float | None = Field(default=None, gt=0)
    kv_tokens: int | None = Field(default=None, ge=1)


class FailurePart(_Part):
    """Machine number `machine` (in the order of `machines`, from 0) is lost at `at_s`."""

    machine: int = Field(ge=0)
    at_s: float = Field(ge=0)
    back_s: float | None = Field(default=None, gt=0)


class TracePart(_Part):
    """A trace file as it is, or with `rate` a new trace with the file's sizes."""

    file: Path
    rate: float | None = Field(default=None, gt=0)
    duration_s: float | None = Field(default=None, gt=0)
    arrivals: Arrivals = Arrivals.POISSON
    joint: bool = True
    sort: bool = False
    drop_invalid: bool = False

    @model_validator(mode="after")
    def _both_or_neither(self) -> TracePart:
        if self.rate is not None and self.duration_s is None:
            raise ValueError("with a rate, duration_s is needed: how long shall the new trace be?")
        return self


class SimulationConfig(_Part):
    """One simulation. Field names carry their units; the defaults are the paper's."""

    model: str
    machines: list[MachinesPart] = Field(min_length=1)
    trace: TracePart
    mode: Mode = Mode.FAITHFUL
    seeds: list[int] = Field(default=[0], min_length=1)
    warmup_s: float = Field(default=0.0, ge=0)
    until_s: float | None = Field(default=None, gt=0)
    tensor_parallel: int = Field(default=8, ge=1)
    scheduler: dict[str, Any] = Field(default_factory=dict)
    max_batch_tokens: int = Field(default=2048, ge=1)
    max_running: int = Field(default=512, ge=1)
    max_preemptions: int = Field(default=4, ge=1)
    block_tokens: int = Field(default=16, ge=1)
    serialized_below_tokens: int = Field(default=512, ge=0)
    report_s: float = Field(default=0.0, ge=0)
    assumed_max_tokens: int = Field(default=2048, ge=1)
    failures: list[FailurePart] = Field(default_factory=list)
    slo: dict[str, dict[int, float]] = Field(default=TABLE_VI)
    slo_reference: str = "a100-80gb"
    catalog: Path | None = None


def load_config(path: Path) -> SimulationConfig:
    """Read and check a YAML file; paths in it are relative to it. Raises ConfigError."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: must be a mapping of settings, see docs/simulator.md")
    try:
        config = SimulationConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(f"{path}: {explain(error, SimulationConfig)}") from None
    folder = path.parent
    moved: dict[str, Any] = {
        "trace": config.trace.model_copy(update={"file": folder / config.trace.file}),
        "catalog": None if config.catalog is None else folder / config.catalog,
    }
    return config.model_copy(update=moved)


def catalog_of(config: SimulationConfig) -> Catalog:
    """Return the shipped catalogue, with the config's own on top."""
    try:
        return shipped() if config.catalog is None else load_catalog(config.catalog)
    except PerformanceModelError as error:
        raise ConfigError(str(error)) from None


def scheduler_of(config: SimulationConfig) -> SchedulerSettings:
    """Return the live scheduler's settings as the config has them."""
    try:
        return SchedulerSettings(**config.scheduler)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"scheduler: {error}") from None


def reference_row(config: SimulationConfig, catalog: Catalog) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the performance model of the SLO's reference machine."""
    try:
        return catalog.performance(config.model, config.slo_reference, config.tensor_parallel).row()
    except PerformanceModelError as error:
        raise ConfigError(f"slo_reference: {error}") from None


def build_cluster(config: SimulationConfig, catalog: Catalog) -> Cluster:
    """Return the machines and rules that a config describes. Raises ConfigError."""
    try:
        return _build(config, catalog)
    except PerformanceModelError as error:
        raise ConfigError(str(error)) from None


def _build(config: SimulationConfig, catalog: Catalog) -> Cluster:
    model = catalog.language_model(config.model)
    kinds = list(dict.fromkeys(part.hardware for part in config.machines))
    models = [catalog.performance(config.model, kind, config.tensor_parallel) for kind in kinds]
    if config.mode is Mode.COMPAT and any(model.compat is None for model in models):
        raise ConfigError(f"compat mode needs the authors' tables, which {config.model} does not have")
    machines: list[Machine] = []
    for part in config.machines:
        machine = _machine(config, catalog, part, kinds.index(part.hardware))
        first = sum(other.home == machine.home for other in machines)
        machines += [replace(machine, name=f"{part.home}-{first + number}") for number in range(part.count)]
    return Cluster(
        tuple(machines),
        stack(models),
        token_bytes=model.kv_bytes_per_token,
        layers=model.layers,
        block_tokens=config.block_tokens,
        max_batch_tokens=config.max_batch_tokens,
        max_running=config.max_running,
        max_preemptions=config.max_preemptions,
        serialized_below_tokens=config.serialized_below_tokens,
        hand_over_seconds=max(catalog.machine(kind).link_latency_seconds for kind in kinds),
        report_seconds=config.report_s,
        assumed_max_tokens=config.assumed_max_tokens,
        failures=tuple(Failure(part.machine, part.at_s, part.back_s) for part in config.failures),
    )


def _machine(config: SimulationConfig, catalog: Catalog, part: MachinesPart, row: int) -> Machine:
    hardware = catalog.machine(part.hardware)
    model = catalog.language_model(config.model)
    power = catalog.power(config.model, config.tensor_parallel)
    gpus = config.tensor_parallel
    link = hardware.link.bytes_per_second if part.link_gbit_s is None else part.link_gbit_s * 1e9 / 8
    return Machine(
        name=part.home,
        home=HOMES[part.home],
        kv_blocks=(part.kv_tokens or model.kv_capacity_tokens(hardware, gpus)) // config.block_tokens,
        model_row=row,
        link_bytes=link,
        visible_seconds=hardware.link.fixed_seconds,
        kind=part.hardware,
        power=Power(
            idle=machine_watts(hardware, power, gpus=gpus),
            prompt=machine_watts(hardware, power, prompt_tokens=TYPICAL_PROMPT_TOKENS, gpus=gpus),
            token=machine_watts(hardware, power, sequences=TYPICAL_SEQUENCES, gpus=gpus),
        ),
        cost_per_hour=hardware.cost_per_hour * gpus / hardware.gpus,
        memory_bytes=gpus * hardware.gpu_memory_bytes,
        weights_bytes=int(model.weight_bytes),
    )
