"""``splitwise provision``: which machines to buy for a workload."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitwise.cli.common import guarded, print_json
from splitwise.errors import ConfigError
from splitwise.provision.designs import Budget
from splitwise.workload.synthesize import Arrivals  # noqa: TC001 - typer reads it at run time

if TYPE_CHECKING:
    from splitwise.perf.catalog import Catalog
    from splitwise.provision.search import Answer

WIDTH = 130  # of the table when it goes to a file or a pipe
HELP = """\
Find the cluster to buy: which machines, how many for each phase, at what cost.

Two questions, one option each:

\b
  "We expect 70 requests/s of coding. What is the cheapest cluster?"
      splitwise provision azure-code --rate 70 --by cost
  "We have the power of 40 H100 machines. How much can they serve?"
      splitwise provision azure-conv --budget 40xh100-80gb --by power

\b
--by says what is minimized at a --rate, or what the --budget is of:
  cost      dollars per hour (a100-80gb 17.6, h100-80gb 38)
  power     units of provisioned power (a100-80gb 24.8, h100-80gb 44,
            h100-80gb-pcap 30.8)
  machines  machines

\b
Everything can stand in a YAML file instead of the workload, with own
machines, designs, prices, SLOs and limits; options go before it:
      splitwise provision --example > plan.yaml
      splitwise provision plan.yaml --rate 90

\b
Size names are P+T: P prompt machines and T token machines; one number is a
cluster that is not split. `margin` is the room that is left: at a --rate,
how much more of the rate the cluster was seen to serve; with a --budget,
the unused share of the tightest SLO. The last line says whether splitting
pays at all. Every answer was confirmed on a trace twice as long with two
more seeds. SLOs that nothing meets: exit status 1, with the nearest miss.

\b
SLOs are slowdowns against a request alone on an A100 machine; --slo names a
YAML file such as {ttft: {50: 2, 99: 6}, tbt: {99: 5}, e2e: {90: 1.5}}.
Without it: the nine of the Splitwise paper (ttft 2/3/6, tbt and e2e
1.25/1.5/5 at P50/P90/P99).
"""


class Rules(Enum):
    """Whose rules the simulation follows."""

    FAITHFUL = "faithful"
    COMPAT = "compat"


@guarded
def provision(
    workload: Annotated[
        str | None,
        typer.Argument(help="azure-code, azure-conv, a trace file (its sizes), or a .yaml plan."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Requests per second to serve.")] = None,
    budget: Annotated[
        str | None, typer.Option(help="What may be spent, in the unit of --by, or like 40xh100-80gb.")
    ] = None,
    by: Annotated[
        Budget | None, typer.Option(help="What is minimized, or what the budget is of; default: cost.")
    ] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="No cluster above this, such as power=1760 or machines=50; repeat."),
    ] = None,
    design: Annotated[
        list[str] | None, typer.Option(help="Design to try; repeat. Default: the paper's six, or the plan's.")
    ] = None,
    cap: Annotated[
        list[float] | None,
        typer.Option(help="GPU power cap of token machines to try, 0.5 to 1; repeat. Split designs only."),
    ] = None,
    slo: Annotated[Path | None, typer.Option(help="YAML file: metric to percentile to slowdown.")] = None,
    model: Annotated[str | None, typer.Option(help="LLM of the catalogue; default: llama2-70b.")] = None,
    mode: Annotated[
        Rules | None, typer.Option(help="compat: SplitwiseSim's rules, to compare with it.")
    ] = None,
    arrivals: Annotated[
        Arrivals | None,
        typer.Option(help="poisson; gamma: as bursty as the trace file; replay: its own gaps."),
    ] = None,
    duration: Annotated[
        float | None, typer.Option(help="Seconds of trace per simulation; default: 120.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Traces per simulation; default: 1.")] = None,
    largest: Annotated[
        int | None,
        typer.Option(help="Most machines of one phase that are tried; default: 40 at a rate."),
    ] = None,
    step: Annotated[
        float | None, typer.Option(help="With --budget: resolution in requests per second; default: 1.")
    ] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes; 0: all cores. Answers are equal.")] = 0,
    ray: Annotated[
        str | None,
        typer.Option(help="Run on the Ray cluster at this address (or auto) instead. Answers are equal."),
    ] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="Write the table here: .json, .csv or .parquet; repeat.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report, with pictures, here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answers as JSON.")] = False,
    example: Annotated[bool, typer.Option("--example", help="Print a plan to start from, and stop.")] = False,
) -> None:
    """Find the cluster to buy for a workload."""
    from splitwise.provision.plan import EXAMPLE, question
    from splitwise.provision.search import advice
    from splitwise.provision.solve import solve
    from splitwise.sim.workers import open_workers

    if example:
        typer.echo(EXAMPLE, nl=False)
        return
    given = {
        "rate": rate, "budget": budget, "by": by, "model": model, "mode": mode and mode.value,
        "arrivals": arrivals, "duration_s": duration, "seeds": seeds, "caps": cap,
        "limits": _limits(limit), "slo": None if slo is None else _slo(slo),
    }  # fmt: skip
    values, where = _values(workload, given, design, largest, step)
    _writable(out or [], report)
    asked = question(values, where)
    with (
        open_workers(asked.problem, workers or os.cpu_count() or 1, ray) as pool,
        _steps([one.name for one in asked.designs]) as steps,
    ):
        answers = solve(asked, pool, lambda one, done, rest: steps.update(one.name, done, rest))
    catalog = asked.problem.catalog
    told = advice(answers, catalog, asked.by, throughput=asked.throughput)
    rows = [row(answer, catalog) for answer in answers]
    if as_json:
        print_json({"answers": rows, "advice": told})
    else:
        _show(rows, told)
    for path in out or []:
        _write(rows, told, path)
    if report is not None:
        from splitwise.report.pages import write_report

        write_report(report, asked.problem, answers, asked.by, told, throughput=asked.throughput)
    if all(answer.size is None for answer in answers):
        raise typer.Exit(1)


def _steps(names: list[str]) -> Any:
    from splitwise.cli.progress import Steps

    return Steps(names, "clusters")


def _values(
    workload: str | None,
    given: dict[str, Any],
    designs: list[str] | None,
    largest: int | None,
    step: float | None,
) -> tuple[dict[str, Any], Path]:
    """Return a plan's values, options before those of the file, and what to call them in errors."""
    from splitwise.provision.plan import read_plan

    if workload is None:
        raise ConfigError("give a workload or a plan; --example prints a plan, --help explains")
    if Path(workload).suffix in (".yaml", ".yml"):
        where = Path(workload)
        values = read_plan(where)
    else:
        where, values = Path("options"), {"workload": workload}
    if given["rate"] is not None and given["budget"] is None:
        values.pop("budget", None)
    if given["budget"] is not None and given["rate"] is None:
        values.pop("rate", None)
    values.update({key: value for key, value in given.items() if value is not None})
    if designs:
        entries = values.get("designs") or []
        own = [{k: v for k, v in e.items() if k in designs} for e in entries if isinstance(e, dict)]
        named = {name for entry in own for name in entry}
        values["designs"] = [*filter(None, own), *(name for name in designs if name not in named)]
    search = dict(values.get("search") or {})
    if largest is not None:
        search.update({pool: [1, largest] for pool in ("prompt", "token")})
    if step is not None:
        search["step"] = step
    if search:
        values["search"] = search
    if isinstance(values.get("budget"), str):
        values["budget"] = _number_or_text(values["budget"])
    return values, where


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _limits(limits: list[str] | None) -> dict[str, float] | None:
    if not limits:
        return None
    found = {}
    for text in limits:
        kind, _, amount = text.partition("=")
        value = _number_or_text(amount)
        if kind not in {budget.value for budget in Budget} or isinstance(value, str):
            raise ConfigError(f"--limit {text}: must be like power=1760, cost=1500 or machines=40")
        found[kind] = value
    return found


