"""The GPUs of an emulated node: one file that all its processes map.

It holds what a driver would hold: each GPU's power limit, and what the GPU would draw if it
were not limited. Emulated engines write the draw (`EmulatedGpus.demand`), an emulated NVML
(`services.power.emulated_nvml`) reads and sets limits. As with a real driver, a limit stays
when the process that set it dies. Milliwatts, as NVML has them.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from splitwise.perf.catalog import Hardware

FILE_VARIABLE = "SPLITWISE_EMULATED_GPUS"
NO_PERMISSION, NOT_SUPPORTED, LOST, IGNORED = 1, 2, 4, 8
"""Faults of a GPU, as bits: setting is refused; has no power limit; fell off the bus; takes a limit
and keeps another."""
FLOOR_SHARE = 2 / 7  # of its TDP, as with an H100: 200 of 700 W
RECORD = np.dtype(
    [
        ("uuid", "S48"),
        ("name", "S48"),
        ("floor", "<u8"),
        ("highest", "<u8"),
        ("default", "<u8"),
        ("limit", "<u8"),
        ("other_limit", "<u8"),  # of another limiter, such as the board's; the lower one is enforced
        ("demand", "<u8"),
        ("faults", "<u8"),
    ]
)


@dataclass(frozen=True, slots=True)
class GpuModel:
    """One GPU as it is made, in watts."""

    uuid: str
    name: str
    floor: float
    highest: float


def gpu_models(machine: str, hardware: Hardware, count: int | None = None) -> list[GpuModel]:
    """Return a machine's GPUs (`count`, default: all of its type); the same name, the same UUIDs."""
    made = []
    for index in range(hardware.gpus if count is None else count):
        name = f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'{machine}/{index}')}"
        floor = round(FLOOR_SHARE * hardware.gpu_watts)
        made.append(GpuModel(name, f"emulated {hardware.name}", floor, hardware.gpu_watts))
    return made


def create_gpus(path: Path, models: Sequence[GpuModel]) -> None:
    """Write the file of a node with these GPUs, at their default limits and drawing nothing."""
    records = np.zeros(len(models), RECORD)
    for record, model in zip(records, models, strict=True):
        record["uuid"], record["name"] = model.uuid.encode(), model.name.encode()
        record["floor"] = round(model.floor * 1e3)
        record["highest"] = record["default"] = record["limit"] = round(model.highest * 1e3)
        record["other_limit"] = record["highest"]
    path.write_bytes(records.tobytes())


class EmulatedGpus:
    """The mapped file. Fields may be read and written by name: ``gpus.records["limit"][0]``."""

    def __init__(self, path: Path | str) -> None:
        """Raises `ConfigError` when the file is missing or no such file."""
        try:
            self.records: np.memmap[Any, Any] = np.memmap(path, RECORD, mode="r+")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: is no file of emulated GPUs: {error}") from None

    def index(self, uuid: str) -> int:
        """Return a GPU's place; raises `ConfigError`."""
        found = np.flatnonzero(self.records["uuid"] == uuid.encode())
        if not len(found):
            raise ConfigError(f"no emulated GPU {uuid!r} in the node's file")
        return int(found[0])

    def demand(self, places: Sequence[int], watts: float) -> None:
        """Say what each of these GPUs would draw without a limit."""
        self.records["demand"][places] = round(watts * 1e3)

    def limit_share(self, places: Sequence[int]) -> float:
        """Return the lowest limit of these GPUs, as a share of the highest that they take."""
        limits = np.minimum(self.records["limit"][places], self.records["other_limit"][places])
        return float((limits / self.records["highest"][places]).min())
