"""A daemon says over what it reaches a peer, and warns when that is only TCP."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from services.kvd.peers import tell_transports


@pytest.mark.parametrize(
    ("transports", "event", "level"),
    [
        (["rc_mlx5/mlx5_0:1", "tcp/eth0"], "peer.connected", "info"),
        (["cma/memory", "posix/memory"], "peer.connected", "info"),
        ([], "peer.connected", "info"),  # a UCX that cannot tell
        (["tcp/eth0"], "peer.connected_by_tcp", "warning"),
        (["tcp/eth0", "tcp/lo"], "peer.connected_by_tcp", "warning"),
    ],
)
def test_what_is_told(transports: list[str], event: str, level: str) -> None:
    with capture_logs() as lines:
        tell_transports("10.0.0.5:7500", transports)
    (line,) = lines
    assert (line["event"], line["log_level"]) == (event, level)
    assert line["transports"] == transports
    assert line["peer"] == "10.0.0.5:7500"
    assert ("remedy" in line) == (level == "warning")
