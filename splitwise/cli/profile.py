"""``splitwise profile``: measure a running cluster, or read profiles, and fit a performance model."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.errors import ExitCode, SplitwiseError

if TYPE_CHECKING:
    from rich.console import Console

    from splitwise.perf.fitting import FitReport
    from splitwise.perf.model import PerformanceModel
    from splitwise.perf.profile import Plan
    from splitwise.perf.profiles import ProfilePoint


def profile(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Profiles to fit instead of measuring: our own, a splitwise-sim CSV, or vLLM's benchmark "
            "JSON named like in512-out128-batch8.json."
        ),
    ] = None,
    hardware: Annotated[
        str, typer.Option(help="Name of the machine type; needed to measure, and for vLLM's files.")
    ] = "",
    model: Annotated[str, typer.Option(help="Model to measure; default: the only one.")] = "",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="GPUs that one engine uses.")] = 1,
    router: Annotated[
        str | None, typer.Option(help="Router's host:port; default: the running cluster.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where measured points are written.")] = Path("profile.json"),
    fits: Annotated[
        Path | None, typer.Option(help="Folder for the fitted models, one JSON file each, for a catalogue.")
    ] = None,
    output_tokens: Annotated[int, typer.Option(min=8, help="Tokens that each request makes.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="How often each point is measured.")] = 5,
    max_prompt: Annotated[int, typer.Option(min=256, help="Longest prompt that is measured.")] = 8192,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch that is measured.")] = 64,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON.")] = False,
) -> None:
    """Measure phase times (one prompt and one token machine, without other load) and fit a model.

    Prints the error on held-out points, what was left out, and what is extrapolated.
    """
    from rich.console import Console

    console = Console(stderr=True)
    try:
        if files:
            points = _read(files, model, hardware, tensor_parallel)
        else:
            plan = _plan(output_tokens, repeats, max_prompt, max_batch)
            points = _measure(hardware, model, tensor_parallel, router, out, plan, console)
        _fit(points, fits, as_json)
    except (SplitwiseError, OSError) as error:
        console.print(str(error), style="red", highlight=False, soft_wrap=True)
        raise typer.Exit(ExitCode.FAILED) from None


def _plan(output_tokens: int, repeats: int, max_prompt: int, max_batch: int) -> Plan:
    from splitwise.perf.profile import Plan

    return Plan(
        prompt_tokens=tuple(tokens for tokens in Plan().prompt_tokens if tokens <= max_prompt),
        batches=tuple(batch for batch in Plan().batches if batch <= max_batch),
        output_tokens=output_tokens,
        repeats=repeats,
    )


def _read(files: list[Path], model: str, hardware: str, tensor_parallel: int) -> list[ProfilePoint]:
    from splitwise.perf.profiles import read_profile

    return read_profile(files, model=model, hardware=hardware, tensor_parallel=tensor_parallel)


def _measure(
    hardware: str,
    model: str,
    tensor_parallel: int,
    router: str | None,
    out: Path,
    plan: Plan,
    console: Console,
) -> list[ProfilePoint]:
    from splitwise.client.aio import AsyncClient
    from splitwise.perf.profile import ProfileResult, profile_cluster
    from splitwise.perf.profiles import write_profile

    if not hardware:
        console.print("--hardware: name the machine type that is measured", style="red")
        raise typer.Exit(ExitCode.USAGE)

    async def measure() -> ProfileResult:
        async with AsyncClient(router) as client:
            return await profile_cluster(
                client,
                hardware=hardware,
                model=model,
                tensor_parallel=tensor_parallel,
                plan=plan,
                progress=lambda line: console.print(line, highlight=False),
            )

    result = asyncio.run(measure())
    write_profile(out, result.points, result.notes)
    console.print(f"{len(result.points)} points written to {out}", highlight=False)
    return result.points


def _fit(points: list[ProfilePoint], fits: Path | None, as_json: bool) -> None:
    from splitwise.perf.catalog import save_fit
    from splitwise.perf.fitting import fit, groups, report

    done: list[tuple[PerformanceModel, FitReport]] = [
        (fit(group, source="splitwise profile"), report(group)) for group in groups(points).values()
    ]
    if as_json:
        typer.echo(json.dumps([asdict(told) for _, told in done], indent=2))
    else:
        for _, told in done:
            typer.echo("\n".join(told.lines()))
    if fits is None:
        return
    fits.mkdir(parents=True, exist_ok=True)
    for model, _ in done:
        save_fit(fits / f"{model.name.replace('|', '-')}.json", model)
