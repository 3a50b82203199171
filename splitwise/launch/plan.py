"""What `splitwise up` starts: the list of processes and their command lines.

Two nodes are played on one host: one for the prompt machines and one for the token machines,
each with its own KV daemon, so that KV caches take the same way as between two hosts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from splitwise.config import Address, EngineKind
from splitwise.errors import ConfigError
from splitwise.launch.emulate import FLEET, EmulatedGroup, fleet_gpus, write_fleet
from splitwise.launch.emulated_gpus import FILE_VARIABLE, create_gpus
from splitwise.launch.state import runtime_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    Addresses = Mapping[str, str]

ANY_PORT = Address("127.0.0.1", 0)
GPUS = "gpus.bin"  # of an emulated node
POWER = {False: (), True: ("power",)}  # what machines wait for
DRAIN_S = 5.0  # Ctrl-C shall not wait for long answers


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process: `arguments` are made once the addresses of all in `after` are known.

    Processes stop in the reverse order of `stage`: the router first, daemons last.
    """

    name: str
    stage: int
    after: tuple[str, ...]
    arguments: Callable[[Addresses], list[str]]
    machines: int = 1


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    """What the command line asks for."""

    prompt: int = 1
    token: int = 1
    engine: EngineKind = EngineKind.VLLM
    model: Path | None = None
    model_name: str = ""
    engine_options: dict[str, Any] = field(default_factory=dict)
    emulate: tuple[EmulatedGroup, ...] = ()
    listen: Address = ANY_PORT
    http_listen: Address | None = None
    config: Path | None = None
    log_level: str = "info"
    power: bool = False
    power_budget_watts: float | None = None
    metrics: Address | None = None  # of the router; every other process takes a port after it


def plan_cluster(options: ClusterOptions, folder: Path) -> list[ProcessSpec]:
    """Return the processes in order of start; sockets go into `folder`."""
    if not options.emulate and (options.prompt < 1 or options.token < 1):
        raise ConfigError("--prompt and --token: at least one machine of each is needed")
    power = [_power(options, folder)] if options.power else []
    if options.emulate:
        specs = [*power, _kvd("kvd", "node", folder), _router(options), _fleet(options, folder)]
        return _with_metrics(specs, options.metrics)
    specs = [
        *power,
        _kvd("kvd-prompt", "node-prompt", folder),
        _kvd("kvd-token", "node-token", folder),
        _router(options),
    ]
    for home, count in (("prompt", options.prompt), ("token", options.token)):
        specs += [_machine(f"{home}-{index}", home, folder, options) for index in range(count)]
    return _with_metrics(specs, options.metrics)


def metrics_addresses(first: Address, count: int) -> list[Address]:
    """Return where so many processes serve their metrics; raises `ConfigError`. Port 0 is any, for all."""
    if first.port and first.port + count > 65_536:
        raise ConfigError(f"--metrics {first}: {count} processes need as many ports from there on")
    return [first.with_port(first.port + index if first.port else 0) for index in range(count)]


def _with_metrics(specs: list[ProcessSpec], first: Address | None) -> list[ProcessSpec]:
    """Give every process a port for its metrics: the router the first, a fleet's machines the last."""
    if first is None:
        return specs
    ordered = sorted(specs, key=lambda spec: (spec.name != "router", spec.name == "fleet"))
    addresses = dict(zip((s.name for s in ordered), metrics_addresses(first, len(ordered)), strict=True))

    def measured(spec: ProcessSpec) -> ProcessSpec:
        if spec.name == "fleet":
            return spec  # its file tells each machine
        flags = ["--telemetry.metrics_listen", str(addresses[spec.name])]
        return replace(spec, arguments=lambda known: [*spec.arguments(known), *flags])

    return [measured(spec) for spec in specs]


