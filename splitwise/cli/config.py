"""``splitwise config``: the settings as processes read them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
import yaml

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.errors import InvalidRequestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.config import Loaded

app = typer.Typer(no_args_is_help=True, help="Show or check the settings.")
File = Annotated[Path | None, typer.Argument(help="Settings file; default: $SPLITWISE_CONFIG.")]
Section = Annotated[
    str, typer.Option(help="Only this section and those that every process reads; flags are its own.")
]
Flags = Annotated[list[str] | None, typer.Argument(help="After --: flags as the process gets them.")]


@app.command()
@guarded
def show(file: File = None, flags: Flags = None, section: Section = "", as_json: JsonOption = False) -> None:
    """Print every setting with its value, where that came from, and whether a reload takes it up."""
    from splitwise.config import Settings, load_settings
    from splitwise.config.nearest import nearest

    if section and section not in Settings.model_fields:
        raise InvalidRequestError(f"--section: {section!r} is none{nearest(section, Settings.model_fields)}")
    words = list(flags or ())
    if file is not None and str(file).startswith("--"):  # flags without a file before them
        words, file = [str(file), *words], None
    loaded = load_settings(section or None, words, file=file)
    if as_json:
        print_json({key: facts for key, *_, facts in _lines(loaded, section)})
        return
    shown: tuple[str, ...] = ()
    for _, key, facts in _lines(loaded, section):
        for depth in range(len(key) - 1):
            if key[: depth + 1] != shown[: depth + 1]:
                typer.echo(f"{'  ' * depth}{key[depth]}:")
        shown = key
        text = yaml.safe_dump(facts["value"], default_flow_style=True, width=10**6)
        value = text.strip().removesuffix("...").strip()
        live = "; live" if facts["live"] else ""
        typer.echo(f"{'  ' * (len(key) - 1)}{key[-1]}: {value}  # {facts['from']}{live}")


@app.command()
@guarded
def check(file: File = None, as_json: JsonOption = False) -> None:
    """Say whether the settings are valid; the exit code is 78 when they are not."""
    from splitwise.config import load_settings

    given = len(load_settings(file=file).origins)
    if as_json:
        print_json({"valid": True, "given": given})
        return
    typer.echo(f"valid: {given} settings given, defaults for the rest")


def _lines(loaded: Loaded, section: str) -> Iterator[tuple[str, tuple[str, ...], dict[str, object]]]:
    """Yield each setting: its dotted name, its key, its value with origin and whether it is live."""
    from splitwise.config.reload import is_live, leaves

    content = loaded.settings.model_dump(mode="json")
    for key, field in leaves(*([section] if section else [])):
        value = content
        for name in key:
            value = value[name]
        yield ".".join(key), key, {"value": value, "from": loaded.origin(key), "live": is_live(field)}
