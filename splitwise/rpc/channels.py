"""How every gRPC connection of the project is made: one way to listen, one to connect.

Both ends get options that agree (a server that allows pings less often than its clients
send them closes the connection with ``too_many_pings``), limits above our own, so that an
oversized prompt meets our error and not the transport's, and TLS where it is set.
"""

from __future__ import annotations

import ssl
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from splitwise.errors import ConfigError, ListenError
from splitwise.rpc.identity import Guard, server_name
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from splitwise.config import Address, TlsSettings
    from splitwise.rpc.identity import Role

# Our own limit on a prompt is 4 MiB of text; ids of such a prompt take up to 5 bytes each.
MESSAGE_BYTES = 64 * 2**20
KEEPALIVE_MS = 20_000
KEEPALIVE_TIMEOUT_MS = 10_000
WATCHED_KEEPALIVE_MS = 200
# Half of the shortest interval at which clients ping, so that jitter never strikes.
PING_ALLOWED_MS = WATCHED_KEEPALIVE_MS // 2
MAX_PENDING_CALLS = 65_536
# How long one attempt to connect may take, which is what grpc's min_reconnect_backoff means. A TLS
# handshake with a loaded host takes its time; a refused attempt ends at once, whatever is said here.
CONNECT_MS = 5_000
# A peer that was restarted is found again within this time (grpc adds up to a fifth of it).
MAX_REDIAL_MS = 500

Options = list[tuple[str, int | str]]

SHARED_OPTIONS: Options = [
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", PING_ALLOWED_MS),
    # Calls beyond grpc's own bounds (1,000 and 3,000, or 30 s unread) end CANCELLED without a word;
    # a flood is to reach our bounded queue, which answers RESOURCE_EXHAUSTED with a delay.
    ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
    ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING_CALLS),
    ("grpc.server_max_unrequested_time_in_server", 600),
    ("grpc.so_reuseport", 0),  # a second process on the port fails instead of taking half the calls
]
CHANNEL_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.enable_retries", 0),  # retries are ours: only where they are safe
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", CONNECT_MS),
    ("grpc.max_reconnect_backoff_ms", MAX_REDIAL_MS),
]


def open_channel(
    address: Address,
    *,
    tls: TlsSettings | None = None,
    role: Role | None = None,
    ping_timeout_ms: int | None = None,
) -> grpc.aio.Channel:
    """Connect (lazily) from asyncio; with TLS the peer must have a certificate for `role`.

    `ping_timeout_ms`: the connection breaks when its other end has not answered a ping for so
    long. Pings are answered by gRPC's own threads: a process that is merely busy answers, one
    that is stopped or whose host is gone does not.
    """
    options = _channel_options(tls, role)
    if ping_timeout_ms is not None:
        watched = {
            "grpc.keepalive_time_ms": WATCHED_KEEPALIVE_MS,
            "grpc.keepalive_timeout_ms": ping_timeout_ms,
            "grpc.http2.ping_timeout_ms": ping_timeout_ms,  # the one that counts, where there is one
            # Its pings hold back ours for a second; its windows matter to large messages only.
            "grpc.http2.bdp_probe": 0,
        }
        options = list((dict(options) | watched).items())
    if tls is None or not tls.on:
        return grpc.aio.insecure_channel(str(address), options)
    return grpc.aio.secure_channel(str(address), _channel_credentials(tls), options)


def open_sync_channel(
    address: Address, *, tls: TlsSettings | None = None, role: Role | None = None
) -> grpc.Channel:
    """Connect (lazily) from threads; otherwise as `open_channel`."""
    options = _channel_options(tls, role)
    if tls is None or not tls.on:
        return grpc.insecure_channel(str(address), options)
    return grpc.secure_channel(str(address), _channel_credentials(tls), options)


