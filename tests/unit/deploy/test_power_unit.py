"""What the power agent's unit must have because it runs as root and changes what outlives it."""

from __future__ import annotations

from splitwise.config import PowerSettings
from tests.unit.deploy.test_systemd import UNITS, read

SERVICE = read(UNITS / "splitwise-power.service")["Service"]


def test_nobody_else_can_put_files_where_root_writes() -> None:
    assert SERVICE["RuntimeDirectoryMode"] == ["0700"]
    (folder,) = SERVICE["RuntimeDirectory"]
    assert str(PowerSettings().state.parent) == f"/run/{folder}"


def test_limits_are_given_back_however_it_ended() -> None:
    (start,), (after,) = SERVICE["ExecStart"], SERVICE["ExecStopPost"]
    assert after == f"{start} --restore"
    assert read(UNITS / "splitwise-.service.d" / "common.conf")["Service"]["RuntimeDirectoryPreserve"] == [
        "yes"
    ]


def test_it_may_do_the_one_thing_that_needs_root() -> None:
    assert SERVICE["User"] == ["root"]
    assert SERVICE["CapabilityBoundingSet"] == ["CAP_SYS_ADMIN"]
