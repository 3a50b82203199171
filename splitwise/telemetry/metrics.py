"""Prometheus metrics: the registry of this process and its HTTP endpoint.

Names are ``splitwise_<process>_<what>_<unit>``; every one is explained in ``docs/telemetry.md``.
"""

from __future__ import annotations

from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, Info, disable_created_metrics, start_http_server

from splitwise.errors import ListenError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.config import Address

__all__ = [
    "REGISTRY",
    "TOKEN_BUCKETS",
    "TRANSFER_BUCKETS",
    "WAIT_BUCKETS",
    "identify_process",
    "serve_metrics",
]

# A second series for each counter and histogram that says when it began; the process's start says it, too.
disable_created_metrics()  # type: ignore[no-untyped-call]

# Upper bounds in seconds, fine where the targets are: TBT some tens of milliseconds, TTFT below a second.
TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)
WAIT_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 5, 10, 30, 60, 120)
TRANSFER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)


_PROCESS = Info("splitwise_process", "Which process this is: always 1")


def identify_process(service: str, name: str) -> None:
    """Say in the metrics which process this is."""
    _PROCESS.info({"service": service, "name": name, "version": version("splitwise")})


@contextmanager
def serve_metrics(address: Address | None) -> Iterator[Address | None]:
    """Serve ``/metrics`` from a daemon thread; yields the bound address. None serves nothing.

    Raises `ListenError` when the address cannot be listened on.
    """
    if address is None:
        yield None
        return
    try:
        server, thread = start_http_server(address.port, address.host, REGISTRY)
    except OSError as error:
        raise ListenError(f"telemetry.metrics_listen: cannot listen on {address}: {error.strerror}") from None
    try:
        yield address.with_port(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
