"""``splitwise config``: the settings as processes read them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
import yaml

from splitwise.cli.common import JsonOption, guarded, print_json

app = typer.Typer(no_args_is_help=True, help="Show or check the settings.")
File = Annotated[Path | None, typer.Argument(help="Settings file; default: $SPLITWISE_CONFIG.")]


@app.command()
@guarded
def show(file: File = None, as_json: JsonOption = False) -> None:
    """Print all settings: defaults, file and environment put together."""
    from splitwise.config import load_settings

    loaded = load_settings(file=file)
    content = loaded.settings.model_dump(mode="json")
    if as_json:
        print_json(content)
        return
    typer.echo(yaml.safe_dump(content, sort_keys=False), nl=False)
    for key, origin in sorted(loaded.origins.items()):
        typer.echo(f"# {'.'.join(key)}: from {origin}")


@app.command()
@guarded
def check(file: File = None) -> None:
    """Say whether the settings are valid; the exit code is 78 when they are not."""
    from splitwise.config import load_settings

    given = len(load_settings(file=file).origins)
    typer.echo(f"valid: {given} settings given, defaults for the rest")
