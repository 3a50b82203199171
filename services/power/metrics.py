"""The agent's Prometheus metrics, read from its last description when they are scraped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from splitwise.telemetry import REGISTRY

if TYPE_CHECKING:
    from collections.abc import Iterable

    from prometheus_client.core import Metric

    from services.power.agent import PowerAgent

LABELS = ("gpu", "index")


class PowerCollector(Collector):
    """All metrics of one node's power."""

    def __init__(self, agent: PowerAgent) -> None:
        self._agent = agent

    def collect(self) -> Iterable[Metric]:
        """Read the description."""
        power = self._agent.description
        requested = GaugeMetricFamily(
            "splitwise_power_cap_requested_watts",
            "Power limit that the GPU shall have, by reason",
            labels=[*LABELS, "reason"],
        )
        enforced = GaugeMetricFamily(
            "splitwise_power_cap_enforced_watts", "Power limit that is in force, as read back", labels=LABELS
        )
        draw = GaugeMetricFamily("splitwise_power_draw_watts", "Measured draw", labels=LABELS)
        previous = GaugeMetricFamily(
            "splitwise_power_cap_previous_watts", "Power limit that the GPU gets back", labels=LABELS
        )
        problem = GaugeMetricFamily(
            "splitwise_power_gpu_problem", "1 when the GPU cannot be read or limited as asked", labels=LABELS
        )
        for gpu in power.gpus:
            labels = (gpu.uuid, str(gpu.index))
            problem.add_metric(labels, 1 if gpu.problem else 0)
            if not gpu.enforced_watts:
                continue  # it does not answer
            requested.add_metric([*labels, gpu.reason], gpu.requested_watts)
            enforced.add_metric(labels, gpu.enforced_watts)
            draw.add_metric(labels, gpu.draw_watts)
            previous.add_metric(labels, gpu.previous_watts)
        yield from (requested, enforced, draw, previous, problem)
        yield GaugeMetricFamily(
            "splitwise_power_reporting_only", "1 when no limit is set", value=int(power.reporting_only)
        )
        yield GaugeMetricFamily(
            "splitwise_power_suspended",
            "1 while an operator has the previous limits",
            value=int(power.suspended),
        )


def export(agent: PowerAgent) -> None:
    """Put the metrics into this process's registry."""
    REGISTRY.register(PowerCollector(agent))
