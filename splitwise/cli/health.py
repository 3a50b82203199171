"""``splitwise health``: does a process take work? For health checks of containers, and for people."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.cli.common import ConfigOption, JsonOption, guarded, print_json
from splitwise.errors import ConfigError, ExitCode, RemoteError

if TYPE_CHECKING:
    from splitwise.config import TlsSettings
    from splitwise.rpc.identity import Role

PAUSE_S = 0.2
# What the gRPC health protocol answers, by number (grpc/health/v1/health.proto).
SERVING = "SERVING"
UNREACHABLE = "UNREACHABLE"


@guarded
def health(
    address: Annotated[str, typer.Argument(help="host:port of the process (its gRPC port).")],
    role: Annotated[
        str | None,
        typer.Option(help="With TLS, what the process must be by its certificate: router, machine, kvd."),
    ] = None,
    service: Annotated[str, typer.Option(help="One gRPC service; default: the process as a whole.")] = "",
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait until it takes work.")] = 0.0,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for one question.")] = 5.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Ask a router, machine or KV daemon whether it takes work: exit code 0 if it does, else 69."""
    from splitwise.config import load_settings

    tls = load_settings(file=config).settings.tls
    must_be = _role(role, tls)
    end = time.monotonic() + wait
    status, detail = _ask(address, must_be, service, timeout, tls)
    while status != SERVING and time.monotonic() < end:
        time.sleep(PAUSE_S)
        status, detail = _ask(address, must_be, service, timeout, tls)
    if as_json:
        print_json({"address": address, "service": service, "status": status, "detail": detail})
    else:
        typer.echo(f"{address} is {status}" + (f": {detail}" if detail else ""))
    if status != SERVING:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def _role(name: str | None, tls: TlsSettings) -> Role | None:
    from splitwise.rpc.identity import Role

    if name is None and tls.on:
        raise ConfigError("--role: needed with TLS; say what must be there: router, machine or kvd")
    try:
        return None if name is None else Role(name)
    except ValueError:
        raise ConfigError(f"--role {name!r}: must be router, machine or kvd") from None


def _ask(address: str, role: Role | None, service: str, timeout: float, tls: TlsSettings) -> tuple[str, str]:
    """Return the status by name, and what was wrong when there was no answer."""
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from splitwise.config import Address
    from splitwise.rpc.channels import open_sync_channel
    from splitwise.rpc.status import to_exception

    try:
        where = Address.parse(address)
    except ValueError as error:
        raise ConfigError(f"address: {error}") from None
    with open_sync_channel(where, tls=tls, role=role) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
        except grpc.RpcError as error:
            return _failed(to_exception(error), service)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), ""


def _failed(error: RemoteError, service: str) -> tuple[str, str]:
    if error.code == "NOT_FOUND":
        return "SERVICE_UNKNOWN", f"it has no service {service!r}"
    return UNREACHABLE, error.message
