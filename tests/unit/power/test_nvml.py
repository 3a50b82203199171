"""The driver's errors as ours, and that the emulated NVML is shaped like the real one."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from services.power import emulated_nvml
from services.power.nvml import Fault, Nvml, NvmlError
from splitwise.errors import ConfigError

FUNCTIONS = [name for name in vars(emulated_nvml) if name.startswith("nvml")]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_emulated_functions_are_those_of_the_real_one(name: str) -> None:
    real = inspect.signature(getattr(pynvml, name))
    assert list(inspect.signature(getattr(emulated_nvml, name)).parameters) == list(real.parameters)


@pytest.mark.parametrize("name", [name for name in vars(emulated_nvml) if name.startswith("NVML_ERROR_")])
def test_the_emulated_errors_are_those_of_the_real_one(name: str) -> None:
    code = getattr(emulated_nvml, name)
    assert code == getattr(pynvml, name)
    assert str(emulated_nvml.NVMLError(code)) == str(pynvml.NVMLError(code))
    assert emulated_nvml.NVMLError(code).value == pynvml.NVMLError(code).value


@pytest.mark.parametrize(
    ("code", "fault", "remedy"),
    [
        (pynvml.NVML_ERROR_NO_PERMISSION, Fault.NO_PERMISSION, "CAP_SYS_ADMIN"),
        (pynvml.NVML_ERROR_NOT_SUPPORTED, Fault.NOT_SUPPORTED, "no power limit"),
        (pynvml.NVML_ERROR_GPU_IS_LOST, Fault.LOST, "Xid"),
        (pynvml.NVML_ERROR_RESET_REQUIRED, Fault.LOST, "reset"),
        (pynvml.NVML_ERROR_INVALID_ARGUMENT, Fault.OUT_OF_RANGE, "does not take"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, Fault.NO_DRIVER, "load the NVIDIA driver"),
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, Fault.NO_DRIVER, "load the NVIDIA driver"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, Fault.NO_DRIVER, "after an upgrade"),
        (pynvml.NVML_ERROR_TIMEOUT, Fault.OTHER, "dmesg"),
        (pynvml.NVML_ERROR_UNKNOWN, Fault.OTHER, "dmesg"),
    ],
)
def test_what_the_driver_says(code: int, fault: Fault, remedy: str) -> None:
    nvml = Nvml("services.power.emulated_nvml")

    def fail(*_: Any) -> None:
        raise pynvml.NVMLError(code)

    nvml._module = SimpleNamespace(NVMLError=pynvml.NVMLError, nvmlInit=fail)  # type: ignore[assignment]
    with pytest.raises(NvmlError, match=remedy) as raised:
        nvml.open()
    assert raised.value.fault is fault
    assert str(pynvml.NVMLError(code)) in str(raised.value)


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has a driver")
def test_without_a_driver_the_real_one_says_so() -> None:
    with pytest.raises(NvmlError, match="load the NVIDIA driver") as raised:
        Nvml("pynvml").open()
    assert raised.value.fault is Fault.NO_DRIVER


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"power\.nvml: cannot import 'no_such_nvml'"):
        Nvml("no_such_nvml")
