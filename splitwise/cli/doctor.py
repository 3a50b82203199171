"""``splitwise doctor``: can this host run a cluster? Each line says what was found and what to do."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it at run time
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.errors import ExitCode

if TYPE_CHECKING:
    from splitwise.config import Settings
    from splitwise.doctor import Finding

COLOURS = {"ok": "green", "warning": "yellow", "failure": "red"}


@guarded
def doctor(
    as_json: JsonOption = False,
    config: Annotated[Path | None, typer.Option("--config", help="Settings file to check against.")] = None,
) -> None:
    """Check versions, memory, limits, namespaces, UCX with real puts, RDMA, GPUs, power limits and ports.

    The exit code is 1 when a line is a failure.
    """
    from splitwise.config import load_settings

    findings = examine(load_settings(file=config).settings, config)
    if as_json:
        print_json(findings)
    else:
        for finding in findings:
            mark = typer.style(f"{finding.verdict:<8}", fg=COLOURS[finding.verdict])
            typer.echo(f"{mark} {finding.check:<24} {finding.found}")
            if finding.remedy:
                typer.echo(f"{'':33} -> {finding.remedy}")
    if any(finding.verdict == "failure" for finding in findings):
        raise typer.Exit(ExitCode.FAILED)


def examine(settings: Settings, config: Path | None) -> list[Finding]:
    """Run every check on this host."""
    from splitwise.doctor import gpu, host, network

    rdma_wanted = any(
        word.startswith(("rc", "dc", "ud", "ib")) for word in (settings.kvd.ucx.tls or "").split(",")
    )
    devices = network.rdma(expected=rdma_wanted)
    has_rdma = any(finding.check == "RDMA device" for finding in devices)
    return [
        *host.versions(),
        host.memory(),
        host.shared_memory(),
        host.memlock(),
        *host.namespaces(),
        *network.ucx(config),
        *devices,
        *gpu.gpus(settings.power.nvml, rdma=has_rdma),
        *host.ports(settings),
        host.runtime_folder(),
    ]
