"""Workloads by name or file, and a user's own designs and power caps.

The built-in workloads have the published quantiles of the Azure 2023 traces (input and
output sizes at P50, P90, P99 and the largest), log-linear between them; prompt and output
sizes are drawn apart, as quantiles say nothing of how they go together.
"""

from __future__ import annotations

import difflib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.config.nearest import nearest, unknown_keys
from splitwise.errors import ConfigError
from splitwise.perf.power import prompt_slowdown
from splitwise.provision.designs import PAPER_DESIGNS, Design
from splitwise.workload import Trace, load_trace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from splitwise.perf.catalog import Catalog

SAMPLES = 8192
_AT = (0.0, 0.5, 0.9, 0.99, 1.0)
BUILT_IN = {
    "azure-code": ((3, 1469, 5187, 7436, 7437), (6, 13, 55, 251, 1899)),
    "azure-conv": ((7, 1020, 2734, 4142, 14050), (10, 129, 424, 601, 1000)),
}
LOWEST_CAP = 0.5  # below it no measurement says what the token phase does
# The capped machine of the paper: half the GPU power is 70 % of the machine's. Caps between are
# taken to be linear, here as in `prompt_slowdown`.
_SAVED = (1 - 0.7) / 0.5


def workload(name: str, folder: Path = Path()) -> Trace:
    """Return a built-in workload's sizes, or those of a trace file (relative to `folder`)."""
    if name not in BUILT_IN:
        path = folder / name
        if not path.exists():
            close = difflib.get_close_matches(name, BUILT_IN, n=1)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            raise ConfigError(
                f"workload {name!r}: neither a file ({path}) nor one of {', '.join(BUILT_IN)}{meant}"
            )
        return load_trace(path)
    rng = np.random.default_rng(0)
    prompt, output = (_draw(quantiles, rng) for quantiles in BUILT_IN[name])
    return Trace(np.arange(SAMPLES, dtype=np.float64), prompt, output, name)


def _draw(quantiles: Sequence[int], rng: np.random.Generator) -> NDArray[np.int32]:
    ranks = rng.permutation((np.arange(SAMPLES) + 0.5) / SAMPLES)
    sizes: NDArray[np.int32] = np.rint(np.exp(np.interp(ranks, _AT, np.log(quantiles)))).astype(np.int32)
    return sizes


def capped(catalog: Catalog, hardware: str, cap: float) -> tuple[Catalog, str]:
    """Return a catalogue with `hardware` under a GPU power cap (a share), and the new name."""
    base = catalog.machine(hardware)
    if not LOWEST_CAP <= cap <= 1:
        raise ConfigError(f"power cap {cap!r}: must be between {LOWEST_CAP} and 1 of the GPU's power")
    if base.gpu_power_cap != 1.0:
        raise ConfigError(f"{hardware} has a power cap already: name the machine type without one")
    if cap == 1:
        return catalog, hardware
    kept = 1 - _SAVED * (1 - cap)
    machine = base.model_copy(
        update={
            "name": f"{hardware}-cap{cap * 100:g}",
            "gpu_power_cap": cap,
            "machine_watts": base.machine_watts * kept,
            "power_units": base.power_units * kept,
            "prompt_factor": base.prompt_factor * prompt_slowdown(cap),
            "profile": base.profile or base.name,
        }
    )
    return replace(catalog, hardware={**catalog.hardware, machine.name: machine}), machine.name


def read_design(where: str, name: str, entry: Any, catalog: Catalog) -> tuple[Catalog, Design]:
    """Return a design from its mapping, and the catalogue with its capped machines. Raises ConfigError."""
    if not isinstance(entry, dict) or "prompt" not in entry:
        raise ConfigError(f"{where}: needs prompt, may have token and token_cap")
    if wrong := unknown_keys(entry, ("prompt", "token", "token_cap")):
        raise ConfigError(f"{where}: {wrong}")
    prompt, token, cap = str(entry["prompt"]), entry.get("token"), entry.get("token_cap")
    catalog.machine(prompt)
    if cap is not None:
        if token is None or isinstance(cap, bool) or not isinstance(cap, int | float):
            raise ConfigError(f"{where}: token_cap is a number for a design with token machines")
        catalog, token = capped(catalog, str(token), float(cap))
    if token is not None:
        catalog.machine(str(token))
    return catalog, Design(name, prompt, None if token is None else str(token))


def with_caps(design: Design, caps: Sequence[float], catalog: Catalog) -> tuple[Catalog, list[Design]]:
    """Return one design per power cap of the token machines: the cap as a search variable."""
    if design.token is None or not caps:
        return catalog, [design]
    found = []
    for cap in caps:
        catalog, token = capped(catalog, design.token, cap)
        found.append(Design(f"{design.name}@{cap:g}", design.prompt, token))
    return catalog, found


def choose(names: Sequence[str], own: dict[str, Design]) -> list[Design]:
    """Return designs by name, `all` for every known one; the error lists the known ones."""
    known = {**PAPER_DESIGNS, **own}
    if list(names) == ["all"]:
        return list(known.values())
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"no design {unknown[0]!r}{nearest(unknown[0], known)}")
    return [known[name] for name in names]
