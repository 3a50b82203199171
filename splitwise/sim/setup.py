"""The cluster that is simulated: machines with all that the loops need to know of them.

`Cluster` is plain numbers; ``config`` builds one from a YAML file and the hardware
catalogue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.scheduling.arrays import POOL_PROMPT, POOL_TOKEN

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

HOMES = {"prompt": POOL_PROMPT, "token": POOL_TOKEN}


@dataclass(frozen=True, slots=True)
class Power:
    """Watts of a machine while it idles and in each kind of iteration."""

    idle: float = 0.0
    prompt: float = 0.0
    token: float = 0.0


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine. `home` is POOL_PROMPT or POOL_TOKEN, `model_row` its row in `Cluster.rows`.

    `link_bytes` is its link's bytes per second in each direction, `visible_seconds` what
    a layer-wise push costs besides the last layer's time.
    """

    name: str
    home: int
    kv_blocks: int
    model_row: int = 0
    link_bytes: float = 25e9
    visible_seconds: float = 0.0
    kind: str = "machine"
    power: Power = Power()
    cost_per_hour: float = 0.0
    memory_bytes: int = 0  # of all accelerators together
    weights_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Failure:
    """A machine is lost at `at` seconds, and is back, empty, at `back` (never when None)."""

    machine: int
    at: float
    back: float | None = None


@dataclass(frozen=True)
class Cluster:
    """Machines and the rules they share. Times are seconds, sizes tokens unless named otherwise."""

    machines: tuple[Machine, ...]
    rows: NDArray[np.float64]
    token_bytes: int  # KV bytes of one token
    layers: int = 80
    block_tokens: int = 16
    max_batch_tokens: int = 2048  # paper, section IV-B: throughput falls beyond
    max_running: int = 512
    max_preemptions: int = 4
    serialized_below_tokens: int = 512  # paper, section IV-C; as the router's
    hand_over_seconds: float = 0.001  # signal, and the token machine's admission
    report_seconds: float = 0.0  # 0: machines tell the scheduler at once
    assumed_max_tokens: int = 2048  # max_tokens of a request, as far as the scheduler knows
    failures: tuple[Failure, ...] = field(default=())

    def __post_init__(self) -> None:
        if not self.machines:
            raise ConfigError("the cluster has no machines: give at least one prompt or token machine")
        least_one = (
            "token_bytes", "layers", "block_tokens", "max_batch_tokens", "max_running", "max_preemptions"
        )  # fmt: skip
        for name in least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("serialized_below_tokens", "hand_over_seconds", "report_seconds"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must not be negative")
        for machine in self.machines:
            self._check_machine(machine)
        for failure in self.failures:
            if not 0 <= failure.machine < len(self.machines):
                raise ConfigError(
                    f"a failure names machine {failure.machine}; the last machine is {len(self.machines) - 1}"
                )
            if failure.at < 0 or (failure.back is not None and failure.back <= failure.at):
                raise ConfigError(
                    f"machine {failure.machine} fails at {failure.at:g} s, or is back before that"
                )

    def _check_machine(self, machine: Machine) -> None:
        if machine.home not in HOMES.values():
            raise ConfigError(f"machine {machine.name}: its home pool must be prompt or token")
        if machine.kv_blocks < 1:
            raise ConfigError(
                f"machine {machine.name} ({machine.kind}) has no memory for any KV block: the model's "
                f"weights take {machine.weights_bytes:,} of {machine.memory_bytes:,} bytes; "
                "take a larger machine"
            )
        if not 0 <= machine.model_row < len(self.rows) or not machine.link_bytes > 0:
            raise ConfigError(f"machine {machine.name}: needs a performance model and a positive link speed")

    @property
    def split(self) -> bool:
        """Whether there is a token pool at all."""
        return any(machine.home == POOL_TOKEN for machine in self.machines)

    @property
    def largest_tokens(self) -> int:
        """The most tokens of one request that some machine can hold."""
        return max(machine.kv_blocks for machine in self.machines) * self.block_tokens
