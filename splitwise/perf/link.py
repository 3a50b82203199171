"""What moving a KV cache costs, and how much of it a request sees.

Serialized: the transfer begins after the prompt and is seen whole. Layer-wise: each
layer goes while later ones are computed, so only what the last layers leave over is seen
(Splitwise paper, section IV-C), plus a fixed cost of the hand-over.
"""

from __future__ import annotations

from dataclasses import dataclass

from splitwise.perf.model import PerformanceModelError
from splitwise.scheduling.compiled import compiled


@compiled
def transfer_seconds(size_bytes: float, bytes_per_second: float, latency: float, sharing: float) -> float:
    """Time of one transfer on a link that `sharing` transfers use at once (1: alone)."""
    return latency + size_bytes * max(sharing, 1.0) / bytes_per_second


@compiled
def layerwise_exposed_seconds(
    size_bytes: float,
    layers: float,
    prompt_seconds: float,
    bytes_per_second: float,
    latency: float,
    sharing: float,
) -> float:
    """Return what of a layer-wise transfer is left over when the prompt is done.

    Layers are computed in equal times and sent one after the other, each after it was
    computed. When sending a layer is faster than computing one, only the last layer's
    transfer is left; else the link is the bottleneck from the first layer on.
    """
    send = size_bytes * max(sharing, 1.0) / bytes_per_second / layers
    compute = prompt_seconds / layers
    if send <= compute:
        return latency + send
    return latency + compute + layers * send - prompt_seconds


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A machine's link. `fixed_seconds` is seen at every layer-wise hand-over, however well it hides."""

    bytes_per_second: float
    latency: float = 20e-6
    fixed_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.bytes_per_second > 0.0 or self.latency < 0.0 or self.fixed_seconds < 0.0:
            raise PerformanceModelError(
                f"a link of {self.bytes_per_second} B/s, {self.latency} s latency and "
                f"{self.fixed_seconds} s fixed cost: the first must be above 0, the others not below"
            )

    @classmethod
    def of_gbit(cls, gbit_s: float, *, latency: float = 20e-6, fixed_seconds: float = 0.0) -> LinkModel:
        """Build from the rate that data sheets give."""
        return cls(gbit_s * 1e9 / 8.0, latency, fixed_seconds)

    def transfer_seconds(self, size_bytes: float, *, sharing: float = 1.0) -> float:
        """Time on the link when `sharing` transfers use it at once."""
        return transfer_seconds(float(size_bytes), self.bytes_per_second, self.latency, float(sharing))

    def exposed_seconds(
        self,
        size_bytes: float,
        prompt_seconds: float,
        *,
        layers: int,
        layerwise: bool,
        sharing: float = 1.0,
    ) -> float:
        """Return the delay of the second token that the transfer causes."""
        if not layerwise:
            return self.transfer_seconds(size_bytes, sharing=sharing)
        return self.fixed_seconds + layerwise_exposed_seconds(
            float(size_bytes),
            float(layers),
            float(prompt_seconds),
            self.bytes_per_second,
            self.latency,
            float(sharing),
        )
