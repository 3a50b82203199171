"""The driver as the agent needs it: GPUs with limits in watts, and errors that say what to do.

`Nvml` speaks to the module that the settings name, `pynvml` (package nvidia-ml-py) or the
emulated one. It is used from one thread.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from splitwise.errors import ConfigError, SplitwiseError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Fault(StrEnum):
    """What kind of problem the driver has."""

    NO_PERMISSION = "no-permission"
    NOT_SUPPORTED = "not-supported"
    LOST = "lost"
    OUT_OF_RANGE = "out-of-range"
    NO_DRIVER = "no-driver"
    OTHER = "other"


# Return codes of nvml.h.
_FAULTS = {
    1: Fault.NO_DRIVER,  # uninitialized
    2: Fault.OUT_OF_RANGE,  # invalid argument
    3: Fault.NOT_SUPPORTED,
    4: Fault.NO_PERMISSION,
    6: Fault.LOST,  # not found
    9: Fault.NO_DRIVER,
    12: Fault.NO_DRIVER,  # the library is missing
    15: Fault.LOST,
    16: Fault.LOST,  # needs a reset
    18: Fault.NO_DRIVER,  # library and kernel module differ
    28: Fault.LOST,
}
_REMEDIES = {
    Fault.NO_PERMISSION: "setting a power limit needs root (CAP_SYS_ADMIN): run the agent by its unit"
    " splitwise-power.service, or set power.report_only",
    Fault.NOT_SUPPORTED: "this GPU has no power limit that can be set (as with vGPUs and some boards)",
    Fault.LOST: "the GPU does not answer: see dmesg for Xid errors; it needs a reset or the host a reboot",
    Fault.OUT_OF_RANGE: "the device does not take this value",
    Fault.NO_DRIVER: "load the NVIDIA driver, and restart what used it after an upgrade (nvidia-smi shows"
    " whether it answers)",
    Fault.OTHER: "see the driver's messages in dmesg",
}


class NvmlError(SplitwiseError):
    """The driver refused or failed; `fault` says how, the message what to do."""

    def __init__(self, fault: Fault, what: str, said: object) -> None:
        super().__init__(f"{what}: {said}: {_REMEDIES[fault]}")
        self.fault = fault


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU whose power limit can be set; watts."""

    uuid: str
    name: str
    index: int
    floor: float
    highest: float
    default: float
    handle: Any


@dataclass(frozen=True, slots=True)
class Reading:
    """A GPU's limit as it was set, the limit that is in force (another limiter may be lower), its draw."""

    limit: float
    enforced: float
    draw: float


class Nvml:
    """The driver. `open` it before anything else."""

    def __init__(self, module: str) -> None:
        """Raises `ConfigError` when the module is not installed."""
        try:
            self._module = importlib.import_module(module)
        except ImportError as error:
            remedy = (
                "install nvidia-ml-py (pip install 'splitwise[power]')" if module == "pynvml" else "see docs"
            )
            raise ConfigError(f"power.nvml: cannot import {module!r} ({error}): {remedy}") from None
        self.driver = ""

    def open(self) -> None:
        """Connect to the driver; raises `NvmlError`."""
        self._call("NVML", self._module.nvmlInit)
        self.driver = _text(self._call("NVML", self._module.nvmlSystemGetDriverVersion))

    def close(self) -> None:
        """Let the driver go; limits stay."""
        self._call("NVML", self._module.nvmlShutdown)

    def devices(self) -> tuple[list[Device], list[NvmlError]]:
        """Return the GPUs that can be limited, and what is wrong with the others."""
        found, problems = [], []
        for index in range(self._call("NVML", self._module.nvmlDeviceGetCount)):
            try:
                found.append(self._device(index))
            except NvmlError as error:
                problems.append(error)
        return found, problems

    def read(self, device: Device) -> Reading:
        """Read a GPU's limits and draw; raises `NvmlError`."""
        nvml, handle = self._module, device.handle
        limit = self._call(device.uuid, nvml.nvmlDeviceGetPowerManagementLimit, handle)
        enforced = self._call(device.uuid, nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        draw = self._call(device.uuid, nvml.nvmlDeviceGetPowerUsage, handle)
        return Reading(limit / 1e3, enforced / 1e3, draw / 1e3)

    def set_limit(self, device: Device, watts: float) -> None:
        """Set a GPU's limit; raises `NvmlError`."""
        what = f"{device.uuid}: setting {watts:g} W"
        self._call(what, self._module.nvmlDeviceSetPowerManagementLimit, device.handle, round(watts * 1e3))

    def _device(self, index: int) -> Device:
        nvml, what = self._module, f"GPU {index}"
        handle = self._call(what, nvml.nvmlDeviceGetHandleByIndex, index)
        uuid = _text(self._call(what, nvml.nvmlDeviceGetUUID, handle))
        what = f"GPU {index} ({uuid})"
        name = _text(self._call(what, nvml.nvmlDeviceGetName, handle))
        floor, highest = self._call(what, nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle)
        default = self._call(what, nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
        return Device(uuid, name, index, floor / 1e3, highest / 1e3, default / 1e3, handle)

    def _call(self, what: str, function: Callable[..., T], *arguments: object) -> T:
        try:
            return function(*arguments)
        except self._module.NVMLError as error:
            self._raise(what, error)

    def _raise(self, what: str, error: Exception) -> NoReturn:
        fault = _FAULTS.get(int(getattr(error, "value", 999)), Fault.OTHER)
        raise NvmlError(fault, what, error) from None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
