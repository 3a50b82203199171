"""The plan file: what it may hold, what is refused, and options that go before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

from splitwise.cli.main import app
from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget, Size
from splitwise.provision.plan import EXAMPLE, Question, question
from splitwise.workload.synthesize import Arrivals

if TYPE_CHECKING:
    from collections.abc import Mapping

WHERE = Path("plan.yaml")


def asked(**values: Any) -> Question:
    return question({"workload": "azure-code", "rate": 5, **values}, WHERE)


def test_the_example_is_a_plan_and_every_key_of_it_counts() -> None:
    values = yaml.safe_load(EXAMPLE)
    found = question(values, WHERE)
    assert [design.name for design in found.designs] == ["Baseline-H100", "Splitwise-HH", "mine", "capped"]
    assert (found.rate, found.budget, found.throughput) == (70, None, False)
    assert found.bounds.most == Size(40, 40)
    assert found.bounds.limits == {Budget.POWER: 1760}
    catalog = found.problem.catalog
    assert catalog.machine("my-a100").cost_per_hour == 12.5
    assert catalog.machine("a100-80gb").cost_per_hour == 17.6
    assert catalog.machine(str(found.designs[3].token)).gpu_power_cap == 0.6


def test_own_machines_and_a_catalogue_file(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("hardware: {cheap: {base: a100-80gb, cost_per_hour: 9}}\n")
    found = question(
        {
            "workload": "azure-code",
            "budget": "10xmine",
            "catalog": "m.yaml",
            "hardware": {"mine": {"base": "cheap", "power_units": 10}},
            "designs": [{"x": {"prompt": "h100-80gb", "token": "mine"}}],
            "arrivals": "gamma",
            "by": "cost",
        },
        tmp_path / "plan.yaml",
    )
    assert found.budget == pytest.approx(90)
    assert found.bounds.most.prompt >= 10
    assert found.problem.load.arrivals is Arrivals.GAMMA


def test_caps_become_designs() -> None:
    found = asked(designs=["Splitwise-HH", "Baseline-H100"], caps=[0.5, 1])
    assert [one.name for one in found.designs] == ["Splitwise-HH@0.5", "Splitwise-HH@1", "Baseline-H100"]


def test_settings_of_the_simulation_reach_it() -> None:
    found = asked(simulation={"report_s": 0.25, "scheduler": {"policy": "round-robin"}})
    assert found.problem.config.report_s == 0.25


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"wrkload": 1}, "unknown key 'wrkload'; did you mean 'workload'?"),
        ({"search": {"promt": [1, 2]}}, "unknown key 'promt' in search; did you mean 'prompt'?"),
        ({"search": {"prompt": [5, 2]}}, r"must be two numbers from 1 up"),
        ({"designs": ["Splitwise-HX"]}, "no design 'Splitwise-HX'; did you mean 'Splitwise-H"),
        ({"designs": [{"x": {"prompt": "h100-80g"}}]}, "did you mean 'h100-80gb'"),
        ({"designs": [{"x": {"prompt": "h100-80gb", "tokens": "a"}}]}, "did you mean 'token'"),
        ({"designs": [{"x": {"token": "h100-80gb"}}]}, "x: needs prompt"),
        ({"designs": [{"x": {"prompt": "h100-80gb", "token_cap": 0.6}}]}, "token_cap is a number"),
        ({"designs": [{"x": {"prompt": "h100-80gb", "token": "h100-80gb", "token_cap": 0.1}}]}, "between"),
        ({"hardware": {"x": {"base": "h100-80gb", "cost": 2}}}, "unknown key 'cost'; did you mean 'cost_per"),
        ({"prices": {"h200": 3}}, "no hardware 'h200'"),
        ({"slo": {"tfft": {50: 2}}}, "unknown metric 'tfft'; did you mean 'ttft'"),
        ({"slo": {"ttft": {150: 2}}}, "150: is no percentile"),
        ({"slo": {"ttft": {50: -2}}}, "greater than 0"),
        ({"rate": None}, "either rate"),
        ({"budget": 3}, "either rate"),
        ({"rate": None, "budget": "lots"}, "neither a number nor like 40xh100-80gb"),
        ({"rate": None, "budget": "4xh200"}, "no hardware 'h200'"),
        ({"limits": {"watts": 3}}, "limits"),
        ({"simulation": {"reports": 1}}, "unknown key 'reports'; did you mean 'report_s'"),
        ({"simulation": {"seeds": [1]}}, "unknown key 'seeds'"),
        ({"simulation": {"scheduler": {"policy": "best"}}}, "best"),
        ({"model": "llama3"}, "no model 'llama3' in the catalogue; did you mean 'llama2-70b'"),
        ({"workload": "azure-cod"}, "did you mean 'azure-code'"),
        ({"warmup_s": 120}, "leaves nothing"),
        ({"slo_reference": "h200"}, "slo_reference: no hardware 'h200'"),
    ],
)
def test_wrong_plans_are_named(values: Mapping[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace("?", r"\?")):
        asked(**values)


def test_options_go_before_the_plan(tmp_path: Path) -> None:
    path, out = tmp_path / "plan.yaml", tmp_path / "out.json"
    path.write_text(
        "workload: azure-code\nbudget: 5\nby: machines\nduration_s: 10\n"
        "search: {prompt: [1, 4], token: [1, 4]}\n"
        "designs: [Splitwise-HH, plain: {prompt: h100-80gb}]\n"
    )
    result = CliRunner().invoke(
        app,
        ["provision", str(path), "--rate", "3", "--design", "plain", "--workers", "1", "--out", str(out)],
    )
    assert result.exit_code == 0, result.output
    answers = json.loads(out.read_text())["answers"]
    assert [(row["design"], row["rate"]) for row in answers] == [("plain", 3.0)]
    assert "plain" in result.output


def test_the_printed_example_is_the_plan() -> None:
    assert CliRunner().invoke(app, ["provision", "--example"]).output == EXAMPLE


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--limit", "watts=3"], "must be like power=1760"),
        (["--limit", "power=much"], "must be like power=1760"),
        (["--out", "answer.txt"], "end its name in .json, .csv, .parquet"),
        (["--out", "no/such/folder/a.json"], "there is no folder"),
        (["--ray", "127.0.0.1:1"], "--ray"),
    ],
)
def test_wrong_options_are_named_before_the_search(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["provision", "azure-code", "--rate", "3", *arguments])
    assert result.exit_code == 78
    assert told in result.output
