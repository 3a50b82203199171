"""From ``25xH100:prompt 15xH100:token`` to the list of machines that an emulated fleet runs.

The fleet (``python -m services.engine.emulated.fleet FILE``) is one process that forks
all machines; ``splitwise up --emulate`` starts it beside a router and one KV daemon.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from splitwise.config import Address
    from splitwise.launch.emulated_gpus import GpuModel

FLEET = ("-m", "services.engine.emulated.fleet")
SHORT_NAMES = {"a100": "a100-80gb", "h100": "h100-80gb", "h100cap": "h100-80gb-pcap"}
MAX_MACHINES = 1000
_GROUP = re.compile(r"(?:(?P<count>[1-9]\d*)x)?(?P<hardware>[A-Za-z][A-Za-z0-9._-]*):(?P<home>[a-z]+)")


@dataclass(frozen=True, slots=True)
class EmulatedGroup:
    """So many machines of one type with one home pool."""

    count: int
    hardware: str
    home: str


def parse_groups(words: Sequence[str]) -> list[EmulatedGroup]:
    """Read words such as ``25xH100:prompt``; raises `ConfigError` that names the word.

    `hardware` is a name of the catalogue, or A100, H100 and H100cap for short.
    """
    from splitwise.perf.catalog import shipped

    known = shipped().hardware
    groups = []
    for word in words:
        match = _GROUP.fullmatch(word)
        if match is None or match["home"] not in ("prompt", "token"):
            raise ConfigError(
                f"--emulate {word!r}: write COUNTxHARDWARE:prompt or :token, as in 25xH100:prompt"
            )
        hardware = SHORT_NAMES.get(match["hardware"].lower(), match["hardware"])
        if hardware not in known:
            raise ConfigError(
                f"--emulate {word!r}: no hardware {hardware!r}; known: {', '.join(sorted(known))}"
            )
        groups.append(EmulatedGroup(int(match["count"] or 1), hardware, match["home"]))
    total = sum(group.count for group in groups)
    if not 1 <= total <= MAX_MACHINES:
        raise ConfigError(f"--emulate: {total} machines; from 1 to {MAX_MACHINES} can be started")
    return groups


def fleet_gpus(groups: Sequence[EmulatedGroup]) -> dict[str, list[GpuModel]]:
    """Return the GPUs of every machine, by its id; raises `ConfigError` for types that are capped already."""
    from splitwise.launch.emulated_gpus import gpu_models
    from splitwise.perf.catalog import shipped

    found: dict[str, list[GpuModel]] = {}
    for name, group in _named(groups):
        hardware = shipped().machine(group.hardware)
        if hardware.gpu_power_cap < 1:
            raise ConfigError(
                f"--emulate {group.hardware}: its times have a power cap in them, which would count twice"
                f" with a power agent: name {hardware.profile}, which the agent caps"
            )
        found[name] = gpu_models(name, hardware)
    return found


def write_fleet(
    file: Path,
    groups: Sequence[EmulatedGroup],
    *,
    routers: Sequence[Address | str],
    kvd_socket: Path,
    kvd_address: Address | str,
    node: str = "node",
    options: Mapping[str, Any] | None = None,
    power_agent: Address | str | None = None,
    gpu_file: Path | None = None,
    metrics: Sequence[Address] = (),
) -> list[str]:
    """Write the fleet's file; returns the machines' ids, such as ``prompt-0``.

    `options` go to every engine (see docs/engine-emulated.md); the hardware is the group's.
    With `power_agent` and `gpu_file`, which holds `fleet_gpus`, machines have their GPUs capped.
    `metrics`: where each machine in turn serves its metrics; by default as the settings say.
    """
    entries: list[dict[str, Any]] = []
    gpus = {} if gpu_file is None else fleet_gpus(groups)
    measured = dict(zip((name for name, _ in _named(groups)), metrics, strict=False))
    for name, group in _named(groups):
        engine = {**(options or {}), "hardware": group.hardware}
        arguments = ["--id", name, "--listen", "127.0.0.1:0", "--node", node]
        arguments += ["--routers", json.dumps([str(router) for router in routers])]
        arguments += ["--kvd_socket", str(kvd_socket), "--kvd_address", str(kvd_address)]
        if name in gpus:
            own = [gpu.uuid for gpu in gpus[name]]
            engine |= {"gpu_file": str(gpu_file), "gpus": own}
            arguments += ["--power_agent", str(power_agent), "--gpus", ",".join(own)]
        if name in measured:
            arguments += ["--telemetry.metrics_listen", str(measured[name])]
        arguments += ["--engine.kind", "emulated", "--engine.options", json.dumps(engine)]
        entries.append({"home": group.home, "arguments": arguments})
    file.write_text(json.dumps(entries), encoding="utf-8")
    return [entry["arguments"][1] for entry in entries]


def _named(groups: Sequence[EmulatedGroup]) -> Iterator[tuple[str, EmulatedGroup]]:
    """Yield every machine's id with its group; each pool is counted from 0."""
    counts = {"prompt": 0, "token": 0}
    for group in groups:
        for _ in range(group.count):
            yield f"{group.home}-{counts[group.home]}", group
            counts[group.home] += 1
