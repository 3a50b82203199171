"""The router's Prometheus metrics: latencies of finished requests, outcomes, and the pools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from splitwise.telemetry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.router.dispatcher import Dispatcher
    from services.router.session import Session

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter("splitwise_router_requests", "Requests that are over, by outcome", ["model", "outcome"])
TTFT = Histogram("splitwise_router_ttft_seconds", "Arrival to first token", ["model"], buckets=_BUCKETS)
SECOND = Histogram(
    "splitwise_router_second_token_seconds", "First to second token", ["model"], buckets=_BUCKETS
)
TBT = Histogram("splitwise_router_tbt_seconds", "Mean time between later tokens", ["model"], buckets=_BUCKETS)
E2E = Histogram("splitwise_router_e2e_seconds", "Arrival to last token", ["model"], buckets=_BUCKETS)
EXPOSED = Histogram(
    "splitwise_router_exposed_transfer_seconds",
    "KV push that was not hidden behind the prompt",
    ["model"],
    buckets=_BUCKETS,
)
TOKENS = Counter("splitwise_router_tokens", "Tokens of finished requests", ["model", "phase"])
RESTARTS = Counter(
    "splitwise_router_restarts", "Attempts that were given up and followed by another", ["model"]
)


def observe(session: Session) -> None:
    """Count one request that is over."""
    model = session.admitted.model
    REQUESTS.labels(model, session.outcome).inc()
    RESTARTS.labels(model).inc(max(0, session.attempt - 1))
    finished = session.finished
    if finished is None:
        return
    timing = finished.timing
    TTFT.labels(model).observe(timing.ttft_us / 1e6)
    E2E.labels(model).observe(timing.e2e_us / 1e6)
    if timing.second_us:
        SECOND.labels(model).observe(timing.second_us / 1e6)
    if timing.tbt_mean_us:
        TBT.labels(model).observe(timing.tbt_mean_us / 1e6)
    if finished.HasField("transfer"):
        EXPOSED.labels(model).observe(finished.transfer.exposed_us / 1e6)
    TOKENS.labels(model, "prompt").inc(finished.prompt_tokens)
    TOKENS.labels(model, "token").inc(finished.output_tokens)


class ClusterCollector(Collector):
    """Gauges that are read from the scheduler when they are scraped."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        """Read the scheduler."""
        scheduler = self._dispatcher.scheduler
        yield GaugeMetricFamily(
            "splitwise_router_queued", "Requests without a machine", value=scheduler.queued
        )
        yield GaugeMetricFamily("splitwise_router_open", "Requests not over", value=scheduler.open_requests)
        pools = GaugeMetricFamily("splitwise_router_machines", "Machines", labels=["pool", "home", "state"])
        count: dict[tuple[str, str, str], int] = {}
        for machine in list(scheduler.fleet.machines.values()):
            key = (machine.pool.value, machine.spec.home.value, machine.state.value)
            count[key] = count.get(key, 0) + 1
        for labels, number in count.items():
            pools.add_metric(labels, number)
        yield pools


def export(dispatcher: Dispatcher) -> None:
    """Put the cluster's gauges into this process's registry."""
    REGISTRY.register(ClusterCollector(dispatcher))
