"""NVML without a GPU: the functions of `pynvml` that the power agent uses, over a file.

Chosen by ``power.nvml: services.power.emulated_nvml``; ``SPLITWISE_EMULATED_GPUS`` names the
file (`splitwise.launch.emulated_gpus`). Names, arguments, results, milliwatts and error codes
are pynvml's. As with the real one, limits stay when a process dies, are refused outside the
device's range or without permission, and a GPU may be lost at any moment.
"""

from __future__ import annotations

import os

from splitwise.errors import ConfigError
from splitwise.launch.emulated_gpus import (
    FILE_VARIABLE,
    IGNORED,
    LOST,
    NO_PERMISSION,
    NOT_SUPPORTED,
    EmulatedGpus,
)

NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_DRIVER_NOT_LOADED = 9
NVML_ERROR_GPU_IS_LOST = 15
_TEXTS = {
    NVML_ERROR_UNINITIALIZED: "Uninitialized",
    NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
    NVML_ERROR_DRIVER_NOT_LOADED: "Driver Not Loaded",
    NVML_ERROR_GPU_IS_LOST: "GPU is lost",
}


class NVMLError(Exception):
    """What NVML returned; `value` is its code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _TEXTS[self.value]


class _Driver:
    gpus: EmulatedGpus | None = None


def nvmlInit() -> None:
    """Find the node's GPUs; as if there were no driver when no file is named."""
    try:
        _Driver.gpus = EmulatedGpus(os.environ.get(FILE_VARIABLE, ""))
    except ConfigError:
        raise NVMLError(NVML_ERROR_DRIVER_NOT_LOADED) from None


def nvmlShutdown() -> None:
    """Let the GPUs go; their limits stay."""
    _gpus()
    _Driver.gpus = None


def nvmlSystemGetDriverVersion() -> str:
    """Name what is emulated."""
    _gpus()
    return "emulated"


def nvmlDeviceGetCount() -> int:
    """Count the node's GPUs, lost ones too."""
    return len(_gpus().records)


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    """Return a handle: here the place in the file."""
    if not 0 <= index < nvmlDeviceGetCount():
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    _field(index, "uuid")
    return index


def nvmlDeviceGetUUID(handle: int) -> str:
    """Return ``GPU-...``."""
    return bytes(_gpus().records["uuid"][_there(handle)]).decode()


def nvmlDeviceGetName(handle: int) -> str:
    """Return the product's name."""
    return bytes(_gpus().records["name"][_there(handle)]).decode()


def nvmlDeviceGetPowerManagementLimitConstraints(handle: int) -> list[int]:
    """Return the least and the most that can be set."""
    return [_power(handle, "floor"), _power(handle, "highest")]


def nvmlDeviceGetPowerManagementDefaultLimit(handle: int) -> int:
    """Return the limit after a start of the driver."""
    return _power(handle, "default")


def nvmlDeviceGetPowerManagementLimit(handle: int) -> int:
    """Return the limit that was set."""
    return _power(handle, "limit")


def nvmlDeviceGetEnforcedPowerLimit(handle: int) -> int:
    """Return the lowest of all limiters' limits."""
    return min(_power(handle, "limit"), _power(handle, "other_limit"))


def nvmlDeviceGetPowerUsage(handle: int) -> int:
    """Return what the GPU draws: what it would, within its limit."""
    return min(_power(handle, "demand"), nvmlDeviceGetEnforcedPowerLimit(handle))


def nvmlDeviceSetPowerManagementLimit(handle: int, limit: int) -> None:
    """Set the limit."""
    floor, highest = nvmlDeviceGetPowerManagementLimitConstraints(handle)
    faults = _field(handle, "faults")
    if faults & NO_PERMISSION:
        raise NVMLError(NVML_ERROR_NO_PERMISSION)
    if not floor <= limit <= highest:
        raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
    if not faults & IGNORED:
        _gpus().records["limit"][handle] = limit


def _gpus() -> EmulatedGpus:
    if _Driver.gpus is None:
        raise NVMLError(NVML_ERROR_UNINITIALIZED)
    return _Driver.gpus


def _there(handle: int) -> int:
    if int(_gpus().records["faults"][handle]) & LOST:
        raise NVMLError(NVML_ERROR_GPU_IS_LOST)
    return handle


def _field(handle: int, name: str) -> int:
    place = _there(handle)
    value = _gpus().records[name][place]
    return 0 if isinstance(value, bytes) else int(value)


def _power(handle: int, name: str) -> int:
    if _field(handle, "faults") & NOT_SUPPORTED:
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return _field(handle, name)
