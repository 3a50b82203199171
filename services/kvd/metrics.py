"""The daemon's Prometheus metrics, read from its counters when they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from splitwise.telemetry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.kvd.node import Node


class NodeCollector(Collector):
    """All metrics of one daemon."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterable[Metric]:
        """Read the counters."""
        counters = self._node.counters
        transfers = CounterMetricFamily(
            "splitwise_kvd_transfers", "Transfers that ended at this destination", labels=["outcome"]
        )
        transfers.add_metric(["delivered"], counters.delivered)
        transfers.add_metric(["failed"], counters.failed)
        rejected = CounterMetricFamily(
            "splitwise_kvd_rejected", "Messages refused, by cause", labels=["cause"]
        )
        for cause, count in list(counters.rejected.items()):
            rejected.add_metric([cause], count)
        yield from (transfers, rejected)
        yield CounterMetricFamily("splitwise_kvd_pushed_bytes", "Bytes put", value=counters.bytes_pushed)
        yield CounterMetricFamily("splitwise_kvd_puts", "Puts after coalescing", value=counters.puts)
        yield GaugeMetricFamily(
            "splitwise_kvd_transfers_open", "Open halves of transfers", value=self._node.open_transfers
        )
        yield GaugeMetricFamily("splitwise_kvd_engines", "Attached engines", value=len(self._node.engines))


def export(node: Node) -> None:
    """Put the daemon's metrics into this process's registry."""
    REGISTRY.register(NodeCollector(node))
