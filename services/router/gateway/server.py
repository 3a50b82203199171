"""The gateway's listening socket and its end, inside a process that runs other things too."""

from __future__ import annotations

import asyncio
import socket
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from services.router.gateway.app import ExtraRoutes, make_app
from services.router.gateway.requests import GatewayOptions
from splitwise.errors import ConfigError, ListenError
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from services.router.gateway.backend import GatewayBackend
    from splitwise.config import Address

__all__ = ["Gateway", "GatewayOptions", "read_api_keys", "serve_gateway"]

# Accepted connections inherit these: a client that vanished without a word (no FIN, no
# RST) is noticed within about half a minute, and its request is cancelled.
_SOCKET_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)
BACKLOG = 1024


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway that listens; `address` has the port that was bound."""

    address: Address


@asynccontextmanager
async def serve_gateway(
    backend: GatewayBackend,
    address: Address,
    options: GatewayOptions | None = None,
    extra: ExtraRoutes | None = None,
) -> AsyncIterator[Gateway]:
    """Serve until the block is left; then refuse connections and let open answers finish.

    Raises `ListenError` when the address cannot be listened on.
    """
    options = options or GatewayOptions()
    if not options.api_keys and not address.is_loopback:
        get_logger().warning("gateway.open_to_all", address=str(address), remedy="set http_api_keys")
    runner = web.AppRunner(
        make_app(backend, options, extra),
        handle_signals=False,
        access_log=None,
        handler_cancellation=True,  # a client that leaves cancels its request
        shutdown_timeout=options.drain_s,
    )
    await runner.setup()
    try:
        listener = await _listen(address)
        await web.SockSite(runner, listener, backlog=BACKLOG).start()
        yield Gateway(address.with_port(listener.getsockname()[1]))
    finally:
        await runner.cleanup()


async def _listen(address: Address) -> socket.socket:
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        family, kind, protocol, _, where = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ListenError(f"router.http_listen: cannot listen on {address}: {error.strerror}") from None
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for level, option, value in _SOCKET_OPTIONS:
            listener.setsockopt(level, option, value)
        listener.bind(where)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ListenError(f"router.http_listen: cannot listen on {address}: {error.strerror}") from None
    return listener


def read_api_keys(path: Path) -> tuple[str, ...]:
    """Read a file of API keys, one a line; raises `ConfigError` when there is none in it.

    Empty lines and lines that begin with ``#`` are left out.
    """
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"router.http_api_keys: {path} cannot be read: {error}") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"router.http_api_keys: {path} has no key in it; write one a line")
    return keys
