"""Machine types, LLMs and their fitted phase times: shipped in ``data/``, extended by the user.

A user's YAML file has the same form as the shipped one::

    hardware:
      my-a100:
        base: a100-80gb          # everything not given is the base's
        cost_per_hour: 12.5
      slow-h100:
        base: h100-80gb
        gpu_power_cap: 0.6
        prompt_factor: 1.2       # times of the base's profile, multiplied
    models:
      my-llm: {layers: 32, kv_heads: 8, head_dim: 128, dtype_bytes: 2, weight_bytes: 16.0e9}
    fits: [my-llm.json]          # what `splitwise profile` wrote; relative to this file
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from splitwise.config.nearest import explain, unknown_keys
from splitwise.perf.link import LinkModel
from splitwise.perf.model import CompatTable, Curve, PerformanceModel, PerformanceModelError
from splitwise.perf.power import PowerModel

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

V = TypeVar("V")
M = TypeVar("M", bound=BaseModel)
DATA = files("splitwise.perf") / "data"


class Hardware(BaseModel):
    """One machine type; the YAML file says where each shipped number is from."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    gpus: int = Field(ge=1)
    gpu_memory_bytes: int = Field(gt=0)
    memory_bandwidth_gb_s: float = Field(gt=0)
    gpu_watts: float = Field(gt=0)
    machine_watts: float = Field(gt=0)
    power_units: float = Field(gt=0)
    cost_per_hour: float = Field(ge=0)
    link_gbit_s: float = Field(gt=0)
    link_fixed_seconds: float = Field(default=0.0, ge=0)
    link_latency_seconds: float = Field(default=20e-6, ge=0)
    gpu_power_cap: float = Field(default=1.0, gt=0, le=1)
    prompt_factor: float = Field(default=1.0, gt=0)
    token_factor: float = Field(default=1.0, gt=0)
    profile: str = ""  # hardware whose fitted times are used, scaled by the factors

    @property
    def other_watts(self) -> float:
        """What the machine draws beside its GPUs."""
        return max(self.machine_watts - self.gpus * self.gpu_watts * self.gpu_power_cap, 0.0)

    @property
    def memory_bytes(self) -> int:
        """GPU memory of the machine."""
        return self.gpus * self.gpu_memory_bytes

    @property
    def link(self) -> LinkModel:
        """The link that KV caches leave by."""
        return LinkModel.of_gbit(
            self.link_gbit_s, latency=self.link_latency_seconds, fixed_seconds=self.link_fixed_seconds
        )


