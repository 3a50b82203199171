"""The report of one simulation, the requests it shows, and what is said to be extrapolated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from splitwise.cli.main import app
from splitwise.sim.config import load_config
from splitwise.sim.experiment import run_experiment

if TYPE_CHECKING:
    from pathlib import Path


def test_a_run_is_a_page_with_pictures(config_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    page = tmp_path / "run.html"
    result = CliRunner().invoke(
        app, ["simulate", str(config_file), "--report", str(page), "--show", "3", "--show", "17"]
    )
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert text.count("<svg") == 4
    assert "src=" not in text
    assert "#17" in text
    assert "#16" not in text
    assert {path.name for path in (tmp_path / "run-pictures").glob("*.svg")} == {
        "slowdowns.svg",
        "batches.svg",
        "requests.svg",
        "machines.svg",
    }


@pytest.mark.parametrize("request_number", ["40", "-1"])
def test_a_request_that_is_not_there_is_named(config_file: Path, tmp_path: Path, request_number: str) -> None:
    pytest.importorskip("matplotlib")
    result = CliRunner().invoke(
        app, ["simulate", str(config_file), "--report", str(tmp_path / "r.html"), "--show", request_number]
    )
    assert result.exit_code == 78
    assert f"request {request_number}: not in the trace or not finished; it has 0 to 39" in result.output


def test_batches_and_prompts_beyond_the_measurements_are_told(config_file: Path, tmp_path: Path) -> None:
    assert run_experiment(load_config(config_file)).extrapolated() == []
    # 200 requests at once on one machine: batches far above the 64 sequences that were measured.
    rows = "".join(f"0.{index:03},600,80\n" for index in range(200)) + "0.9,40000,2\n"
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    config_file.write_text(
        "model: llama2-70b\nmachines: [{home: prompt, hardware: h100-80gb, count: 1}]\n"
        "trace: {file: trace.csv}\n"
    )
    told = run_experiment(load_config(config_file)).summary()["extrapolated"]
    assert len(told) == 2
    assert "more than 64 sequences in a batch" in told[0]
    assert "0.5% of the prompts are longer than the 32768 tokens" in told[1]
