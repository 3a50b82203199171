"""The router's process: front ends open, machines connected, drained and closed."""

from __future__ import annotations

import asyncio
import gc
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from services.router.admission import Admission
from services.router.dashboard.routes import dashboard_routes
from services.router.dispatcher import Dispatcher
from services.router.eventlog import EventLog
from services.router.frontend import Frontend
from services.router.gateway.server import GatewayOptions, read_api_keys, serve_gateway
from services.router.metrics import export
from services.router.models import Models
from services.router.registry import Registry
from services.router.requestlog import RequestLog
from services.router.servicer import SERVICE, Servicer, add_servicer
from splitwise.errors import ConfigError
from splitwise.rpc.channels import RpcServer
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.telemetry import get_logger
from splitwise.text import load_vocabulary

if TYPE_CHECKING:
    from services.router.session import Session
    from splitwise.config import RouterSettings, Settings
    from splitwise.launch.service import Lifecycle

TICK_S = 0.05
STOP_GRACE_S = 2.0


async def serve(settings: Settings, lifecycle: Lifecycle) -> None:
    """Run the router until it is told to stop."""
    options = settings.router
    scheduling = _scheduling(options)
    lifecycle.loading("scheduler", policy=options.policy)
    _warm_up(scheduling)
    # What was imported until now lives as long as the process. A full collection that looks through
    # it stands between tokens for tens of milliseconds.
    gc.collect()
    gc.freeze()
    models = Models(options.models)
    frontend = Frontend(Admission(models), models)
    log = RequestLog(options.request_log) if options.request_log is not None else None

    def ended(session: Session) -> None:
        frontend.ended(session)
        if log is not None:
            log.add(session)

    dispatcher = Dispatcher(options, scheduling, ended)
    frontend.dispatcher = dispatcher
    export(dispatcher)
    registry = Registry(options, settings.tls, dispatcher, models)
    server = RpcServer(options.listen, (SERVICE,), tls=settings.tls)
    servicer = Servicer(frontend, registry, options)
    add_servicer(servicer, server.grpc)
    gateway = GatewayOptions(drain_s=STOP_GRACE_S)  # `_drain` has waited for requests before it stops

    def use(changed: Settings) -> None:
        nonlocal options
        scheduling, keys = _scheduling(changed.router), _api_keys(changed.router)
        options = registry.settings = servicer.settings = changed.router
        dispatcher.reconfigure(options, scheduling)
        gateway.api_keys, gateway.body_bytes = keys, options.http_body_bytes

    lifecycle.on_reload(use)
    async with AsyncExitStack() as stack:
        if log is not None:
            stack.enter_context(log)
        events = None
        if options.event_log is not None:
            events = EventLog(options.event_log, options.event_log_bytes, dispatcher.scheduler)
            dispatcher.handle = stack.enter_context(events).handle
        address = await server.start()
        stack.push_async_callback(server.stop, STOP_GRACE_S)
        stack.push_async_callback(registry.close)
        http = None
        if options.http_listen is not None:
            extra = dashboard_routes(frontend, lambda: options.slo)
            http = (
                await stack.enter_async_context(serve_gateway(frontend, options.http_listen, gateway, extra))
            ).address
        registry.start()
        clock = asyncio.create_task(_clock(server, frontend, dispatcher, events))
        stack.callback(clock.cancel)
        lifecycle.ready(address, http=None if http is None else str(http))
        await lifecycle.stop.wait()
        await _drain(server, frontend, options.drain_s)


def check(settings: Settings) -> None:
    """Raise `ConfigError` for what the schema cannot see."""
    _scheduling(settings.router)
    _api_keys(settings.router)
    for name, folder in settings.router.models.items():
        try:
            load_vocabulary(folder)
        except ConfigError as error:
            raise ConfigError(f"router.models.{name}: {error}") from None


def _scheduling(options: RouterSettings) -> SchedulerSettings:
    try:
        return SchedulerSettings(
            policy=options.policy,
            queue_tokens=options.queue_tokens,
            last_resort_tokens=options.last_resort_tokens,
            borrow_hold=options.borrow_hold_ms / 1e3,
            max_queued=options.queue_limit,
            max_attempts=options.restart_limit + 1,
        )
    except ValueError as error:
        raise ConfigError(f"router: {error}") from error


def _api_keys(options: RouterSettings) -> tuple[str, ...]:
    return read_api_keys(options.http_api_keys) if options.http_api_keys is not None else ()


def _warm_up(scheduling: SchedulerSettings) -> None:
    """Make one decision beside the real cluster: compiling its kernels must not cost a request."""
    scheduler = ClusterScheduler(scheduling)
    for home in (ev.Pool.PROMPT, ev.Pool.TOKEN):
        machine = ev.MachineSpec(home.value, 1, home, "model", "fingerprint", "node", 64, 16, 8)
        scheduler.handle(ev.MachineJoined(0.0, machine))
        scheduler.handle(ev.LoadReported(0.0, home.value, 1, 1, 0, 0, 0))
    scheduler.handle(ev.RequestArrived(0.0, "warm-up", "model", 32, 8))
    scheduler.handle(ev.FirstTokenMade(0.0, "warm-up", 1))
    scheduler.handle(ev.KvReceived(0.0, "warm-up", 1))
    scheduler.handle(ev.TokensMade(0.0, "warm-up", 1, 1))
    scheduler.handle(ev.RequestCancelled(0.0, "warm-up", "warm-up"))
    scheduler.handle(ev.Tick(10.0))


async def _clock(
    server: RpcServer, frontend: Frontend, dispatcher: Dispatcher, events: EventLog | None
) -> None:
    """Ticks for the scheduler; health follows what is served."""
    serving = False
    while True:
        dispatcher.tick()
        if events is not None:
            events.flush()
        if frontend.serving() != serving:
            serving = not serving
            await server.set_serving(serving)
            get_logger().info("router.serving", serving=serving)
        await asyncio.sleep(TICK_S)


async def _drain(server: RpcServer, frontend: Frontend, seconds: float) -> None:
    """Take nothing new; let what runs finish, at most so long."""
    frontend.draining = True
    await server.set_serving(False)
    loop = asyncio.get_running_loop()
    end = loop.time() + seconds
    while frontend.dispatcher.sessions and loop.time() < end:  # noqa: ASYNC110 - ends in many places
        await asyncio.sleep(TICK_S)
    if frontend.dispatcher.sessions:
        get_logger().warning("drain.cut", open=len(frontend.dispatcher.sessions), after_s=seconds)
