"""The `splitwise` command: all subcommands."""

from __future__ import annotations

import typer

from splitwise.cli import (
    cluster,
    config,
    doctor,
    health,
    power,
    profile,
    provision,
    replay,
    simulate,
    talk,
    trace,
    up,
)

app = typer.Typer(
    name="splitwise",
    help="LLM serving with the prompt phase and the token phase on different machines.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,  # locals may hold prompts
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(up.up)
app.command()(up.demo)
app.command()(talk.generate)
app.command()(talk.chat)
app.command()(cluster.status)
app.command()(cluster.explain)
app.command()(cluster.drain)
app.command()(replay.replay)
app.add_typer(config.app, name="config")
app.add_typer(power.app, name="power")
app.command()(health.health)
app.command()(doctor.doctor)
app.command()(simulate.simulate)
app.command(help=provision.HELP)(provision.provision)
app.add_typer(trace.app, name="trace")
app.command()(profile.profile)


def main() -> None:
    """Entry point of the `splitwise` command."""
    app()


if __name__ == "__main__":
    main()
