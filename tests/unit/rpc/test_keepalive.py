"""Both ends of a connection agree on pings: a server that thinks them too many closes it."""

from __future__ import annotations

import pytest

from splitwise.rpc.channels import (
    CHANNEL_OPTIONS,
    KEEPALIVE_MS,
    PING_ALLOWED_MS,
    SERVER_OPTIONS,
    WATCHED_KEEPALIVE_MS,
)


@pytest.mark.parametrize("sends", [CHANNEL_OPTIONS, SERVER_OPTIONS], ids=["client", "server"])
def test_pings_come_no_more_often_than_the_server_allows(sends: list[tuple[str, int | str]]) -> None:
    sent, allowed = dict(sends), dict(SERVER_OPTIONS)
    every, least = sent["grpc.keepalive_time_ms"], allowed["grpc.http2.min_ping_interval_without_data_ms"]
    assert isinstance(every, int)
    assert isinstance(least, int)
    assert least < every  # with room for jitter
    assert sent["grpc.keepalive_permit_without_calls"] == 1
    assert sent["grpc.http2.max_pings_without_data"] == 0  # no bound, or the third ping would be withheld


def test_channels_that_watch_their_peer_keep_to_it_too() -> None:
    assert min(KEEPALIVE_MS, WATCHED_KEEPALIVE_MS) > PING_ALLOWED_MS
