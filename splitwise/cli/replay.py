"""``splitwise replay``: a router's event log through the scheduler again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TextIO

    from splitwise.scheduling.eventlog import Step

LogArgument = Annotated[Path, typer.Argument(help="An event log (`router.event_log`), or its FILE.1.")]
RequestOption = Annotated[str | None, typer.Option("--request", help="Tell this request's story as well.")]


@guarded
def replay(log: LogArgument, request: RequestOption = None, as_json: JsonOption = False) -> None:
    """Run a recorded event log through the scheduler and say whether it decides the same.

    Exit code 1 when it does not: the first difference is named with its line.
    """
    from splitwise.scheduling.eventlog import EventLogError, ReplayError, steps

    events = 0
    decided: Counter[str] = Counter()
    difference = None
    try:
        with log.open(encoding="utf-8") as file:
            for step in steps(_whole_lines(file)):
                events += 1
                decided.update(type(decision).__name__ for decision in step.recorded)
                if request is not None and not as_json:
                    _tell(step, request)
                step.check()
    except ReplayError as found:
        difference = str(found)
    except OSError as error:
        raise ConfigError(f"{log}: {error.strerror}") from None
    except (EventLogError, UnicodeDecodeError) as error:
        raise ConfigError(f"{log}: {error}") from None
    if as_json:
        print_json({"events": events, "decisions": dict(decided), "difference": difference})
    elif difference is None:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(decided.items()))
        typer.echo(f"{log}: {events} events, decided as recorded ({counts or 'no decisions'})")
    else:
        typer.echo(f"{log}: decided otherwise than recorded\n{difference}")
    if difference is not None:
        raise typer.Exit(1)


def _whole_lines(file: TextIO) -> Iterator[str]:
    """Leave out a last line without an end: its router was killed while it wrote."""
    for line in file:
        if line.endswith("\n"):
            yield line


def _tell(step: Step, request_id: str) -> None:
    """Print an event and its decisions if they are about a request, with what was weighed."""
    from splitwise.scheduling.decisions import Assign

    about = [d for d in step.decided if getattr(d, "request_id", None) == request_id]
    if not about and getattr(step.event, "request_id", None) != request_id:
        return
    typer.echo(f"{step.event}")
    for decision in about:
        typer.echo(f"  {decision}")
        for seen in decision.weighed.unpack() if isinstance(decision, Assign) else ():
            typer.echo(
                f"    {'*' if seen.chosen else ' '} {seen.machine_id}  {seen.phase.value} phase,"
                f" {seen.pool.value} pool, {seen.queue_tokens} tokens queued,"
                f" {seen.kv_blocks_used}/{seen.kv_blocks} KV blocks"
            )
