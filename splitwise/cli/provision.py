"""``splitwise provision``: which machines to buy for a workload."""

from __future__ import annotations

import csv
import json
import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitwise.cli.common import guarded
from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget

if TYPE_CHECKING:
    from splitwise.perf.catalog import Catalog
    from splitwise.provision.designs import Design
    from splitwise.provision.probe import Problem
    from splitwise.provision.search import Answer

WIDTH = 130  # of the table when it goes to a file or a pipe
HELP = """\
Find the cluster to buy: which machine types, how many for each phase, at what cost and power.

Two questions, one option each:

\b
  "We expect 70 requests/s of coding. What is the cheapest cluster?"
      splitwise provision azure-code --rate 70 --by cost
  "We have the power of 40 H100 machines (1760 units). How much can they serve?"
      splitwise provision azure-conv --budget 1760 --by power

\b
--by says what is minimized at a --rate, or what the --budget is of:
  cost      dollars per hour (a100-80gb 17.6, h100-80gb 38)
  power     units of provisioned power (a100-80gb 24.8, h100-80gb 44, h100-80gb-pcap 30.8)
  machines  machines

\b
Size names are P+T: P prompt machines and T token machines; one number is a cluster that is
not split. `margin` is the room that is left: at a --rate, how much more of the rate the
cluster was seen to serve; with a --budget, the unused share of the tightest SLO. The last
line says whether splitting pays at all. Every answer was confirmed on a trace twice as long
with two more seeds. SLOs that nothing meets: exit status 1, with the nearest miss.

\b
SLOs are slowdowns against a request alone on an A100 machine; --slo names a YAML file such as
{ttft: {50: 2, 99: 6}, tbt: {99: 5}, e2e: {90: 1.5}}. Without it: the nine of the Splitwise
paper (ttft 2/3/6, tbt and e2e 1.25/1.5/5 at P50/P90/P99).
"""


class Rules(Enum):
    """Whose rules the simulation follows."""

    FAITHFUL = "faithful"
    COMPAT = "compat"


@guarded
def provision(
    workload: Annotated[str, typer.Argument(help="azure-code, azure-conv, or a trace file (its sizes).")],
    rate: Annotated[float | None, typer.Option(help="Requests per second to serve.")] = None,
    budget: Annotated[float | None, typer.Option(help="What may be spent, in the unit of --by.")] = None,
    by: Annotated[Budget, typer.Option(help="What is minimized, or what the budget is of.")] = Budget.COST,
    design: Annotated[
        list[str] | None, typer.Option(help="Design to try; repeat for several. Default: all known.")
    ] = None,
    designs: Annotated[
        Path | None, typer.Option(help="YAML file with own designs and machines; see docs/provisioner.md.")
    ] = None,
    cap: Annotated[
        list[float] | None,
        typer.Option(help="GPU power cap of token machines to try, 0.5 to 1; repeat. Split designs only."),
    ] = None,
    slo: Annotated[Path | None, typer.Option(help="YAML file: metric to percentile to slowdown.")] = None,
    model: Annotated[str, typer.Option(help="LLM of the catalogue.")] = "llama2-70b",
    mode: Annotated[
        Rules, typer.Option(help="compat: SplitwiseSim's rules, to compare with it.")
    ] = Rules.FAITHFUL,
    duration: Annotated[float, typer.Option(help="Seconds of trace per simulation.")] = 120.0,
    seeds: Annotated[int, typer.Option(min=1, help="Traces per simulation.")] = 1,
    largest: Annotated[
        int, typer.Option(min=1, help="With --rate: most machines of one phase that are considered.")
    ] = 40,
    step: Annotated[float, typer.Option(help="With --budget: resolution in requests per second.")] = 1.0,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: all cores. Answers are equal.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the answers here.")] = None,
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write the table here.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report, with pictures, here.")] = None,
) -> None:
    """Find the cluster to buy for a workload."""
    from splitwise.provision.designs import Size
    from splitwise.provision.probe import Prober
    from splitwise.provision.search import advice, fastest, smallest

    if (rate is None) == (budget is None):
        raise ConfigError("give either --rate (what must be served) or --budget (what may be spent)")
    if not duration > 0:
        raise ConfigError(f"--duration: must be positive, not {duration!r}")
    problem, chosen = _problem(
        workload, design or ["all"], designs, cap or [], slo, model, mode.value, duration, seeds
    )
    answers = []
    with Prober(problem, workers or os.cpu_count() or 1) as prober, _progress(len(chosen)) as step_done:
        for one in chosen:
            if rate is not None:
                answers.append(smallest(prober, one, rate, by, Size(largest, largest)))
            elif budget is not None:
                answers.append(fastest(prober, one, by, budget, step=step))
            step_done(one.name)
    told = advice(answers, problem.catalog, by, throughput=rate is None)
    rows = [_row(answer, problem.catalog) for answer in answers]
    _show(rows, told)
    if json_file is not None:
        json_file.write_text(json.dumps({"answers": rows, "advice": told}, indent=2) + "\n", encoding="utf-8")
    if csv_file is not None:
        with csv_file.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    if report is not None:
        from splitwise.report.pages import write_report

        write_report(report, problem, answers, by, told, throughput=rate is None)
    if all(answer.size is None for answer in answers):
        raise typer.Exit(1)