class RpcServer:
    """A gRPC server with health, reflection and, with TLS, a check of the caller's role.

    Register servicers on `grpc`, then `start`; it is NOT_SERVING until `set_serving`.
    """

    def __init__(self, address: Address, services: Iterable[str], *, tls: TlsSettings | None = None) -> None:
        """`services` are the full names (``splitwise.v1.Router``) for health and reflection."""
        self._address = address
        self._tls = tls if tls is not None and tls.on else None
        self._services = tuple(services)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the stubs
        self._stopping = False
        guards = [Guard()] if self._tls else []
        self.grpc = grpc.aio.server(interceptors=guards, options=SERVER_OPTIONS)

    async def start(self) -> Address:
        """Listen and serve; returns the address with the port that was bound.

        Raises `ListenError` when the address cannot be listened on, and `ConfigError` for bad TLS files.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        names = (*self._services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)
        await self.set_serving(False)
        credentials = _server_credentials(self._tls) if self._tls else None
        try:
            port = (
                self.grpc.add_secure_port(str(self._address), credentials)
                if credentials
                else self.grpc.add_insecure_port(str(self._address))
            )
        except RuntimeError:
            raise ListenError(
                f"listen: cannot listen on {self._address}: in use, or not this host's"
            ) from None
        if self._tls is not None:
            _warn_of_open_key(self._tls)
        elif not self._address.is_loopback:
            get_logger().warning("rpc.plaintext", listen=str(self._address), remedy="set the tls section")
        await self.grpc.start()
        return self._address.with_port(port)

    async def set_serving(self, serving: bool) -> None:
        """Tell health checks whether new work is taken; never again true after `stop`."""
        serving = serving and not self._stopping
        kind = health_pb2.HealthCheckResponse
        status = kind.SERVING if serving else kind.NOT_SERVING
        for service in ("", *self._services):
            await self._health.set(service, status)

    async def stop(self, grace_s: float) -> None:
        """Become NOT_SERVING, take no new call, let running ones end, cut them after `grace_s`."""
        await self.set_serving(False)
        self._stopping = True
        await self.grpc.stop(grace_s)


def check_tls(tls: TlsSettings) -> None:
    """Raise `ConfigError` for TLS files that cannot be used; without TLS there is nothing to check."""
    if tls.on:
        _pems(tls)


def _channel_options(tls: TlsSettings | None, role: Role | None) -> Options:
    if tls is None or not tls.on or role is None:
        return CHANNEL_OPTIONS
    return [*CHANNEL_OPTIONS, ("grpc.ssl_target_name_override", server_name(role))]


def _channel_credentials(tls: TlsSettings) -> grpc.ChannelCredentials:
    ca, certificate, key = _pems(tls)
    return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=certificate)


def _server_credentials(tls: TlsSettings) -> grpc.ServerCredentials:
    ca, certificate, key = _pems(tls)
    return grpc.ssl_server_credentials([(key, certificate)], root_certificates=ca, require_client_auth=True)


def _pems(tls: TlsSettings) -> tuple[bytes, bytes, bytes]:
    """Read CA, certificate and key; raises `ConfigError` for what gRPC would refuse without a reason."""
    if tls.ca is None or tls.certificate is None or tls.key is None:
        raise ConfigError("tls: ca, certificate and key are all needed")
    ca, certificate, key = _pem("ca", tls.ca), _pem("certificate", tls.certificate), _pem("key", tls.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_verify_locations(tls.ca)
    except ssl.SSLError:
        raise ConfigError(f"tls.ca: {tls.ca} holds no certificate that can be read") from None
    try:
        # An empty password, so that an encrypted key is refused and not asked for on the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password=lambda: "")
    except ssl.SSLError as error:
        why = (
            "they do not belong together"
            if error.reason == "KEY_VALUES_MISMATCH"
            else "one cannot be read, or the key needs a password, which is not supported"
        )
        raise ConfigError(f"tls.certificate, tls.key: {tls.certificate} and {tls.key}: {why}") from None
    return ca, certificate, key


def _pem(field: str, path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"tls.{field}: {path}: {error.strerror}") from None
    if b"-----BEGIN " not in content:
        raise ConfigError(f"tls.{field}: {path} is not a PEM file")
    return content


def _warn_of_open_key(tls: TlsSettings) -> None:
    """Say when others of this host can read the key that proves who this process is."""
    if tls.key is None:
        return
    with suppress(OSError):  # reading it says what is wrong
        if tls.key.stat().st_mode & stat.S_IROTH:
            get_logger().warning("rpc.key_open", file=str(tls.key), remedy="chmod o-r, and a new key")