def environment(options: ClusterOptions, folder: Path) -> dict[str, str]:
    """Return the variables that all processes get; `folder` is that of `plan_cluster`."""
    # Not above info: readiness is read from the log. What is shown is the terminal's choice.
    level = "debug" if options.log_level == "debug" else "info"
    variables = {"SPLITWISE_TELEMETRY__LOG_FORMAT": "json", "SPLITWISE_TELEMETRY__LOG_LEVEL": level}
    variables |= {f"SPLITWISE_{section}__DRAIN_S": str(DRAIN_S) for section in ("ROUTER", "MACHINE", "KVD")}
    if options.config is not None:
        variables["SPLITWISE_CONFIG"] = str(options.config.absolute())
    if options.power and options.emulate:
        variables[FILE_VARIABLE] = str(folder / GPUS)
    return variables


def _kvd(name: str, node: str, folder: Path) -> ProcessSpec:
    def arguments(known: Addresses) -> list[str]:
        listen = known.get(name, str(ANY_PORT))
        own = ["--node", node, "--socket", str(folder / f"{name}.sock"), "--listen", listen]
        return ["-m", "services.kvd", *own]

    return ProcessSpec(name, 1, (), arguments)


def _power(options: ClusterOptions, folder: Path) -> ProcessSpec:
    """Plan the power agent: over the GPUs of this host, or over those of the emulated machines."""
    own = ["-m", "services.power"]
    if options.emulate:
        gpus = [gpu for machine in fleet_gpus(options.emulate).values() for gpu in machine]
        create_gpus(folder / GPUS, gpus)
        own += ["--nvml", "services.power.emulated_nvml", "--state", str(folder / "limits.json")]
    else:  # not in `folder`, so that the next `up` finds what this one could not give back
        own += ["--state", str(runtime_folder() / "power-limits.json")]
    return ProcessSpec("power", 1, (), lambda known: [*own, "--listen", known.get("power", str(ANY_PORT))])


def _router(options: ClusterOptions) -> ProcessSpec:
    def arguments(known: Addresses) -> list[str]:
        own = ["--listen", known.get("router", str(options.listen))]
        if options.http_listen is not None:
            own += ["--http_listen", known.get("router/http", str(options.http_listen))]
        if options.power_budget_watts is not None:
            own += ["--power_budget_watts", str(options.power_budget_watts)]
        return ["-m", "services.router", *own]

    return ProcessSpec("router", 3, (), arguments)


def _machine(name: str, home: str, folder: Path, options: ClusterOptions) -> ProcessSpec:
    kvd = f"kvd-{home}"

    def arguments(known: Addresses) -> list[str]:
        own = [
            "--id",
            name,
            "--node",
            f"node-{home}",
            "--listen",
            str(ANY_PORT),
            "--routers",
            known["router"],
        ]
        own += ["--kvd_socket", str(folder / f"{kvd}.sock"), "--kvd_address", known[kvd]]
        own += ["--engine.kind", options.engine.value]
        if options.engine_options:
            own += ["--engine.options", json.dumps(options.engine_options)]
        if options.model is not None:
            own += ["--model", str(options.model)]
        if options.model_name:
            own += ["--model_name", options.model_name]
        if options.power:
            own += ["--power_agent", known["power"]]
        return ["-m", f"services.{home}", *own]

    return ProcessSpec(name, 2, ("router", kvd, *POWER[options.power]), arguments)


def _fleet_metrics(options: ClusterOptions, machines: int) -> list[Address]:
    """Return the ports after those of router, daemon and power agent."""
    if options.metrics is None:
        return []
    others = 3 if options.power else 2
    return metrics_addresses(options.metrics, others + machines)[others:]


def _fleet(options: ClusterOptions, folder: Path) -> ProcessSpec:
    machines = sum(group.count for group in options.emulate)

    def arguments(known: Addresses) -> list[str]:
        file = folder / "fleet.json"
        write_fleet(
            file,
            options.emulate,
            routers=[known["router"]],
            kvd_socket=folder / "kvd.sock",
            kvd_address=known["kvd"],
            options=options.engine_options,
            power_agent=known.get("power"),
            gpu_file=folder / GPUS if options.power else None,
            metrics=_fleet_metrics(options, machines),
        )
        return [*FLEET, str(file)]

    return ProcessSpec("fleet", 2, ("router", "kvd", *POWER[options.power]), arguments, machines)
