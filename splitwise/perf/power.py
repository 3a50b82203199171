"""Power and energy of the two phases, with caps.

A machine draws what is not GPU (fans, CPUs, links: its TDP minus its GPUs') at all times,
and per GPU a share of the GPU's TDP that depends on the phase and its batch. A cap bounds
the share; what a cap costs in time is the hardware's `prompt_factor` and `token_factor`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from splitwise.perf.catalog import Hardware

HALF, HALF_PROMPT_FACTOR = 0.5, 1.3  # prompt phase at half power: SplitwiseSim's h100-80gb-pcap
IDLE_SHARE = 0.15  # of TDP: a GPU that holds a model and computes nothing (assumed)


@dataclass(frozen=True, slots=True)
class PowerModel:
    """Shares of GPU TDP: in the prompt phase by prompt tokens, in the token phase by sequences.

    Outside the measured sizes the nearest measured one counts. `measured_on` names the
    hardware of the profile; for other hardware the shares are an assumption.
    """

    prompt_tokens: tuple[float, ...]
    prompt_share: tuple[float, ...]
    sequences: tuple[float, ...]
    token_share: tuple[float, ...]
    measured_on: str

    def share(self, *, prompt_tokens: float = 0.0, sequences: float = 0.0) -> float:
        """Share of TDP of a GPU in an iteration; the hungrier phase decides in a mixed one."""
        found = IDLE_SHARE
        if prompt_tokens > 0.0:
            found = float(np.interp(prompt_tokens, self.prompt_tokens, self.prompt_share))
        if sequences > 0.0:
            found = max(found, float(np.interp(sequences, self.sequences, self.token_share)))
        return found


def machine_watts(
    hardware: Hardware,
    power: PowerModel,
    *,
    prompt_tokens: float = 0.0,
    sequences: float = 0.0,
    gpus: int | None = None,
) -> float:
    """Return the watts of a machine (or its part of `gpus` GPUs) in an iteration; idle when both are 0."""
    used = hardware.gpus if gpus is None else gpus
    share = min(power.share(prompt_tokens=prompt_tokens, sequences=sequences), hardware.gpu_power_cap)
    return used * (hardware.other_watts / hardware.gpus + share * hardware.gpu_watts)


def energy_joules(
    hardware: Hardware,
    power: PowerModel,
    seconds: float,
    *,
    prompt_tokens: float = 0.0,
    sequences: float = 0.0,
    gpus: int | None = None,
) -> float:
    """Return the energy of an iteration, or of idling, that takes `seconds`."""
    watts = machine_watts(hardware, power, prompt_tokens=prompt_tokens, sequences=sequences, gpus=gpus)
    return watts * seconds


def prompt_slowdown(limit_share: float) -> float:
    """Return what a GPU's limit, as a share of its TDP, multiplies prompt times with.

    A straight line through 1 (no cap) and 1.3 (half power); lower caps are on it too, which is
    an assumption. The token phase does not slow down at half power (paper, HHcap).
    """
    return 1.0 + (HALF_PROMPT_FACTOR - 1.0) * max(0.0, 1.0 - limit_share) / (1.0 - HALF)
