"""What an emulated machine's GPUs draw, and how their power limits slow it down.

The draw is the power model's for the running batch; it goes into the node's file of emulated
GPUs, where an emulated NVML finds it, and the limits that were set there act on the machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.errors import ConfigError
from splitwise.launch.emulated_gpus import EmulatedGpus
from splitwise.perf.catalog import shipped
from splitwise.perf.model import PerformanceModelError
from splitwise.perf.power import prompt_slowdown

if TYPE_CHECKING:
    from services.engine.emulated.settings import EmulatedSettings


class EmulatedPower:
    """The GPUs of one machine; without a file of GPUs nothing is written and nothing slows down."""

    def __init__(self, settings: EmulatedSettings) -> None:
        """Raises `ConfigError` when the file or a GPU in it is missing."""
        self._gpus: EmulatedGpus | None = None
        if settings.gpu_file is None:
            return
        try:
            self._watts = shipped().machine(settings.hardware).gpu_watts
            self._model = shipped().power(settings.performance_model, settings.tensor_parallel)
        except PerformanceModelError as error:
            raise ConfigError(f"machine.engine.options: {error}") from error
        self._gpus = EmulatedGpus(settings.gpu_file)
        self._places = [self._gpus.index(uuid) for uuid in settings.gpus]
        self.idle()

    def begin(self, prompt_tokens: int, sequences: int) -> float:
        """Draw for a batch from now on; returns what its time is multiplied with."""
        if self._gpus is None:
            return 1.0
        share = self._model.share(prompt_tokens=prompt_tokens, sequences=sequences)
        self._gpus.demand(self._places, share * self._watts)
        return prompt_slowdown(self._gpus.limit_share(self._places)) if prompt_tokens else 1.0

    def idle(self) -> None:
        """Draw for nothing to do."""
        if self._gpus is not None:
            self._gpus.demand(self._places, self._model.share() * self._watts)
