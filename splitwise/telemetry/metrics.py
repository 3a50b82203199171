"""Prometheus metrics: the registry of this process and its HTTP endpoint."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY, start_http_server

from splitwise.errors import ListenError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.config import Address

__all__ = ["REGISTRY", "serve_metrics"]


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
