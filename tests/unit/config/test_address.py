"""Addresses: one parser for all."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitwise.config import Address

if TYPE_CHECKING:
    import ipaddress


@given(
    st.one_of(
        st.ip_addresses(v=4).map(str),
        st.ip_addresses(v=6).map(str),
        st.from_regex(r"[a-z][a-z0-9]{0,10}(\.[a-z][a-z0-9]{0,10})?", fullmatch=True),
    ),
    st.integers(0, 65535),
)
def test_what_is_written_is_read_back(host: str, port: int):
    address = Address(host, port)
    assert Address.parse(str(address)) == address


@given(st.ip_addresses(v=6), st.integers(0, 65535))
def test_ipv6_is_written_with_brackets(host: ipaddress.IPv6Address, port: int):
    assert str(Address(str(host), port)).startswith("[")
    with pytest.raises(ValueError):
        Address.parse(f"{host.exploded}:{port}")


@pytest.mark.parametrize(
    "text",
    ["", "7400", ":7400", "host", "host:", "host:x", "host:65536", "host:-1", "host:٣", "::1:9000", "[::1]",
     "[::1:9000", "[zz]:1", "256.1.1.1:1", "1.2.3:4", "a b:1", "-a:1", "http://x:1", "[127.0.0.1]:1"],
)  # fmt: skip
def test_what_is_no_address_is_refused_with_its_text(text: str):
    with pytest.raises(ValueError) as caught:
        Address.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "loopback", "everywhere"),
    [
        ("127.0.0.1:1", True, False),
        ("127.9.9.9:1", True, False),
        ("[::1]:1", True, False),
        ("localhost:1", True, False),
        ("0.0.0.0:1", False, True),
        ("[::]:1", False, True),
        ("10.0.0.1:1", False, False),
        ("node7.example:1", False, False),
    ],
)
def test_who_can_reach_it(text: str, loopback: bool, everywhere: bool):
    address = Address.parse(text)
    assert (address.is_loopback, address.is_any) == (loopback, everywhere)