def _problem(
    workload: str, names: list[str], file: Path | None, caps: list[float], slo: Path | None,
    model: str, mode: str, duration: float, seeds: int,
) -> tuple[Problem, list[Design]]:  # fmt: skip
    from splitwise.perf.catalog import shipped
    from splitwise.perf.model import PerformanceModelError
    from splitwise.provision.probe import Problem
    from splitwise.provision.throughput import Load
    from splitwise.provision.workloads import choose, load_designs, with_caps
    from splitwise.provision.workloads import workload as sizes
    from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, reference_row
    from splitwise.sim.run import Mode
    from splitwise.sim.slo import TABLE_VI

    catalog = shipped()
    own: dict[str, Design] = {}
    if file is not None:
        catalog, own = load_designs(file, catalog)
    found: list[Design] = []
    for design in choose(names, own):
        if caps and design.token is not None and catalog.machine(design.token).gpu_power_cap == 1:
            catalog, several = with_caps(design, caps, catalog)
            found += several
        else:
            found.append(design)
    try:
        for design in found:
            for kind in (design.prompt, design.token or design.prompt):
                catalog.performance(model, kind)
    except PerformanceModelError as error:
        raise ConfigError(str(error)) from None
    config = SimulationConfig(
        model=model,
        machines=[MachinesPart(home="prompt", hardware=found[0].prompt, count=1)],
        trace=TracePart(file=Path(workload)),
        mode=Mode(mode),
    )
    load = Load(
        sizes(workload),
        duration,
        reference_row(config, catalog),
        slo=TABLE_VI if slo is None else _slo(slo),
        seeds=tuple(range(seeds)),
        joint=mode != "compat",
    )
    return Problem(config, catalog, load), found


def _slo(path: Path) -> dict[str, dict[int, float]]:
    import yaml
    from pydantic import TypeAdapter, ValidationError

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        table = TypeAdapter(dict[str, dict[int, float]]).validate_python(data)
    except (OSError, UnicodeDecodeError, yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path}: must map ttft, tbt or e2e to percentile: slowdown: {error}") from None
    wrong = [m for m in table if m not in ("ttft", "tbt", "e2e")]
    if wrong or not table:
        raise ConfigError(f"{path}: unknown metric {', '.join(wrong) or '(none given)'}: ttft, tbt or e2e")
    for metric, row in table.items():
        for percentile, limit in row.items():
            if not 0 < percentile <= 100 or not limit > 0:
                raise ConfigError(f"{path}: {metric}: {percentile}: {limit}: must be 1..100: above 0")
    return table


class _progress:  # noqa: N801 - used as a context manager
    """A bar over the designs with the time that is left, on stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(),
            TextColumn("{task.completed}/{task.total} designs"),
            TimeElapsedColumn(), TextColumn("left:"), TimeRemainingColumn(),
            console=Console(stderr=True), transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task("searching", total=total)

    def __enter__(self) -> _progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def __call__(self, name: str) -> None:
        self._bar.update(self._task, advance=1, description=f"{name} done")


def _row(answer: Answer, catalog: Catalog) -> dict[str, Any]:
    from splitwise.provision.search import total

    size, design, tight = answer.tried, answer.design, answer.tightest
    return {
        "design": design.name,
        "met": answer.size is not None,
        "prompt_machines": size.prompt,
        "token_machines": size.token,
        "prompt_hardware": design.prompt,
        "token_hardware": design.token,
        "rate": answer.rate,
        "cost_per_hour": round(total(design, size, catalog, Budget.COST), 2),
        "power_units": round(total(design, size, catalog, Budget.POWER), 2),
        "machines": size.machines,
        "tightest_slo": None if tight is None else f"{tight.metric} P{tight.percentile:g}",
        "slowdown": None if tight is None else tight.measured,
        "limit": None if tight is None else tight.limit,
        "margin": answer.margin,
        "simulated_clusters": answer.probes,
    }


def _show(rows: list[dict[str, Any]], told: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "design", "size", "SLOs", "requests/s", "$/h", "power", "machines", "tightest SLO", "margin"
    )
    for row in rows:
        size = f"{row['prompt_machines']}" + (f"+{row['token_machines']}" if row["token_hardware"] else "")
        tight = "" if row["slowdown"] is None else f"{row['slowdown']:.2f} of {row['limit']:g}"
        table.add_row(
            row["design"], size, "met" if row["met"] else "missed", f"{row['rate']:g}",
            f"{row['cost_per_hour']:g}", f"{row['power_units']:g}", str(row["machines"]),
            f"{row['tightest_slo'] or ''} {tight}", f"{row['margin']:.0%}" if row["met"] else "-",
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    console.print(told, highlight=False)
