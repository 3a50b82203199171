"""What all commands share: errors as one line and an exit code, connections, output."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from splitwise.errors import (
    ConfigError,
    ExitCode,
    InvalidRequestError,
    NotRunningError,
    OverloadedError,
    SplitwiseError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from splitwise.client import Client

P = ParamSpec("P")
R = TypeVar("R")

RouterOption = Annotated[
    str | None, typer.Option(help="Router's host:port; default: $SPLITWISE_ROUTER, then the running `up`.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="Settings file; its tls section is used to connect.")
]
TimeoutOption = Annotated[float | None, typer.Option(help="Seconds after which the call is given up.")]

EXIT_CODES: tuple[tuple[type[SplitwiseError], ExitCode], ...] = (
    (ConfigError, ExitCode.CONFIG),
    (InvalidRequestError, ExitCode.USAGE),
    (NotRunningError, ExitCode.UNAVAILABLE),
    (UnavailableError, ExitCode.UNAVAILABLE),
    (OverloadedError, ExitCode.UNAVAILABLE),
)


def exit_code(error: SplitwiseError) -> ExitCode:
    """Return the exit code of a command that ended with `error`."""
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), ExitCode.FAILED)


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn our exceptions into one line on stderr and an exit code."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except SplitwiseError as error:
            typer.secho(f"splitwise: {error}", fg="red", err=True)
            raise typer.Exit(exit_code(error)) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None

    return run


def connect(router: str | None, config: Path | None = None, timeout: float | None = None) -> Client:
    """Return a client for the named router or the running cluster."""
    from splitwise.client import Client
    from splitwise.config import load_settings

    return Client(router, tls=load_settings(file=config).settings.tls, timeout=timeout)


def print_json(value: Any) -> None:
    """Print dataclasses, lists and plain values as JSON."""
    typer.echo(json.dumps(value, indent=2, default=_plain, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return str(value)
