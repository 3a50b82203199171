"""``splitwise config`` and ``--check-config`` of every service: nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from splitwise.cli.main import app
from splitwise.config import Settings
from splitwise.errors import ExitCode

if TYPE_CHECKING:
    from pathlib import Path

SERVICES = ("router", "prompt", "token", "kvd", "power")
FILE = """
router: {policy: random, slo: {ttft_ms: 5}, machines: ["[::1]:5"]}
machine: {engine: {kind: emulated, options: {kv_blocks: 64}}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "splitwise.yaml"
    path.write_text(FILE)
    return path


def run(*words: str, **environment: str) -> Any:
    return CliRunner().invoke(app, ["config", *words], env=environment)


def check(service: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"services.{service}", *words, "--check-config"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )


def test_what_is_shown_is_settings_again(file: Path, tmp_path: Path) -> None:
    shown = run("show", str(file))
    assert shown.exit_code == 0
    again = Settings.model_validate(yaml.safe_load(shown.stdout))
    assert again == Settings.model_validate(yaml.safe_load(FILE))


def test_every_value_has_its_origin(file: Path) -> None:
    words = ("show", str(file), "--section", "router", "--json", "--", "--restart-limit", "3")
    shown = json.loads(run(*words, SPLITWISE_ROUTER__QUEUE_LIMIT="7").stdout)
    wanted = {
        "router.restart_limit": (3, "flag --restart-limit", True),
        "router.queue_limit": (7, "environment SPLITWISE_ROUTER__QUEUE_LIMIT", True),
        "router.policy": ("random", str(file), True),
        "router.slo.ttft_ms": (5.0, str(file), True),
        "router.machines": (["[::1]:5"], str(file), False),
        "router.drain_s": (120.0, "default", True),
        "telemetry.log_level": ("info", "default", True),
        "tls.ca": (None, "default", False),
    }
    for key, (value, origin, live) in wanted.items():
        assert shown[key] == {"value": value, "from": origin, "live": live}
    assert {key.partition(".")[0] for key in shown} == {"router", "tls", "telemetry"}


def test_flags_may_stand_without_a_file() -> None:
    shown = run("show", "--section", "kvd", "--", "--max-transfers", "9").stdout
    assert "  max_transfers: 9  # flag --max-transfers; live\n" in shown


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("show", "--section", "ruter"), ExitCode.USAGE, "did you mean 'router'?"),
        (("show", "--section", "kvd", "--", "--max-transfer", "9"), ExitCode.CONFIG, "'max_transfers'?"),
        (("check", "/nowhere.yaml"), ExitCode.CONFIG, "/nowhere.yaml: no such file"),
    ],
)
def test_mistakes_are_said(words: tuple[str, ...], code: ExitCode, said: str) -> None:
    ended = run(*words)
    assert ended.exit_code == code
    assert said in ended.stderr


@pytest.mark.parametrize("service", SERVICES)
def test_every_service_checks_its_settings(file: Path, service: str) -> None:
    good = check(service, "--config", str(file))
    assert (good.returncode, good.stderr) == (0, "")
    assert f"splitwise {service}: valid, 5 settings given" in good.stdout
    wrong = check(service, "--config", str(file), "--liste", "x")
    assert wrong.returncode == ExitCode.CONFIG
    assert "flag --liste: unknown key 'liste'" in wrong.stderr


@pytest.mark.parametrize(
    ("service", "words", "said"),
    [
        ("router", ("--policy", "fastest"), "policy 'fastest' is unknown"),
        ("router", ("--http-api-keys", "/nowhere"), "router.http_api_keys: /nowhere"),
        ("router", ("--models.m", "/nowhere"), "router.models.m: /nowhere"),
        ("prompt", ("--engine.kind", "emulated", "--engine.options.kv_block", "9"), "kv_block"),
        ("token", ("--engine.kind", "emulated", "--engine.options.kv_blocks", "0"), "kv_blocks"),
        ("kvd", ("--tls.ca", "/nowhere", "--tls.certificate", "/x", "--tls.key", "/y"), "/nowhere"),
    ],
)
def test_what_the_schema_cannot_see_is_checked_too(service: str, words: tuple[str, ...], said: str) -> None:
    ended = check(service, *words)
    assert ended.returncode == ExitCode.CONFIG
    assert said in ended.stderr
