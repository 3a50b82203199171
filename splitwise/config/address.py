"""Network addresses: the one place where ``host:port`` is read and written."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pydantic_core import core_schema

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler

HOST_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(\.[A-Za-z0-9_-]{1,63})*\.?")


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 without brackets) and a TCP port; port 0 asks for a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read ``host:port`` or ``[IPv6]:port``; raises `ValueError` that says what to write."""
        host, colon, port_text = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text!r} is not an address: write host:port, such as 127.0.0.1:7400")
        if host.startswith("[") and host.endswith("]"):
            host = _ipv6(host[1:-1], text)
        elif ":" in host:
            raise ValueError(f"{text!r}: an IPv6 address needs brackets, such as [::1]:7400")
        elif re.fullmatch(r"[0-9.]+", host):
            host = _ipv4(host, text)
        elif not HOST_NAME.fullmatch(host):
            raise ValueError(f"{text!r}: {host!r} is not a host name")
        if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
            raise ValueError(f"{text!r}: the port {port_text!r} is not a number from 0 to 65535")
        return cls(host, int(port_text))

    @property
    def is_loopback(self) -> bool:
        """True when only processes of this host can reach it."""
        try:
            return ipaddress.ip_address(self.host.partition("%")[0]).is_loopback
        except ValueError:
            return self.host.rstrip(".").lower() == "localhost"

    @property
    def is_any(self) -> bool:
        """True for 0.0.0.0 and [::]: good to listen on, not to be told to others."""
        try:
            return ipaddress.ip_address(self.host).is_unspecified
        except ValueError:
            return False

    def with_port(self, port: int) -> Address:
        """Return the same host with another port."""
        return replace(self, port=port)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Let settings take an address as text and write it as text."""
        return core_schema.no_info_plain_validator_function(
            cls._coerce, serialization=core_schema.to_string_ser_schema()
        )

    @classmethod
    def _coerce(cls, value: object) -> Address:
        if isinstance(value, Address):
            return value
        if isinstance(value, str):
            return cls.parse(value)
        raise ValueError(f"{value!r} is not an address: write host:port, such as 127.0.0.1:7400")


def _ipv6(host: str, text: str) -> str:
    try:
        return str(ipaddress.IPv6Address(host))
    except ValueError:
        raise ValueError(f"{text!r}: {host!r} is not an IPv6 address") from None


def _ipv4(host: str, text: str) -> str:
    try:
        return str(ipaddress.IPv4Address(host))
    except ValueError:
        raise ValueError(f"{text!r}: {host!r} is not an IPv4 address") from None
