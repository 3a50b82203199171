"""What `splitwise up` starts: each process with a port of its own for its metrics."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from splitwise.config import Address, EngineKind
from splitwise.errors import ConfigError
from splitwise.launch.emulate import parse_groups
from splitwise.launch.plan import ClusterOptions, metrics_addresses, plan_cluster

if TYPE_CHECKING:
    from pathlib import Path

KNOWN = {
    "router": "127.0.0.1:1",
    "kvd": "127.0.0.1:2",
    "kvd-prompt": "127.0.0.1:2",
    "kvd-token": "127.0.0.1:3",
}
FLAG = "--telemetry.metrics_listen"
FIRST = Address("127.0.0.1", 9100)


def ports(options: ClusterOptions, folder: Path) -> dict[str, str]:
    """Return where each process is told to serve its metrics."""
    found = {}
    for spec in plan_cluster(options, folder):
        arguments = spec.arguments(KNOWN)
        if FLAG in arguments:
            found[spec.name] = arguments[arguments.index(FLAG) + 1]
        if spec.name == "fleet":
            for entry in json.loads((folder / "fleet.json").read_text()):
                told = entry["arguments"]
                if FLAG in told:
                    found[told[1]] = told[told.index(FLAG) + 1]
    return found


def test_the_router_has_the_first_port_and_no_two_have_the_same(tmp_path: Path) -> None:
    options = ClusterOptions(prompt=2, token=1, engine=EngineKind.EMULATED, metrics=FIRST)
    assert ports(options, tmp_path) == {
        "router": "127.0.0.1:9100",
        "kvd-prompt": "127.0.0.1:9101",
        "kvd-token": "127.0.0.1:9102",
        "prompt-0": "127.0.0.1:9103",
        "prompt-1": "127.0.0.1:9104",
        "token-0": "127.0.0.1:9105",
    }


def test_a_fleets_machines_have_the_ports_after_the_other_processes(tmp_path: Path) -> None:
    groups = tuple(parse_groups(["2xH100:prompt", "1xH100:token"]))
    options = ClusterOptions(emulate=groups, engine=EngineKind.EMULATED, metrics=FIRST)
    assert ports(options, tmp_path) == {
        "router": "127.0.0.1:9100",
        "kvd": "127.0.0.1:9101",
        "prompt-0": "127.0.0.1:9102",
        "prompt-1": "127.0.0.1:9103",
        "token-0": "127.0.0.1:9104",
    }


@pytest.mark.parametrize("emulate", [(), tuple(parse_groups(["1xH100:prompt", "1xH100:token"]))])
def test_without_it_nobody_is_told_anything(tmp_path: Path, emulate: tuple) -> None:
    assert ports(ClusterOptions(emulate=emulate, engine=EngineKind.EMULATED), tmp_path) == {}


def test_port_0_is_any_port_for_everybody_and_the_last_port_is_a_bound() -> None:
    assert metrics_addresses(Address("::1", 0), 3) == [Address("::1", 0)] * 3
    assert metrics_addresses(Address("::1", 65_534), 2)[-1].port == 65_535
    with pytest.raises(ConfigError, match="--metrics"):
        metrics_addresses(Address("::1", 65_534), 3)
