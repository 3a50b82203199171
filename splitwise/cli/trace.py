"""``splitwise trace``: import, describe and make traces."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.errors import ExitCode, SplitwiseError
from splitwise.workload.synthesize import Arrivals

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitwise.workload import Summary

app = typer.Typer(
    help="Import, describe and make traces (Azure, Mooncake, SplitwiseSim, a router's request log).",
    no_args_is_help=True,
)

Source = Annotated[Path, typer.Argument(help="Trace file: CSV, JSON lines or a JSON array; also .csv.gz.")]
Target = Annotated[Path, typer.Argument(help="CSV file to write; with .gz at the end it is compressed.")]
Sort = Annotated[bool, typer.Option(help="Put rows in order of arrival (needs 16 bytes of memory per row).")]
Drop = Annotated[bool, typer.Option("--drop-invalid", help="Leave out rows with no prompt or output tokens.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


def _guarded(work: Callable[[], None]) -> None:
    try:
        work()
    except (SplitwiseError, OSError) as error:
        typer.secho(str(error), fg="red", err=True)
        raise typer.Exit(ExitCode.FAILED) from None


@app.command(name="import")
def import_trace(
    source: Source, target: Target, sort: Sort = False, drop_invalid: Drop = False, as_json: AsJson = False
) -> None:
    """Turn any known trace into this program's CSV; streams, whatever its size."""
    from splitwise.workload import iter_chunks, load_trace, write_chunks

    def work() -> None:
        if sort:
            chunks = iter([load_trace(source, sort=True, drop_invalid=drop_invalid)])
        else:
            chunks = iter_chunks(source, drop_invalid=drop_invalid)
        _written(write_chunks(chunks, target), target, as_json)

    _guarded(work)


@app.command()
def describe(source: Source, drop_invalid: Drop = False, as_json: AsJson = False) -> None:
    """Say what a trace holds: sizes, rate, burstiness; streams, whatever its size."""
    from splitwise.workload import describe_chunks, iter_chunks

    def work() -> None:
        summary = describe_chunks(iter_chunks(source, drop_invalid=drop_invalid))
        typer.echo(json.dumps(summary.as_dict(), indent=2) if as_json else _told(summary))

    _guarded(work)


@app.command()
def synthesize(
    source: Source,
    target: Target,
    rate: Annotated[float, typer.Option(help="Requests per second.")],
    duration: Annotated[float, typer.Option(help="Seconds.")],
    arrivals: Annotated[
        Arrivals, typer.Option(help="poisson; gamma: as bursty as the source; replay: the source's own gaps.")
    ] = Arrivals.POISSON,
    independent: Annotated[
        bool, typer.Option(help="Draw prompt and output sizes apart, as some simulators do.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Equal seeds give equal traces.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make a trace with the sizes of another, at a set rate."""
    from splitwise.workload import load_trace, write_trace
    from splitwise.workload import synthesize as make

    def work() -> None:
        made = make(
            load_trace(source),
            rate=rate,
            duration=duration,
            arrivals=arrivals,
            joint=not independent,
            seed=seed,
        )
        _written(write_trace(made, target), target, as_json)

    _guarded(work)


def _written(requests: int, target: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"requests": requests, "file": str(target)}))
    else:
        typer.echo(f"{requests} requests written to {target}")


def _told(summary: Summary) -> str:
    lines = [
        f"requests     {summary.requests} in {summary.duration_s:.1f} s: {summary.rate:.3f} per second",
        f"busiest      {summary.peak_rate_1s} in one second",
        f"burstiness   {summary.cv:.2f} (coefficient of variation between arrivals; Poisson has 1)",
        f"correlation  {summary.correlation:+.3f} between prompt and output size",
        "tokens          mean     P50     P90     P99     max",
    ]
    for name, sizes in (("prompt", summary.prompt), ("output", summary.output)):
        lines.append(f"  {name:<9}{sizes.mean:9.1f}{sizes.p50:8}{sizes.p90:8}{sizes.p99:8}{sizes.max:8}")
    return "\n".join(lines)
