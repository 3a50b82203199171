"""The units are well-formed, start what exists, and their settings are valid."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from splitwise.config import load_settings

UNITS = Path(__file__).parents[3] / "deploy" / "systemd"
SERVICES = sorted(UNITS.glob("*.service"))
EXEC = re.compile(r"^ExecStart=(\S+) -m (\S+) (.*)$", re.MULTILINE)


def command(unit: Path) -> tuple[str, list[str]]:
    """Return the module that a unit starts and its arguments, as systemd would expand them."""
    found = EXEC.search(unit.read_text())
    assert found is not None, unit
    arguments = found[3].replace("%H", "host").replace("%i", "0").split()
    return found[2], arguments


def test_every_service_has_a_unit() -> None:
    assert {command(unit)[0] for unit in SERVICES} == {
        "services.router",
        "services.kvd",
        "services.prompt",
        "services.token",
    }


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_command_lines_are_accepted(unit: Path) -> None:
    module, arguments = command(unit)
    assert importlib.util.find_spec(module) is not None
    section = {"services.router": "router", "services.kvd": "kvd"}.get(module, "machine")
    arguments[arguments.index("--config") + 1] = str(UNITS / "splitwise.yaml")
    settings = load_settings(section, arguments).settings
    if section == "machine":
        assert settings.machine.id == "host-0"
        assert settings.machine.kvd_socket == Path("/run/splitwise/kvd.sock")


@pytest.mark.parametrize("unit", SERVICES, ids=lambda unit: unit.name)
def test_stop_takes_longer_than_the_drain(unit: Path) -> None:
    module, _ = command(unit)
    section = {"services.router": "router", "services.kvd": "kvd"}.get(module, "machine")
    settings = load_settings(section, ["--config", str(UNITS / "splitwise.yaml")]).settings
    limit = re.search(r"^TimeoutStopSec=(\d+)$", unit.read_text(), re.MULTILINE)
    assert limit is not None
    assert int(limit[1]) > getattr(settings, section).drain_s + 10


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for unit in SERVICES:
        text = unit.read_text().replace("/opt/splitwise/.venv/bin/python", sys.executable)
        text = text.replace("/opt/splitwise", str(UNITS.parents[1]))
        (tmp_path / unit.name.replace("@.", "@0.")).write_text(text)
    paths = [str(path) for path in sorted(tmp_path.iterdir())]
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ours = [line for line in verified.stderr.splitlines() if "splitwise" in line]
    assert not ours, verified.stderr
