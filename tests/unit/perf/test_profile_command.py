"""``splitwise profile`` on files: reports, fitted models, clear refusals."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import typer
from typer.testing import CliRunner

from splitwise.cli.profile import profile
from splitwise.errors import ExitCode
from splitwise.perf.catalog import load_fit, shipped
from splitwise.perf.profiles import ProfilePoint, write_profile

if TYPE_CHECKING:
    from pathlib import Path

app = typer.Typer()
app.command()(profile)
runner = CliRunner()


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    truth = shipped().performance("llama2-70b", "h100-80gb")
    sizes = [(tokens, 1) for tokens in (128, 512, 1024, 4096)] + [(512, batch) for batch in (2, 8, 32)]
    points = [
        ProfilePoint(
            *("mine", "box", 1, tokens, batch, 64.0),
            truth.prompt_seconds(tokens * batch, batch),
            truth.token_seconds(batch, batch * (tokens + 32)),
        )
        for tokens, batch in sizes
        for _ in range(3)
    ]
    file = tmp_path / "points.json"
    write_profile(file, points, {})
    return file


def test_a_report_and_a_model(measured: Path, tmp_path: Path) -> None:
    done = runner.invoke(app, [str(measured), "--fits", str(tmp_path / "fits")])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("mine|box|tp1: 21 points, 20 splits of 80:20\n  prompt: held-out error ")
    assert "extrapolated: everything outside 1 to 32 sequences" in done.stdout
    model = load_fit(tmp_path / "fits" / "mine-box-tp1.json")
    truth = shipped().performance("llama2-70b", "h100-80gb")
    assert model.prompt_seconds(1024) == pytest.approx(truth.prompt_seconds(1024))


def test_the_report_as_json(measured: Path) -> None:
    done = runner.invoke(app, [str(measured), "--json"])
    (told,) = json.loads(done.stdout)
    assert told["name"] == "mine|box|tp1"
    assert told["token"]["mean"] < 20.0


def test_refusals(tmp_path: Path) -> None:
    done = runner.invoke(app, [str(tmp_path / "gone.json")])
    assert done.exit_code == ExitCode.FAILED
    assert "gone.json: cannot be read" in done.stderr.replace("\n", "")
    done = runner.invoke(app, ["--router", "127.0.0.1:1"])
    assert done.exit_code == ExitCode.USAGE
    assert "--hardware" in done.stderr
