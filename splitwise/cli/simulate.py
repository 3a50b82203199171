"""``splitwise simulate``: run a trace on a described cluster and say how it went."""

from __future__ import annotations

import json
import os
from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.errors import ConfigError, ExitCode, SplitwiseError

if TYPE_CHECKING:
    from rich.console import Console

    from splitwise.sim.compare import Difference
    from splitwise.sim.experiment import Experiment

TABLES = (".csv", ".parquet")
EXAMPLE = """\
model: llama2-70b
machines:
  - {home: prompt, hardware: h100-80gb, count: 25}
  - {home: token, hardware: h100-80gb, count: 15}
trace: {file: trace.csv, rate: 70, duration_s: 600}   # without a rate: the trace as it is
seeds: [0, 1, 2]
warmup_s: 30
"""


def simulate(
    config: Annotated[Path | None, typer.Argument(help="YAML file that describes cluster and trace.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the summary as JSON here.")] = None,
    requests: Annotated[
        Path | None, typer.Option(help="Write one row per request here: .csv or .parquet (first seed).")
    ] = None,
    machines: Annotated[
        Path | None, typer.Option(help="Write one row per machine here: .csv or .parquet (first seed).")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="A router's request log: replay it and say how far the simulation is from it."),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write an HTML report, with pictures, here (first seed).")
    ] = None,
    show: Annotated[
        list[int] | None,
        typer.Option(help="Request whose way over time the report shows, by its row from 0; repeat."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes for several seeds; 0: all cores. Results are equal.")
    ] = 0,
    ray: Annotated[
        str | None,
        typer.Option(help="Run the seeds on the Ray cluster at this address (or auto). Results are equal."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    example: Annotated[bool, typer.Option(help="Print a config to start from, and stop.")] = False,
) -> None:
    """Simulate a cluster: latencies, SLOs, utilisation and energy for a trace."""
    from rich.console import Console

    console = Console(stderr=True)
    if example:
        typer.echo(EXAMPLE, nl=False)
        return
    if config is None:
        console.print("give a config file, or see --example for one to start from", style="red")
        raise typer.Exit(ExitCode.USAGE)
    try:
        if compare is not None:
            _compare(config, compare, as_json)
            return
        pages = (".html", ".htm")
        targets = ((out, (".json",)), (requests, TABLES), (machines, TABLES), (report, pages))
        _check_targets([(path, kinds) for path, kinds in targets if path is not None])
        experiment = _run(config, workers or os.cpu_count() or 1, ray, console)
        _write(experiment, out, requests, machines)
        if report is not None:
            from splitwise.report.pages import write_run_report

            write_run_report(report, experiment, show or [])
        if as_json:
            typer.echo(json.dumps(experiment.summary(), indent=2))
        else:
            _show(experiment)
    except SplitwiseError as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(ExitCode.CONFIG if isinstance(error, ConfigError) else ExitCode.FAILED) from None
    except OSError as error:
        console.print(f"cannot write the results: {error}", style="red", soft_wrap=True)
        raise typer.Exit(ExitCode.FAILED) from None


def _check_targets(targets: list[tuple[Path, tuple[str, ...]]]) -> None:
    """Refuse before the simulation what could not be written after it."""
    from splitwise.sim.export import check_target

    for path, kinds in targets:
        check_target(path, kinds)


def _run(config: Path, processes: int, ray: str | None, console: Console) -> Experiment:
    from splitwise.cli.progress import Steps
    from splitwise.sim.config import load_config
    from splitwise.sim.experiment import run_experiment

    with Steps(["simulating"], "seeds", console) as steps:
        return run_experiment(
            load_config(config),
            lambda done, total: steps.update("simulating", done, total - done),
            processes=processes,
            ray=ray,
        )


def _write(experiment: Experiment, out: Path | None, requests: Path | None, machines: Path | None) -> None:
    from splitwise.sim.export import write_machines, write_requests, write_summary

    if out is not None:
        write_summary(experiment, out)
    if requests is not None:
        write_requests(experiment.results[0], requests)
    if machines is not None:
        write_machines(experiment.results[0], machines)


def _show(experiment: Experiment) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    summary = experiment.summary()
    seeds = len(experiment.results)
    console.print(
        f"{summary['model']}, {summary['mode']}: {summary['requests']} requests in {seeds} runs, "
        f"{summary['unfinished']} unfinished, {summary['cost_per_hour']:.0f} $/h"
    )
    table = Table("metric", "mean", "P50", "P90", "P99", "max", title="seconds (95 % interval over seeds)")
    for metric, row in experiment.latencies().items():
        cells = [
            f"{value.mean:.4f}" + ("" if value.half_width is None else f" ±{value.half_width:.4f}")
            for value in row.values()
        ]
        table.add_row(metric, *cells)
    console.print(table)
    slo = Table("metric", "percentile", "slowdown", "limit", "", title="service level objectives")
    for limit in summary["slo"]["limits"]:
        mean = limit["slowdown"]["mean"]
        told = "-" if mean is None else f"{mean:.2f}"
        met = "met" if limit["met"] else "broken"
        slo.add_row(limit["metric"], f"P{limit['percentile']}", told, f"{limit['limit']:g}", met)
    console.print(slo)
    loads = Table("machine", "kind", "busy", "mean batch", "KV peak", "link", "energy kWh", title="machines")
    for load in experiment.results[0].machine_loads():
        kwh = load.energy_joules / 3.6e6
        loads.add_row(
            load.name, load.kind, f"{load.utilisation:.0%}", f"{load.mean_batch:.1f}",
            f"{load.memory_peak:.0%}", f"{load.link_utilisation:.0%}", f"{kwh:.2f}",
        )  # fmt: skip
    console.print(loads)
    for line in summary["extrapolated"]:
        console.print(f"note: {line}", highlight=False)


def _compare(config: Path, log_path: Path, as_json: bool) -> None:
    from splitwise.sim.compare import compare, load_log
    from splitwise.sim.config import build_cluster, catalog_of, load_config, scheduler_of
    from splitwise.sim.run import simulate as run

    settings = load_config(config)
    log = load_log(log_path)
    cluster = build_cluster(settings, catalog_of(settings))
    result = run(log.trace, cluster, mode=settings.mode, scheduler=scheduler_of(settings))
    differences = compare(log, result)
    if as_json:
        rows = [
            {
                "metric": d.metric,
                "statistic": d.statistic,
                "measured_s": d.measured,
                "simulated_s": d.simulated,
            }
            for d in differences
        ]
        typer.echo(json.dumps({"requests": len(log.trace), "differences": rows}, indent=2))
    else:
        _show_differences(differences, len(log.trace))


def _show_differences(differences: list[Difference], requests: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("metric", "", "measured s", "simulated s", "error", title=f"{requests} requests")
    for d in differences:
        table.add_row(d.metric, d.statistic, f"{d.measured:.4f}", f"{d.simulated:.4f}", f"{d.error:+.1%}")
    Console().print(table)