class LanguageModel(BaseModel):
    """One LLM, as far as memory is concerned."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    name: str
    layers: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype_bytes: int = Field(ge=1)
    weight_bytes: float = Field(gt=0)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of one token over all layers."""
        return self.layers * self.kv_heads * self.head_dim * 2 * self.dtype_bytes

    def kv_capacity_tokens(self, hardware: Hardware, tensor_parallel: int = 8) -> int:
        """Tokens of context that fit beside the weights in the memory of `tensor_parallel` GPUs."""
        free = tensor_parallel * hardware.gpu_memory_bytes - self.weight_bytes
        if free <= 0:
            raise PerformanceModelError(
                f"{self.name} ({self.weight_bytes / 1e9:.0f} GB) does not fit {tensor_parallel} GPUs "
                f"of {hardware.name}: take a higher tensor parallel size"
            )
        return int(free // self.kv_bytes_per_token)


@dataclass(frozen=True, slots=True)
class Catalog:
    """What is known, by name. `performance` scales a base profile for derived hardware."""

    hardware: Mapping[str, Hardware]
    models: Mapping[str, LanguageModel]
    fits: Mapping[str, PerformanceModel]
    powers: Mapping[str, PowerModel]

    def machine(self, name: str) -> Hardware:
        """Return a machine type; the error lists the known ones."""
        return _get(self.hardware, name, "hardware")

    def language_model(self, name: str) -> LanguageModel:
        """Return an LLM; the error lists the known ones."""
        return _get(self.models, name, "model")

    def performance(self, model: str, hardware: str, tensor_parallel: int = 8) -> PerformanceModel:
        """Return the phase times of an LLM on a machine type, its own or scaled from its base's."""
        machine = self.machine(hardware)
        own = self.fits.get(f"{model}|{hardware}|tp{tensor_parallel}")
        if own is not None:
            return own
        key = f"{model}|{machine.profile or hardware}|tp{tensor_parallel}"
        base = _get(self.fits, key, "performance model")
        return _scaled(base, machine)

    def power(self, model: str, tensor_parallel: int = 8) -> PowerModel:
        """Return the power shares of an LLM's phases."""
        return _get(self.powers, f"{model}|tp{tensor_parallel}", "power model")


def _get(table: Mapping[str, V], name: str, kind: str) -> V:
    found = table.get(name)
    if found is None:
        close = difflib.get_close_matches(name, table, n=1)
        meant = f"did you mean {close[0]!r}? " if close else ""
        raise PerformanceModelError(
            f"no {kind} {name!r} in the catalogue; {meant}known: {', '.join(sorted(table))}"
        )
    return found


def _scaled(base: PerformanceModel, machine: Hardware) -> PerformanceModel:
    if machine.prompt_factor == 1.0 and machine.token_factor == 1.0:
        return replace(base, hardware=machine.name, _row=[])

    def times(curve: Curve, factor: float) -> Curve:
        return Curve(curve.x, tuple(y * factor for y in curve.y))

    compat = base.compat and CompatTable(
        times(base.compat.prompt, machine.prompt_factor), times(base.compat.token, machine.token_factor)
    )
    return replace(
        base,
        hardware=machine.name,
        prompt_single=times(base.prompt_single, machine.prompt_factor),
        prompt_many=times(base.prompt_many, machine.prompt_factor),
        token=times(base.token, machine.token_factor),
        context_seconds=base.context_seconds * machine.token_factor,
        compat=compat,
        source=f"{base.source}; prompt x{machine.prompt_factor:g}, token x{machine.token_factor:g}",
        _row=[],
    )


@lru_cache(maxsize=1)
def shipped() -> Catalog:
    """Return the catalogue that comes with the package."""
    hardware = _hardware(yaml.safe_load((DATA / "hardware.yaml").read_text()), {}, "hardware.yaml")
    models = _models(yaml.safe_load((DATA / "models.yaml").read_text()), "models.yaml")
    data = json.loads((DATA / "fits.json").read_text())
    fits = {model.name: model for model in map(PerformanceModel.from_dict, data["fits"])}
    powers = {str(name): _power(power) for name, power in data["power"].items()}
    return Catalog(hardware, models, fits, powers)


def _power(data: Mapping[str, Any]) -> PowerModel:
    return PowerModel(
        prompt_tokens=tuple(data["prompt_tokens"]),
        prompt_share=tuple(data["prompt_share"]),
        sequences=tuple(data["sequences"]),
        token_share=tuple(data["token_share"]),
        measured_on=str(data["measured_on"]),
    )


def load_catalog(path: Path) -> Catalog:
    """Return the shipped catalogue with a user's file on top."""
    base = shipped()
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise PerformanceModelError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(data, dict):
        raise PerformanceModelError(f"{path}: must map hardware, models or fits to their values")
    return extended(base, data, path)


def extended(base: Catalog, data: Mapping[str, Any], path: Path) -> Catalog:
    """Return a catalogue with the hardware, models and fits of a mapping read from `path` on top."""
    wrong = unknown_keys(data, ("hardware", "models", "fits"))
    if wrong:
        raise PerformanceModelError(f"{path}: {wrong}")
    hardware = {**base.hardware, **_hardware(data.get("hardware") or {}, base.hardware, str(path))}
    models = {**base.models, **_models(data.get("models") or {}, str(path))}
    fits = dict(base.fits)
    for name in data.get("fits") or []:
        model = load_fit(path.parent / str(name))
        fits[model.name] = model
    return Catalog(hardware, models, fits, base.powers)


def load_fit(path: Path) -> PerformanceModel:
    """Read one fitted model that `save_fit` wrote."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PerformanceModelError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(data, dict):
        raise PerformanceModelError(f"{path}: must hold one fitted model")
    return PerformanceModel.from_dict(data)


def save_fit(path: Path, model: PerformanceModel) -> None:
    """Write one fitted model for a catalogue's `fits`."""
    path.write_text(json.dumps(model.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _hardware(entries: Mapping[str, Any], known: Mapping[str, Hardware], where: str) -> dict[str, Hardware]:
    found: dict[str, Hardware] = {}
    for name, entry in _entries(entries, where):
        values = dict(entry)
        base_name = values.pop("base", None)
        if base_name is not None:
            base = _get({**known, **found}, str(base_name), f"base hardware of {name}")
            values = {**base.model_dump(), "profile": base.profile or base.name, **values}
        found[name] = _checked(Hardware, {**values, "name": name}, f"{where}: {name}")
    return found


def _models(entries: Mapping[str, Any], where: str) -> dict[str, LanguageModel]:
    return {
        name: _checked(LanguageModel, {**entry, "name": name}, f"{where}: {name}")
        for name, entry in _entries(entries, where)
    }


def _entries(entries: Mapping[str, Any], where: str) -> list[tuple[str, Mapping[str, Any]]]:
    if not isinstance(entries, dict) or not all(isinstance(entry, dict) for entry in entries.values()):
        raise PerformanceModelError(f"{where}: must map names to their values")
    return [(str(name), entry) for name, entry in entries.items()]


def _checked(kind: type[M], values: Mapping[str, Any], where: str) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise PerformanceModelError(f"{where}: {explain(error, kind)}") from error