def _slo(path: Path) -> Any:
    from splitwise.provision.plan import read_plan

    table = read_plan(path)
    if not table:
        raise ConfigError(f"{path}: no SLO in it; must map ttft, tbt or e2e to percentile: slowdown")
    return table


def _writable(out: list[Path], report: Path | None) -> None:
    """Refuse before the search what could not be written after it."""
    from splitwise.sim.export import check_target

    for path in out:
        check_target(path, (".json", ".csv", ".parquet"))
    if report is not None:
        check_target(report, (".html", ".htm"))


def row(answer: Answer, catalog: Catalog) -> dict[str, Any]:
    """Return one line of the table of answers."""
    from splitwise.provision.designs import total

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
        "note": answer.note,
    }


def _write(rows: list[dict[str, Any]], told: str, path: Path) -> None:
    from splitwise.sim.export import write_rows

    if path.suffix == ".json":
        write_rows({"answers": rows, "advice": told}, path)
    else:
        write_rows(rows, path)


def _show(rows: list[dict[str, Any]], told: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "design", "size", "SLOs", "requests/s", "$/h", "power", "machines", "tightest SLO", "margin"
    )
    for one in rows:
        size = f"{one['prompt_machines']}" + (f"+{one['token_machines']}" if one["token_hardware"] else "")
        tight = "" if one["slowdown"] is None else f"{one['slowdown']:.2f} of {one['limit']:g}"
        table.add_row(
            one["design"], size, "met" if one["met"] else "missed", f"{one['rate']:g}",
            f"{one['cost_per_hour']:g}", f"{one['power_units']:g}", str(one["machines"]),
            f"{one['tightest_slo'] or ''} {tight}", f"{one['margin']:.0%}" if one["met"] else "-",
        )  # fmt: skip
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    console.print(table)
    for one in rows:
        if one["note"]:
            console.print(one["note"], highlight=False)
    console.print(told, highlight=False)
