"""Built-in workloads, power caps, design files, and the command with its files and errors."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

from splitwise.cli.main import app
from splitwise.errors import ConfigError
from splitwise.perf.catalog import shipped
from splitwise.provision.designs import PAPER_DESIGNS
from splitwise.provision.workloads import BUILT_IN, capped, with_caps, workload

if TYPE_CHECKING:
    from pathlib import Path

RUN = ["provision", "azure-code", "--duration", "10", "--workers", "1"]


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_workloads_have_the_published_quantiles(name: str) -> None:
    trace = workload(name)
    for sizes, wanted in zip((trace.prompt_tokens, trace.output_tokens), BUILT_IN[name], strict=True):
        assert np.percentile(sizes, (50, 90, 99)) == pytest.approx(wanted[1:4], rel=0.02)
        assert sizes.min() >= wanted[0]
        assert sizes.max() <= wanted[4]


def test_the_papers_cap_is_the_catalogues() -> None:
    catalog, name = capped(shipped(), "h100-80gb", 0.5)
    ours, papers = catalog.machine(name), catalog.machine("h100-80gb-pcap")
    for field in ("machine_watts", "power_units", "prompt_factor", "token_factor", "gpu_power_cap"):
        assert getattr(ours, field) == pytest.approx(getattr(papers, field))
    assert capped(shipped(), "h100-80gb", 1.0)[1] == "h100-80gb"


@pytest.mark.parametrize(
    ("hardware", "cap", "told"),
    [("h100-80gb", 0.3, "between"), ("h100-80gb", 1.2, "between"), ("h100-80gb-pcap", 0.6, "cap already")],
)
def test_caps_that_cannot_be_are_refused(hardware: str, cap: float, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        capped(shipped(), hardware, cap)


def test_caps_make_designs() -> None:
    catalog, found = with_caps(PAPER_DESIGNS["Splitwise-HH"], [0.5, 0.75, 1], shipped())
    watts = [catalog.machine(str(design.token)).machine_watts for design in found]
    assert watts == sorted(watts)
    assert watts[0] == pytest.approx(7140)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (RUN, "either rate"),
        ([*RUN, "--rate", "3", "--budget", "3"], "either rate"),
        ([*RUN, "--rate", "-3"], "rate: Input should be greater than 0"),
        ([*RUN, "--rate", "3", "--design", "Splitwise-XX"], "Splitwise-XX"),
        ([*RUN, "--rate", "3", "--model", "nothing"], "nothing"),
        ([*RUN, "--budget", "1", "--design", "Splitwise-HH"], "does not pay for"),
        (["provision", "nowhere.csv", "--rate", "3"], "nowhere.csv"),
        ([*RUN, "--rate", "3", "--slo", "missing.yaml"], "missing.yaml"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code not in (0, 1)
    assert told in result.output


PICTURES = {"designs", "map-Splitwise-HH", "slowdowns", "batches", "requests", "machines"}


def test_the_command_writes_files_and_a_report(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "parquet", "html")}
    result = CliRunner().invoke(
        app,
        [*RUN, "--rate", "6", "--largest", "5", "--design", "Baseline-H100", "--design", "Splitwise-HH",
         "--out", str(files["json"]), "--out", str(files["csv"]), "--out", str(files["parquet"]),
         "--report", str(files["html"])],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    told = json.loads(files["json"].read_text())
    assert [row["design"] for row in told["answers"]] == ["Baseline-H100", "Splitwise-HH"]
    with files["csv"].open() as file:
        assert [row["design"] for row in csv.DictReader(file)] == ["Baseline-H100", "Splitwise-HH"]
    import pyarrow.parquet

    assert pyarrow.parquet.read_table(files["parquet"]).column("design").to_pylist() == [
        "Baseline-H100",
        "Splitwise-HH",
    ]
    page = files["html"].read_text()
    assert page.count("<svg") == len(PICTURES)
    assert "src=" not in page
    assert told["advice"] in page
    assert {path.stem for path in (tmp_path / "out-pictures").glob("*.png")} == PICTURES


def test_slos_that_nothing_meets_end_with_status_1(tmp_path: Path) -> None:
    slo = tmp_path / "slo.yaml"
    slo.write_text("ttft: {50: 0.01}\n")
    result = CliRunner().invoke(
        app, [*RUN, "--rate", "2", "--largest", "2", "--design", "Splitwise-HH", "--slo", str(slo)]
    )
    assert result.exit_code == 1
    assert "nearest miss" in result.output
