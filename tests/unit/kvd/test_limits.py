"""A daemon refuses a host on which UCX would crash, and says how much it needs."""

from __future__ import annotations

import pytest

from services.kvd import limits
from splitwise.errors import ConfigError


@pytest.mark.parametrize(
    ("tls", "uses"),
    [
        (None, True),
        ("all", True),
        ("rc,cuda_copy,tcp", False),
        ("tcp,sm", True),
        ("posix,tcp", True),
        ("tcp,cma", False),
        ("^rc", True),
        ("^sm", False),
        ("^tcp,posix", False),
    ],
)
def test_which_settings_use_shared_memory(tls: str | None, uses: bool) -> None:
    assert limits.uses_shared_memory(tls) is uses


def test_how_much_is_needed_is_said() -> None:
    limits.check_shared_memory(limits.SHM_NEEDED)
    with pytest.raises(ConfigError, match=r"/dev/shm: 31 MiB are free, UCX needs 32 MiB: .*shm_size"):
        limits.check_shared_memory(limits.SHM_NEEDED - 1)


def test_a_host_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "SHM", "/no/such/place")
    with pytest.raises(ConfigError, match="mount a tmpfs"):
        limits.check_host(None)
    limits.check_host("tcp")
