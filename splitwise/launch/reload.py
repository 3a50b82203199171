"""Taking up changed settings while a service runs: on SIGHUP they are read again.

The last good settings stay when the new ones are refused, and the log says so. systemd is
told of both (``RELOADING=1``, then ``READY=1``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from splitwise.config import load_settings
from splitwise.config.reload import plan_reload
from splitwise.errors import ConfigError
from splitwise.launch.notify import notify
from splitwise.telemetry import get_logger, set_log_level

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from splitwise.config import Settings


class Reloader:
    """The settings that count now, and how a service takes up others."""

    def __init__(self, section: str, arguments: Sequence[str], settings: Settings) -> None:
        """`arguments` are those of the start: flags stay above a changed file."""
        self.settings = settings
        self._section = section
        self._arguments = arguments
        self._apply: Callable[[Settings], None] = lambda _settings: None

    def use(self, apply: Callable[[Settings], None]) -> None:
        """Have `apply(settings)` called at each reload, and now: some may have come during the start.

        It takes up all of the settings or, raising `ConfigError`, nothing.
        """
        apply(self.settings)
        self._apply = apply

    def reload(self) -> None:
        """Read the settings again; a refusal changes nothing."""
        notify(f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")
        log = get_logger()
        try:
            wanted = load_settings(self._section, self._arguments).settings
            outcome = plan_reload(self.settings, wanted, self._section)
            self._apply(outcome.settings)
        except ConfigError as error:
            # Not an exception of ours: what the operator wrote, in one line.
            log.error("config.refused", error=str(error), kept="the last good settings")  # noqa: TRY400
            notify("READY=1\nSTATUS=The changed settings are refused; the last good ones stay in use.")
            return
        if "telemetry.log_level" in outcome.applied:
            set_log_level(outcome.settings.telemetry.log_level)
        self.settings = outcome.settings
        log.info("config.reloaded", applied=outcome.applied)
        if outcome.needs_restart:
            log.warning("config.needs_restart", keys=outcome.needs_restart)
        notify("READY=1\nSTATUS=")
