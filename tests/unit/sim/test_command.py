"""`splitwise simulate` and `splitwise trace`, and the files they read and write."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from splitwise.cli.simulate import simulate
from splitwise.cli.trace import app as trace_app
from splitwise.errors import ConfigError, ExitCode
from splitwise.sim.compare import load_log
from splitwise.sim.config import load_config
from splitwise.sim.experiment import Estimate, run_experiment
from splitwise.sim.export import write_requests
from splitwise.sim.slo import evaluate
from splitwise.workload import TraceError, load_trace

if TYPE_CHECKING:
    from pathlib import Path

runner = CliRunner()
app = typer.Typer()
app.command()(simulate)


def test_simulate_writes_what_was_asked_for(config_file: Path, tmp_path: Path) -> None:
    out, rows, machines = tmp_path / "out.json", tmp_path / "rows.csv", tmp_path / "machines.csv"
    files = ["--out", str(out), "--requests", str(rows), "--machines", str(machines)]
    told = runner.invoke(app, [str(config_file), *files])
    assert told.exit_code == 0, told.output
    assert "service level objectives" in told.output
    summary = json.loads(out.read_text())
    assert summary["requests"] == 40
    assert summary["unfinished"] == 0
    assert len(summary["slo"]["limits"]) == 9
    table = list(csv.DictReader(rows.open()))
    assert len(table) == 40
    assert table[0]["prompt_machine"].startswith("prompt-")
    assert table[0]["reason"] == "jsq:prompt-pool/token-pool"
    assert float(table[3]["e2e_s"]) > float(table[3]["ttft_s"]) > 0
    loads = list(csv.DictReader(machines.open()))
    assert [load["kind"] for load in loads] == ["h100-80gb"] * 2 + ["a100-80gb"] * 2


def test_parquet_holds_the_same_as_csv(config_file: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    result = run_experiment(load_config(config_file)).results[0]
    write_requests(result, tmp_path / "r.parquet")
    table = parquet.read_table(tmp_path / "r.parquet")
    assert np.allclose(table["e2e_s"].to_numpy(), result.e2e)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("llama2-70b", "llama9"), "llama9"),
        (("h100-80gb", "h900"), "h900"),
        (("count: 2", "count: 0"), "count"),
        (("trace:", "warmup: 3\ntrace:"), "warmup"),
        (("{file: trace.csv}", "{file: none.csv}"), "none.csv"),
        (("{file: trace.csv}", "{file: trace.csv, rate: 3}"), "duration_s"),
        (("trace:", "scheduler: {policy: best}\ntrace:"), "policy"),
        (("trace:", "slo: {fun: {50: 1}}\ntrace:"), "unknown SLO metric 'fun'"),
        (("trace:", "failures: [{machine: 9, at_s: 1}]\ntrace:"), "machine 9"),
        (("model: llama2-70b", "model: bloom-176b\ntensor_parallel: 2"), "bloom-176b|h100-80gb|tp2"),
        (("trace:", "warmup_s: 1000\ntrace:"), "warm-up"),
    ],
)
def test_bad_configs_say_what_is_wrong(config_file: Path, change: tuple[str, str], told: str) -> None:
    config_file.write_text(config_file.read_text().replace(*change))
    answer = runner.invoke(app, [str(config_file)])
    assert answer.exit_code in (ExitCode.CONFIG, ExitCode.FAILED)
    assert told in answer.output


def test_no_config_and_an_example() -> None:
    assert runner.invoke(app, []).exit_code == ExitCode.USAGE
    assert "machines:" in runner.invoke(app, ["--example"]).output


def test_seeds_give_intervals(config_file: Path) -> None:
    text = config_file.read_text().replace("{file: trace.csv}", "{file: trace.csv, rate: 15, duration_s: 20}")
    config_file.write_text(text + "seeds: [0, 1, 2]\nwarmup_s: 2\n")
    experiment = run_experiment(load_config(config_file))
    row = experiment.latencies()["ttft"]
    assert row["mean"].half_width is not None
    assert row["mean"].half_width > 0
    assert len({len(result.trace) for result in experiment.results}) > 1


def test_estimates_by_hand() -> None:
    found = Estimate.of([1.0, 2.0, 3.0])
    assert found.mean == pytest.approx(2.0)
    assert found.half_width == pytest.approx(4.303 / 3**0.5)
    assert Estimate.of([4.0]) == Estimate(4.0, None)


def test_slo_verdicts_turn_with_the_limits(config_file: Path) -> None:
    experiment = run_experiment(load_config(config_file))
    assert experiment.slo_met
    from splitwise.sim.config import catalog_of, reference_row

    config = load_config(config_file)
    row = reference_row(config, catalog_of(config))
    strict = evaluate(experiment.results[0], row, {"ttft": {50: 0.01}, "e2e": {50: 9.0}})
    assert not strict.met
    assert strict.worst.metric == "ttft"
    assert strict.worst.use > 1


def test_a_log_of_the_simulation_itself_compares_without_error(config_file: Path, tmp_path: Path) -> None:
    result = run_experiment(load_config(config_file)).results[0]
    log = tmp_path / "log.jsonl"
    later_mean = (result.last - result.second) / np.maximum(result.trace.output_tokens - 2, 1)
    with log.open("w") as file:
        for index in range(len(result.trace)):
            entry = {
                "arrived_unix_ns": 1_700_000_000_000_000_000 + round(result.trace.arrival[index] * 1e9),
                "prompt_tokens": int(result.trace.prompt_tokens[index]),
                "output_tokens": int(result.trace.output_tokens[index]),
                "timing": {
                    "ttft_us": round(result.ttft[index] * 1e6),
                    "second_us": round(result.second_token[index] * 1e6),
                    "tbt_mean_us": round(later_mean[index] * 1e6),
                    "tbt_max_us": round(result.tbt_max[index] * 1e6),
                    "e2e_us": round(result.e2e[index] * 1e6),
                },
            }
            file.write(json.dumps(entry) + "\n")
    assert len(load_trace(log)) == 40
    answer = runner.invoke(app, [str(config_file), "--compare", str(log), "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output)["differences"]
    assert {row["metric"] for row in found} == {"ttft", "second_token", "tbt_mean", "tbt_max", "e2e"}
    for row in found:
        assert row["simulated_s"] == pytest.approx(row["measured_s"], abs=2e-6)
    assert "e2e" in runner.invoke(app, [str(config_file), "--compare", str(log)]).output


def test_a_bad_log_names_its_line(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text('{"arrived_unix_ns": 1, "prompt_tokens": 1, "output_tokens": 1}\n{"prompt_tokens": 1}\n')
    with pytest.raises(TraceError, match=r"line 2: the field 'arrived_unix_ns' is missing"):
        load_log(log)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


def test_trace_commands(tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    raw.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2023-11-16 18:17:{second:02}.5,{100 + second},{5 + second}\n" for second in range(60))
    )
    own, made = tmp_path / "own.csv", tmp_path / "made.csv.gz"
    assert runner.invoke(trace_app, ["import", str(raw), str(own)]).exit_code == 0
    told = runner.invoke(trace_app, ["describe", str(own), "--json"])
    assert json.loads(told.output)["requests"] == 60
    assert "coefficient of variation" in runner.invoke(trace_app, ["describe", str(own)]).output
    wanted = ["synthesize", str(own), str(made), "--rate", "10", "--duration", "30"]
    assert runner.invoke(trace_app, wanted).exit_code == 0
    assert 200 < len(load_trace(made)) < 400
    bad = runner.invoke(trace_app, ["describe", str(tmp_path / "none.csv")])
    assert bad.exit_code == ExitCode.FAILED
    assert "cannot be read" in bad.output


@pytest.mark.parametrize(
    ("tokens", "timing", "mean", "longest"),
    [
        (4, {"second_us": 100, "tbt_mean_us": 40, "tbt_max_us": 50}, 60e-6, 100e-6),
        (4, {"second_us": 10, "tbt_mean_us": 40, "tbt_max_us": 50}, 30e-6, 50e-6),
        (2, {"second_us": 100, "tbt_mean_us": 0, "tbt_max_us": 0}, 100e-6, 100e-6),
        (1, {"second_us": 0, "tbt_mean_us": 0, "tbt_max_us": 0}, None, None),
        (4, {"second_us": 100}, None, None),
    ],
)
def test_measured_times_between_tokens_count_the_second_token(
    tmp_path: Path, tokens: int, timing: dict[str, int], mean: float | None, longest: float | None
) -> None:
    log = tmp_path / "log.jsonl"
    log.write_text(
        json.dumps({"arrived_unix_ns": 1, "prompt_tokens": 1, "output_tokens": tokens, "timing": timing})
    )
    measured = load_log(log).measured
    for metric, wanted in (("tbt_mean", mean), ("tbt_max", longest)):
        found = measured[metric][0]
        assert np.isnan(found) if wanted is None else found == pytest.approx(wanted)
