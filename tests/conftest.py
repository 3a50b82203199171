"""Fixtures for all tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from splitwise.config import Address
from tests.support.scripted_router import ServerThread

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from splitwise.config import TlsSettings

# Kernels are compiled inside the first example, and the machine may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerThread]]:
    """Start scripted routers; all are stopped at the end."""
    servers: list[ServerThread] = []

    def start(address: str = "127.0.0.1:0", tls: TlsSettings | None = None) -> ServerThread:
        servers.append(ServerThread(Address.parse(address), tls))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def server(serve: Callable[..., ServerThread]) -> ServerThread:
    return serve()
