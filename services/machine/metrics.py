"""A machine's Prometheus metrics: its work, its running batch, its KV memory.

What happens for each token is added to plain numbers of the work table and read when it is
scraped. Every metric is explained in ``docs/telemetry.md``.
"""

from __future__ import annotations

from itertools import product
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.registry import Collector

from splitwise.rpc.v1.common_pb2 import Pool
from splitwise.rpc.v1.machine_pb2 import FailureCause
from splitwise.scheduling.events import Phase
from splitwise.telemetry import REGISTRY, WAIT_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.machine.streams import Streams
    from services.machine.transfers import TransferWatch
    from services.machine.works import WorkTable

FINISHED = "finished"
OUTCOMES = {
    cause: name.removeprefix("FAILURE_CAUSE_").lower()
    for name, cause in FailureCause.items()
    if cause != FailureCause.FAILURE_CAUSE_UNSPECIFIED
}

WORK = Counter("splitwise_machine_work", "Work items that are over, by outcome", ["phase", "outcome"])
PROMPT = Histogram(
    "splitwise_machine_prompt_seconds", "Command to first token, waiting included", buckets=WAIT_BUCKETS
)
KV_WAIT = Histogram(
    "splitwise_machine_kv_wait_seconds",
    "Command of a token phase to its second token: KV blocks reserved, filled and verified",
    buckets=WAIT_BUCKETS,
)


class MachineCollector(Collector):
    """What is read when it is scraped, from a thread of its own."""

    def __init__(self, works: WorkTable, streams: Streams, transfers: TransferWatch) -> None:
        self._works = works
        self._streams = streams
        self._transfers = transfers

    def collect(self) -> Iterable[Metric]:
        """Read the work table and the engine."""
        yield from self._work()
        yield from self._engine()
        yield _gauge("streams_open", "Control streams of routers", self._streams.open)
        yield _gauge("leases_open", "KV caches kept for their delivery", self._transfers.leases)
        made = CounterMetricFamily("splitwise_machine_tokens", "Tokens made", labels=["phase"])
        for phase, count in self._works.tokens_made.items():
            made.add_metric([phase.value], count)
        yield made
        computed = self._works.prompt_tokens_done
        yield CounterMetricFamily(
            "splitwise_machine_prompt_tokens",
            "Tokens of prompts that were computed or cached",
            value=computed,
        )

    def _work(self) -> Iterable[Metric]:
        counts = dict.fromkeys(product(Phase, (False, True)), 0)
        queue_tokens = 0
        for work in self._works.items():
            counts[work.phase, work.started] += 1
            if work.phase is Phase.PROMPT and not work.started:
                queue_tokens += work.prompt_tokens
        family = GaugeMetricFamily(
            "splitwise_machine_open_requests", "Work items not over", labels=["phase", "state"]
        )
        for (phase, started), count in counts.items():
            family.add_metric([phase.value, "started" if started else "waiting"], count)
        yield family
        yield _gauge("queue_tokens", "Prompt tokens accepted and not yet computed", queue_tokens)
        serving = self._works.refusal is None and self._streams.description is not None
        yield _gauge("serving", "1 while new work is taken", int(serving))

    def _engine(self) -> Iterable[Metric]:
        load = self._works.engine_load()
        yield _gauge("batch_requests", "Requests in the iteration that runs now", load.batch_requests)
        yield _gauge("batch_tokens", "Tokens that the iteration computes", load.batch_tokens)
        yield _gauge("kv_used_blocks", "KV blocks in use", load.kv_blocks_used)
        yield _gauge("kv_capacity_blocks", "KV blocks in all", load.kv_blocks_total)
        yield CounterMetricFamily(
            "splitwise_machine_preemptions", "Token phases that were put back", value=load.preemptions
        )
        info = InfoMetricFamily("splitwise_machine", "What this machine is: always 1")
        machine = self._streams.description
        if machine is not None:
            facts = {
                "machine": machine.identity.machine_id,
                "home": "prompt" if machine.home_pool == Pool.POOL_PROMPT else "token",
                "model": machine.model,
                "engine": machine.engine,
                "node": machine.node,
            }
            info.add_metric([], facts)
        yield info


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"splitwise_machine_{name}", text, value=value)


def export(works: WorkTable, streams: Streams, transfers: TransferWatch) -> None:
    """Put the machine's metrics into this process's registry."""
    for phase, outcome in product(Phase, (FINISHED, *OUTCOMES.values())):
        WORK.labels(phase.value, outcome)
    REGISTRY.register(MachineCollector(works, streams, transfers))
