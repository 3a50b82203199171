"""The router's Prometheus metrics: requests that are over, what was decided, and the pools now.

Counters are raised once for each decision or request, never for each token; gauges are read
from the scheduler when they are scraped. Every metric is explained in ``docs/telemetry.md``.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from splitwise.scheduling import arrays, decisions, reasons
from splitwise.scheduling.events import FailureCause, Phase, Pool
from splitwise.telemetry import REGISTRY, TOKEN_BUCKETS, TRANSFER_BUCKETS, WAIT_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.router.dispatcher import Dispatcher
    from services.router.session import Session
    from splitwise.scheduling.decisions import Decision

REQUESTS = Counter("splitwise_router_requests", "Requests that are over, by outcome", ["model", "outcome"])
REFUSALS = Counter(
    "splitwise_router_refusals", "Requests refused before any work was started, by status code", ["code"]
)
TOKENS = Counter("splitwise_router_tokens", "Tokens of finished requests", ["model", "phase"])
CACHED = Counter(
    "splitwise_router_cached_prompt_tokens", "Prompt tokens of finished requests that were cached", ["model"]
)
QUEUE = Histogram("splitwise_router_queue_seconds", "Arrival to assignment", ["model"], buckets=WAIT_BUCKETS)
TTFT = Histogram("splitwise_router_ttft_seconds", "Arrival to first token", ["model"], buckets=WAIT_BUCKETS)
SECOND = Histogram(
    "splitwise_router_second_token_seconds", "First to second token", ["model"], buckets=TOKEN_BUCKETS
)
TBT = Histogram(
    "splitwise_router_tbt_seconds", "Mean time between later tokens", ["model"], buckets=TOKEN_BUCKETS
)
TBT_MAX = Histogram(
    "splitwise_router_tbt_max_seconds", "Longest time between later tokens", ["model"], buckets=TOKEN_BUCKETS
)
E2E = Histogram("splitwise_router_e2e_seconds", "Arrival to last token", ["model"], buckets=WAIT_BUCKETS)
EXPOSED = Histogram(
    "splitwise_router_transfer_exposed_seconds",
    "KV push after the first token: it delays the second",
    ["model"],
    buckets=TRANSFER_BUCKETS,
)
HIDDEN = Histogram(
    "splitwise_router_transfer_hidden_seconds",
    "KV push while the prompt was computed",
    ["model"],
    buckets=TRANSFER_BUCKETS,
)
RESTARTS = Counter(
    "splitwise_router_restarts", "Attempts that were given up and followed by another", ["reason"]
)
ATTEMPTS_FAILED = Counter(
    "splitwise_router_attempts_failed", "Failures that machines reported", ["phase", "cause"]
)
POOL_MOVES = Counter(
    "splitwise_router_pool_moves", "Machines that changed pool", ["source", "target", "reason"]
)
EVENTS_IGNORED = Counter(
    "splitwise_router_events_ignored", "Stale or misplaced events, without effect", ["reason"]
)
STALE_MESSAGES = Counter(
    "splitwise_router_stale_messages", "Machine messages about an attempt that was given up", ["kind"]
)
REGISTRATIONS_REFUSED = Counter(
    "splitwise_router_registrations_refused", "Machines that were not taken up, by status code", ["code"]
)
MACHINES_LOST = Counter("splitwise_router_machines_lost", "Machines whose streams broke or lease ran out")

_MESSAGES = ("tokens", "accepted", "kv_received", "failed")
_IGNORED = sorted(
    word for word in vars(reasons).values() if isinstance(word, str) and word.startswith("ignore:")
)


def _begin_at_zero() -> None:
    """Show every known label value from the start: the first step from 0 to 1 is a rate, too."""
    for reason in (
        reasons.MACHINE_LOST,
        reasons.MACHINE_REPLACED,
        reasons.PROMPT_FAILED,
        reasons.TOKEN_FAILED,
    ):
        RESTARTS.labels(reason)
    for phase, cause in product(Phase, FailureCause):
        ATTEMPTS_FAILED.labels(phase.value, cause.value)
    for home in (Pool.PROMPT.value, Pool.TOKEN.value):
        POOL_MOVES.labels(home, Pool.MIXED.value, reasons.BORROW)
        POOL_MOVES.labels(Pool.MIXED.value, home, reasons.RETURN)
    for reason in _IGNORED:
        EVENTS_IGNORED.labels(reason)
    for kind in _MESSAGES:
        STALE_MESSAGES.labels(kind)
    for code in ("INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAVAILABLE"):
        REFUSALS.labels(code)


def decided(decision: Decision) -> None:
    """Count what is rare among decisions; assignments and ends show in the requests."""
    if isinstance(decision, decisions.Restart):
        RESTARTS.labels(decision.reason).inc()
    elif isinstance(decision, decisions.MovePool):
        POOL_MOVES.labels(decision.source.value, decision.target.value, decision.reason).inc()
    elif isinstance(decision, decisions.Ignore):
        EVENTS_IGNORED.labels(decision.reason).inc()
    elif isinstance(decision, decisions.Reject):
        REFUSALS.labels("UNAVAILABLE" if decision.unavailable else "RESOURCE_EXHAUSTED").inc()


def observe(session: Session) -> None:
    """Count one request that is over."""
    model = session.admitted.model
    REQUESTS.labels(model, session.outcome).inc()
    finished = session.finished
    if finished is None:
        return
    timing = finished.timing
    QUEUE.labels(model).observe(timing.queued_us / 1e6)
    TTFT.labels(model).observe(timing.ttft_us / 1e6)
    E2E.labels(model).observe(timing.e2e_us / 1e6)
    if timing.second_us:
        SECOND.labels(model).observe(timing.second_us / 1e6)
    if timing.tbt_mean_us:
        TBT.labels(model).observe(timing.tbt_mean_us / 1e6)
        TBT_MAX.labels(model).observe(timing.tbt_max_us / 1e6)
    if finished.HasField("transfer"):
        push = finished.transfer
        EXPOSED.labels(model).observe(push.exposed_us / 1e6)
        HIDDEN.labels(model).observe(max(0, push.push_us - push.exposed_us) / 1e6)
    TOKENS.labels(model, "prompt").inc(finished.prompt_tokens)
    TOKENS.labels(model, "token").inc(finished.output_tokens)
    CACHED.labels(model).inc(finished.cached_prompt_tokens)


class ClusterCollector(Collector):
    """Gauges that are read from the scheduler when they are scraped."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def collect(self) -> Iterable[Metric]:
        """Read the scheduler."""
        scheduler = self._dispatcher.scheduler
        yield GaugeMetricFamily(
            "splitwise_router_queued_requests", "Requests without a machine", value=scheduler.queued
        )
        yield GaugeMetricFamily(
            "splitwise_router_open_requests", "Requests not over", value=scheduler.open_requests
        )
        count: dict[tuple[str, str, str], int] = {}
        tokens, requests = (dict.fromkeys(Pool, 0) for _ in range(2))
        numbers = scheduler.fleet.state.machines
        for machine in list(scheduler.fleet.machines.values()):
            key = (machine.pool.value, machine.spec.home.value, machine.condition)
            count[key] = count.get(key, 0) + 1
            column = numbers[:, machine.slot]
            tokens[machine.pool] += max(0, int(column[arrays.PROMPT_TOKENS] + column[arrays.PROMPT_OFFSET]))
            requests[machine.pool] += max(0, int(column[arrays.TOKEN_REQUESTS] + column[arrays.TOKEN_OFFSET]))
        machines = GaugeMetricFamily(
            "splitwise_router_machines", "Machines", labels=["pool", "home", "state"]
        )
        for labels, number in count.items():
            machines.add_metric(labels, number)
        yield machines
        yield _by_pool("splitwise_router_queue_tokens", "Prompt tokens assigned and not yet computed", tokens)
        yield _by_pool(
            "splitwise_router_token_requests",
            "Requests assigned for their token phase and not over",
            requests,
        )
        yield from self._power()

    def _power(self) -> Iterable[Metric]:
        power = self._dispatcher.power.describe()
        for name, text, value in (
            ("budget_watts", "Power limits of all GPUs together; 0: no budget", power.budget_watts),
            ("enforced_watts", "Power limits in force, of machines with a power agent", power.enforced_watts),
            ("draw_watts", "Measured draw of machines with a power agent", power.draw_watts),
            ("missing_watts", "How far the lowest limits are above the budget", power.missing_watts),
            ("unmanaged_machines", "Machines without a power agent: outside the budget", power.unmanaged),
        ):
            yield GaugeMetricFamily(f"splitwise_router_power_{name}", text, value=value)


def _by_pool(name: str, text: str, values: dict[Pool, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=["pool"])
    for pool, value in values.items():
        family.add_metric([pool.value], value)
    return family


def export(dispatcher: Dispatcher) -> None:
    """Put the cluster's gauges into this process's registry."""
    _begin_at_zero()
    REGISTRY.register(ClusterCollector(dispatcher))
