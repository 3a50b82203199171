"""The shell of every service process: settings, logs, signals, exit codes.

A service's ``__main__`` is one line, ``sys.exit(run_service(...))`` with its coroutine. The
coroutine sets itself up, calls `Lifecycle.ready`, waits for `Lifecycle.stop`, drains and
returns. Supervisors read the events ``service.starting``, ``service.loading``,
``service.ready``, ``service.stopping`` and ``service.stopped`` from its log.

``--check-config`` says whether the process would take its settings, and starts nothing.
SIGHUP has it read them again (see docs/configuration.md).
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

from splitwise.config import Settings, load_settings
from splitwise.errors import ConfigError, ExitCode, ListenError
from splitwise.launch.notify import keep_alive, notify
from splitwise.launch.reload import Reloader
from splitwise.rpc.channels import check_tls
from splitwise.telemetry import configure_logs, get_logger, identify_process, serve_metrics
from splitwise.telemetry.tracing import tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from splitwise.config import Address

CHECK_CONFIG = "--check-config"
DIE_WITH_PARENT = "SPLITWISE_DIE_WITH_PARENT"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Lifecycle:
    """What a service tells its supervisor, and how it is told to stop."""

    def __init__(self, reloader: Reloader) -> None:
        self.stop = asyncio.Event()
        self.on_reload = reloader.use
        self._started = time.monotonic()

    def loading(self, what: str, **fields: object) -> None:
        """Say what start-up is doing now, such as ``model``."""
        get_logger().info("service.loading", what=what, **fields)

    def ready(self, address: Address | None, **fields: object) -> None:
        """Say that work is taken at `address` (with the port that was bound)."""
        seconds = round(time.monotonic() - self._started, 2)
        shown = None if address is None else str(address)
        get_logger().info("service.ready", address=shown, seconds=seconds, pid=os.getpid(), **fields)
        notify("READY=1")


def run_service(
    service: str,
    section: str,
    serve: Callable[[Settings, Lifecycle], Awaitable[None]],
    arguments: Sequence[str] | None = None,
    *,
    check: Callable[[Settings], None] = lambda _settings: None,
) -> int:
    """Run one service until it ends or SIGTERM or SIGINT stops it; returns the exit code.

    `service` is its name in logs, `section` its section of the settings. A second signal
    cancels the coroutine. A `ConfigError`, at start or later, gives `ExitCode.CONFIG`.
    `check` raises it for what the schema cannot see, such as a file that is not there; it is
    asked with ``--check-config``, since a start finds the same by itself.
    """
    die_with_parent()
    words = list(sys.argv[1:] if arguments is None else arguments)
    only_check = CHECK_CONFIG in words
    words = [word for word in words if word != CHECK_CONFIG]
    try:
        loaded = load_settings(section, words)
        settings = loaded.settings
        if only_check:
            check_tls(settings.tls)
            check(settings)
    except ConfigError as error:
        print(f"splitwise {service}: {error}", file=sys.stderr)
        return ExitCode.CONFIG
    if only_check:
        print(f"splitwise {service}: valid, {len(loaded.origins)} settings given, defaults for the rest")
        return ExitCode.OK
    configure_logs(settings.telemetry, service=service, name=_name(settings, section))
    log = get_logger()
    log.info("service.starting", pid=os.getpid())
    try:
        identify_process(service, _name(settings, section))
        with serve_metrics(settings.telemetry.metrics_listen) as metrics:
            if metrics is not None:
                log.info("metrics.listening", address=str(metrics))
            with tracing(settings.telemetry, service=service, name=_name(settings, section)):
                asyncio.run(_run(serve, Reloader(section, words, settings)))
    except ConfigError as error:
        log.critical("service.config_refused", error=str(error))
        return ExitCode.CONFIG
    except ListenError as error:
        log.critical("service.cannot_listen", error=str(error))
        return ExitCode.FAILED
    except (KeyboardInterrupt, asyncio.CancelledError):
        log.warning("service.interrupted")
        return ExitCode.INTERRUPTED
    except Exception as error:
        log.exception("service.failed", error=str(error))
        return ExitCode.FAILED
    log.info("service.stopped")
    return ExitCode.OK


def end_process(code: int) -> NoReturn:
    """End with `code` at once, after the exit handlers.

    For processes that loaded vLLM: taking its modules apart one by one costs five seconds.
    """
    atexit._run_exitfuncs()  # noqa: SLF001 - the one way to have them without the rest
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def die_with_parent() -> None:
    """With SPLITWISE_DIE_WITH_PARENT set, have the kernel kill this process with its parent."""
    parent = os.environ.get(DIE_WITH_PARENT)
    if not parent:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent.isdigit() and os.getppid() != int(parent):  # it died before the call
        os.kill(os.getpid(), signal.SIGKILL)


async def _run(serve: Callable[[Settings, Lifecycle], Awaitable[None]], reloader: Reloader) -> None:
    lifecycle = Lifecycle(reloader)
    task = asyncio.ensure_future(serve(reloader.settings, lifecycle))

    def on_signal(number: signal.Signals) -> None:
        if lifecycle.stop.is_set():
            task.cancel()
            return
        get_logger().info("service.stopping", signal=number.name)
        notify("STOPPING=1")
        lifecycle.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    loop.add_signal_handler(signal.SIGHUP, reloader.reload)
    watchdog = asyncio.create_task(keep_alive())
    try:
        await task
    finally:
        watchdog.cancel()


def _name(settings: Settings, section: str) -> str:
    names = {
        "machine": settings.machine.id,
        "kvd": settings.kvd.node,
        "power": settings.power.node,
        "router": settings.router.router_id,
    }
    return names.get(section, "")
