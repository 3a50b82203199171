"""``splitwise power``: a node's power agent, looked at and operated; and power in ``splitwise status``."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.errors import UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

    from splitwise.client import Cluster, ClusterPower
    from splitwise.rpc.v1.power_pb2 import PowerDescription
    from splitwise.rpc.v1.power_pb2_grpc import PowerAgentStub

CALL_TIMEOUT_S = 10.0
app = typer.Typer(
    no_args_is_help=True, help="Look at a node's power agent, and give its GPUs their limits back."
)
AgentOption = Annotated[
    str | None,
    typer.Option("--agent", help="Power agent's host:port; default: power.listen of the settings."),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", help="Settings file; its power and tls sections are used to connect."),
]


@app.command()
@guarded
def status(agent: AgentOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Show every GPU: the limit that was requested, the one in force, the draw."""
    from splitwise.rpc.v1.power_pb2 import DescribePowerRequest

    with _agent(agent, config) as stub:
        _show(stub.Describe(DescribePowerRequest(), timeout=CALL_TIMEOUT_S), as_json=as_json)


@app.command()
@guarded
def restore(agent: AgentOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Give all GPUs their previous limits now; no caps are set until `resume`.

    Where the agent is dead, `python -m services.power --restore` does it on the node.
    """
    from splitwise.rpc.v1.power_pb2 import SuspendRequest

    with _agent(agent, config) as stub:
        _show(stub.Suspend(SuspendRequest(), timeout=CALL_TIMEOUT_S), as_json=as_json)


@app.command()
@guarded
def resume(agent: AgentOption = None, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Let caps be set again after `restore`."""
    from splitwise.rpc.v1.power_pb2 import SuspendRequest

    with _agent(agent, config) as stub:
        _show(stub.Suspend(SuspendRequest(undo=True), timeout=CALL_TIMEOUT_S), as_json=as_json)


def power_line(power: ClusterPower) -> str:
    """Return the cluster's power in one line."""
    budget = f"budget {power.budget:g} W" if power.budget else "no budget"
    line = f"power  {budget}, limits {power.enforced:g} W, draw {power.draw:g} W"
    if power.missing:
        line += f"; the budget cannot be met: {power.missing:g} W short of the least that can be set"
    if power.unmanaged:
        line += f"; {power.unmanaged} machines without a power agent"
    return line


def power_table(cluster: Cluster) -> Table:
    """Return the power of each machine that has an agent."""
    table = _watts_table("machine", "GPUs", "share", "cap", "enforced", "draw", "why", "problem")
    for machine in cluster.machines:
        power = machine.power
        if power is None:
            continue
        share = f"{power.share:g} W" if power.share else "-"
        why = (
            power.reason
            if power.share_reason in ("", "within-budget")
            else f"{power.reason}, {power.share_reason}"
        )
        watts = [share, *(f"{value:.0f} W" for value in (power.requested, power.enforced, power.draw))]
        table.add_row(machine.machine_id, str(power.gpus), *watts, why, power.problem)
    return table


def _show(power: PowerDescription, *, as_json: bool) -> None:
    from google.protobuf.json_format import MessageToDict
    from rich.console import Console

    if as_json:
        kept: dict[str, Any] = {
            "preserving_proto_field_name": True,
            "always_print_fields_with_no_presence": True,
        }
        print_json(MessageToDict(power, **kept))
        return
    console = Console()
    state = "reporting only" if power.reporting_only else "suspended" if power.suspended else "capping"
    caps = f"caps: prompt {power.prompt_cap}, token {power.token_cap}, mixed {power.mixed_cap}"
    console.print(f"node {power.node}  driver {power.driver or 'none'}  {state}  {caps}", highlight=False)
    if power.problem:
        console.print(power.problem, style="yellow", highlight=False)
    table = _watts_table("GPU", "range", "previous", "cap", "enforced", "draw", "why", "machines", "problem")
    for gpu in power.gpus:
        watts = (gpu.previous_watts, gpu.requested_watts, gpu.enforced_watts, gpu.draw_watts)
        table.add_row(
            f"{gpu.index} {gpu.uuid}",
            f"{gpu.floor_watts:g}-{gpu.highest_watts:g} W",
            *(f"{value:.0f} W" for value in watts),
            gpu.reason,
            ", ".join(gpu.machines),
            gpu.problem,
        )
    console.print(table)


def _watts_table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    right = {"GPUs", "range", "share", "previous", "cap", "enforced", "draw"}
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left")
    return table


@contextmanager
def _agent(address: str | None, config: Path | None) -> Iterator[PowerAgentStub]:
    """Yield a stub; a call that fails raises our exception."""
    import grpc

    from splitwise.config import Address, load_settings
    from splitwise.errors import ConfigError
    from splitwise.rpc.channels import open_sync_channel
    from splitwise.rpc.identity import Role
    from splitwise.rpc.status import to_exception
    from splitwise.rpc.v1.power_pb2_grpc import PowerAgentStub

    settings = load_settings(file=config).settings
    try:
        where = settings.power.listen if address is None else Address.parse(address)
    except ValueError as error:
        raise ConfigError(f"--agent: {error}") from None
    with open_sync_channel(where, tls=settings.tls, role=Role.POWER) as channel:
        try:
            yield PowerAgentStub(channel)
        except grpc.RpcError as error:
            failed = to_exception(error)
            if isinstance(failed, UnavailableError):
                raise UnavailableError(
                    f"cannot reach the power agent at {where}: is it running? ({failed.message}) If it is"
                    " dead, `python -m services.power --restore` on its node gives the limits back",
                    code=failed.code,
                ) from None
            raise failed from None
