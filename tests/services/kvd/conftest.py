"""Two daemons for all tests of this folder that do not harm them, and engines for each test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.services.kvd.daemon import DaemonProcess
from tests.services.kvd.fake_engine import FakeEngine, new_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def daemons(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[DaemonProcess]]:
    folder = tmp_path_factory.mktemp("kvd")
    started = [DaemonProcess(folder, name) for name in ("near", "far")]
    try:
        for daemon in started:
            daemon.start()
        yield started
    finally:
        for daemon in started:
            daemon.kill()


@pytest.fixture
def engine(daemons: list[DaemonProcess]) -> Iterator[Callable[..., FakeEngine]]:
    """Return a function that attaches an engine to a daemon; afterwards nothing may be held."""
    engines: list[FakeEngine] = []

    def attach(daemon: DaemonProcess, name: str = "", **shape: Any) -> FakeEngine:
        engines.append(FakeEngine(daemon.socket, name or new_key().transfer_id.hex(), **shape))
        return engines[-1]

    yield attach
    for daemon in daemons:
        daemon.until_empty()
    for each in engines:
        each.close()
    for daemon in daemons:
        daemon.until(lambda told: not told.engines)
