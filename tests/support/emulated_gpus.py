"""A node of emulated GPUs for tests: their file, and the faults that they can have."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.launch.emulated_gpus import EmulatedGpus, GpuModel, create_gpus

if TYPE_CHECKING:
    from pathlib import Path

UUIDS = tuple(f"GPU-0000000{index}-aaaa-bbbb-cccc-ddddeeeeffff" for index in range(4))


class GpuNode:
    """`count` GPUs of 200 to 700 W, in `file`. Read and changed while agents run."""

    def __init__(self, folder: Path, count: int = 2) -> None:
        self.file = folder / "gpus.bin"
        create_gpus(self.file, [GpuModel(uuid, "test", 200, 700) for uuid in UUIDS[:count]])
        self.gpus = EmulatedGpus(self.file)

    @property
    def limits(self) -> list[float]:
        """The limits in watts."""
        return [float(value) / 1e3 for value in self.gpus.records["limit"]]

    def set_limit(self, index: int, watts: float) -> None:
        """As another program would."""
        self.gpus.records["limit"][index] = round(watts * 1e3)

    def set_other_limit(self, index: int, watts: float) -> None:
        """Another limiter, such as the board's."""
        self.gpus.records["other_limit"][index] = round(watts * 1e3)

    def fault(self, index: int, faults: int) -> None:
        """Let a GPU have these faults, and no others."""
        self.gpus.records["faults"][index] = faults

    def draw(self, index: int, watts: float) -> None:
        """What the GPU would draw without a limit."""
        self.gpus.records["demand"][index] = round(watts * 1e3)
