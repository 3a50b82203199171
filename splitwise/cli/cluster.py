"""``splitwise status``, ``explain`` and ``drain``: a running cluster, looked at and operated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.cli.common import ConfigOption, JsonOption, RouterOption, connect, guarded, print_json
from splitwise.cli.power import power_line, power_table

if TYPE_CHECKING:
    from rich.table import Table

    from splitwise.client import Cluster, DecisionRecord

CALL_TIMEOUT_S = 10.0


@guarded
def status(router: RouterOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show machines, pools, queues and counters."""
    from rich.console import Console

    with connect(router, config, CALL_TIMEOUT_S) as client:
        cluster = client.cluster()
        address = client.address
    if as_json:
        print_json(cluster)
        return
    models = ", ".join(f"{model.name}{'' if model.serving else ' (not served)'}" for model in cluster.models)
    console = Console()
    console.print(f"router {address}  policy {cluster.policy}  models {models or 'none'}", highlight=False)
    console.print(
        f"{cluster.running} running, {cluster.queued} queued; since start: "
        + ", ".join(f"{count} {name}" for name, count in cluster.counters.items()),
        highlight=False,
    )
    console.print(_table(cluster))
    if cluster.power is not None and any(machine.power is not None for machine in cluster.machines):
        console.print(power_line(cluster.power), highlight=False)
        console.print(power_table(cluster))


@guarded
def explain(
    request_id: Annotated[str, typer.Argument(help="The request's id, as `generate` prints it.")],
    router: RouterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say why a request ran where it ran."""
    with connect(router, config, CALL_TIMEOUT_S) as client:
        decisions = client.explain(request_id)
    if as_json:
        print_json(decisions)
        return
    for decision in decisions:
        where = f"{decision.prompt_machine} -> {decision.token_machine}" if decision.prompt_machine else ""
        typer.echo(f"{decision.at * 1e3:9.1f} ms  {decision.kind}  {where}  ({decision.reason})")
        for phase in ("prompt", "token"):
            _print_candidates(decision, phase)


def _print_candidates(decision: DecisionRecord, phase: str) -> None:
    """Print what the machine of one phase was chosen from; * marks it."""
    weighed = [candidate for candidate in decision.candidates if candidate.phase == phase]
    if not weighed:
        return
    typer.echo(f"{'':13}for the {phase} phase:")
    width = max(len(candidate.machine_id) for candidate in weighed)
    for candidate in weighed:
        mark = "*" if candidate.chosen else " "
        cached = f", {candidate.cached_tokens} tokens cached" if candidate.cached_tokens else ""
        typer.echo(
            f"{'':13}{mark} {candidate.machine_id:{width}}  {candidate.pool} pool,"
            f" {candidate.queue_tokens} tokens queued,"
            f" {candidate.kv_blocks_used}/{candidate.kv_blocks} KV blocks{cached}"
        )
    more = decision.left_out.get(phase, 0)
    if more:
        typer.echo(f"{'':15}and {more} more machines")


@guarded
def drain(
    machine_id: Annotated[str, typer.Argument(help="The machine, as `status` shows it.")],
    undo: Annotated[bool, typer.Option("--undo", help="Give it work again.")] = False,
    router: RouterOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Give a machine no new work; what runs on it finishes."""
    with connect(router, config, CALL_TIMEOUT_S) as client:
        state = client.drain(machine_id, undo=undo)
    if as_json:
        print_json({"machine_id": machine_id, "state": state})
    else:
        typer.echo(f"{machine_id} is {state}")


def _table(cluster: Cluster) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "machine",
        "state",
        "pool",
        "prompts",
        "tokens",
        "pending",
        "KV blocks",
        "engine",
        "address",
    ):
        table.add_column(name, justify="right" if name in {"prompts", "tokens", "pending"} else "left")
    for machine in cluster.machines:
        pool = machine.pool if machine.pool == machine.home_pool else f"{machine.pool} ({machine.home_pool})"
        table.add_row(
            machine.machine_id,
            machine.state,
            pool,
            str(machine.prompt_requests),
            str(machine.token_requests),
            str(machine.pending_prompt_tokens),
            f"{machine.kv_blocks_used}/{machine.kv_blocks}",
            machine.engine,
            machine.address,
        )
    return table
