"""What `up --power` starts besides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.config import EngineKind, load_settings
from splitwise.launch.emulate import parse_groups
from splitwise.launch.emulated_gpus import FILE_VARIABLE, EmulatedGpus
from splitwise.launch.plan import ClusterOptions, environment, plan_cluster

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

KNOWN = {
    "router": "127.0.0.1:1",
    "kvd": "127.0.0.1:2",
    "kvd-prompt": "127.0.0.1:3",
    "kvd-token": "127.0.0.1:4",
    "power": "127.0.0.1:5",
}


def test_without_it_nothing_is_different(tmp_path: Path) -> None:
    options = ClusterOptions(emulate=tuple(parse_groups(["H100:prompt", "H100:token"])))
    assert [spec.name for spec in plan_cluster(options, tmp_path)] == ["kvd", "router", "fleet"]
    assert FILE_VARIABLE not in environment(options, tmp_path)


def test_an_emulated_fleet(tmp_path: Path) -> None:
    groups = tuple(parse_groups(["H100:prompt", "A100:token"]))
    options = ClusterOptions(emulate=groups, power=True, power_budget_watts=9000.0)
    specs = {spec.name: spec for spec in plan_cluster(options, tmp_path)}
    assert list(specs) == ["power", "kvd", "router", "fleet"]
    assert specs["fleet"].after == ("router", "kvd", "power")
    own = load_settings("power", specs["power"].arguments({})[2:]).settings.power
    assert (own.nvml, own.state) == ("services.power.emulated_nvml", tmp_path / "limits.json")
    assert len(EmulatedGpus(environment(options, tmp_path)[FILE_VARIABLE]).records) == 16
    router = load_settings("router", specs["router"].arguments(KNOWN)[2:]).settings.router
    assert router.power_budget_watts == 9000


def test_the_gpus_of_this_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    options = ClusterOptions(engine=EngineKind.EMULATED, power=True)
    specs = {spec.name: spec for spec in plan_cluster(options, tmp_path / "up-1")}
    own = load_settings("power", specs["power"].arguments({})[2:]).settings.power
    # Not in the folder that goes with this `up`: what it could not give back, the next one does.
    assert (own.nvml, own.state) == ("pynvml", tmp_path / "splitwise" / "power-limits.json")
    machine = load_settings("machine", specs["token-0"].arguments(KNOWN)[2:]).settings.machine
    assert str(machine.power_agent) == KNOWN["power"]
    assert machine.gpus == ()
    assert FILE_VARIABLE not in environment(options, tmp_path)
