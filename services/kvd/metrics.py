"""The daemon's Prometheus metrics, most of them read from its counters when they are scraped.

Every metric is explained in ``docs/telemetry.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from splitwise.kv.ledger import Rejection
from splitwise.rpc.v1.common_pb2 import TransferMode
from splitwise.telemetry import REGISTRY, TRANSFER_BUCKETS

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.kvd.node import Node
    from splitwise.rpc.v1.common_pb2 import TransferStats

MODES = {
    TransferMode.TRANSFER_MODE_SERIALIZED: "serialized",
    TransferMode.TRANSFER_MODE_LAYERWISE: "layerwise",
}
_LABELS = ("mode", "transport")
PUSH = Histogram(
    "splitwise_kvd_push_seconds", "First put to last flush", _LABELS, buckets=TRANSFER_BUCKETS
)  # fmt: skip
EXPOSED = Histogram(
    "splitwise_kvd_exposed_seconds", "Push after the first token was made", _LABELS, buckets=TRANSFER_BUCKETS
)
HIDDEN = Histogram(
    "splitwise_kvd_hidden_seconds", "Push while the prompt was computed", _LABELS, buckets=TRANSFER_BUCKETS
)
HAND_OVER = Histogram(
    "splitwise_kvd_hand_over_seconds",
    "First token made to the destination's acknowledgement: flush, signal, verification",
    _LABELS,
    buckets=TRANSFER_BUCKETS,
)


def delivered(stats: TransferStats, hand_over_s: float | None) -> None:
    """Count one transfer that this source has delivered."""
    labels = MODES.get(stats.mode, "unknown"), stats.transport
    PUSH.labels(*labels).observe(stats.push_us / 1e6)
    EXPOSED.labels(*labels).observe(stats.exposed_us / 1e6)
    HIDDEN.labels(*labels).observe(max(0, stats.push_us - stats.exposed_us) / 1e6)
    if hand_over_s is not None:
        HAND_OVER.labels(*labels).observe(hand_over_s)


class NodeCollector(Collector):
    """What is read when it is scraped, from a thread of its own."""

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
        yield transfers
        rejections = CounterMetricFamily(
            "splitwise_kvd_rejections", "Messages refused, by cause", labels=["cause"]
        )
        for cause in Rejection:
            rejections.add_metric([cause.value], counters.rejected.get(cause.value, 0))
        yield rejections
        yield _counter("pushed_bytes", "Bytes put into granted blocks", counters.bytes_pushed)
        yield _counter("puts", "Puts after coalescing", counters.puts)
        yield _counter("grants", "Grants given by destinations of this node", counters.grants)
        yield _counter("revokes", "Grants withdrawn, by or from this node", counters.revokes)
        yield _counter("fences", "Times that memory was fenced against late writes", counters.fences)
        open_halves = GaugeMetricFamily(
            "splitwise_kvd_transfers_open", "Transfers that have not ended here", labels=["side"]
        )
        open_halves.add_metric(["source"], len(self._node.sources))
        open_halves.add_metric(["destination"], len(self._node.destinations))
        yield open_halves
        engines = list(self._node.engines.values())
        yield GaugeMetricFamily("splitwise_kvd_engines", "Attached engines", value=len(engines))
        yield GaugeMetricFamily(
            "splitwise_kvd_granted_blocks",
            "KV blocks that a source may write",
            value=sum(self._node.destinations.granted_blocks(engine) for engine in engines),
        )
        yield GaugeMetricFamily(
            "splitwise_kvd_peers_connected", "Daemons with a UCX connection", value=len(self._node.peers)
        )


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"splitwise_kvd_{name}", text, value=value)


def export(node: Node) -> None:
    """Put the daemon's metrics into this process's registry."""
    REGISTRY.register(NodeCollector(node))
