"""``python -m splitwise.doctor.cuda``: what the CUDA driver lets processes share, told as JSON.

For each device: whether its memory can be handed over as a file descriptor (which is how
engines give their KV memory to the daemon), reached by network cards, and opened by another
process over CUDA IPC; the last is tried with a second process (``--open``). Run as a process of
its own, since a driver may hang or end it. Numbers are those of cuda.h. Not yet run on hardware.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from typing import Any

ATTRIBUTES = {"vmm": 102, "vmm_descriptor": 103, "gpu_direct_rdma": 116, "dma_buf": 124}
NBYTES = 1 << 20
PATTERN = 0x5A
LAZY_PEER_ACCESS = 1
OPEN = "--open"
TIMEOUT_S = 30.0


class CudaError(Exception):
    """A call of the driver failed."""


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * 64),)


class Cuda:
    """The driver; `library` is libcuda.so.1, or stands for it in tests."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.call("cuInit", ctypes.c_uint(0))

    def call(self, name: str, *arguments: Any) -> None:
        """Call one function; raises `CudaError` with the driver's own number."""
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            raise CudaError(f"{name} failed with {status}")

    def count(self) -> int:
        """Return the number of devices."""
        count = ctypes.c_int()
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def attribute(self, device: int, number: int) -> int:
        """Return one attribute of a device."""
        value = ctypes.c_int()
        self.call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ctypes.c_int(device))
        return value.value

    def peer(self, device: int, other: int) -> bool:
        """Say whether a device reaches another's memory directly."""
        can = ctypes.c_int()
        self.call("cuDeviceCanAccessPeer", ctypes.byref(can), ctypes.c_int(device), ctypes.c_int(other))
        return bool(can.value)

    def use(self, device: int) -> None:
        """Make the device's primary context the current one."""
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self.call("cuCtxSetCurrent", context)

    def share(self) -> str:
        """Allocate memory with the pattern in it; returns its handle for another process, as hex."""
        address, handle = ctypes.c_ulonglong(), IpcHandle()
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(NBYTES))
        self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(PATTERN), ctypes.c_size_t(NBYTES))
        self.call("cuCtxSynchronize")
        self.call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        return bytes(handle).hex()

    def check_shared(self, handle: str) -> None:
        """Open another process's memory; raises `CudaError` when its last byte is not the pattern's."""
        address, byte = ctypes.c_ulonglong(), ctypes.c_ubyte()
        opened = IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        self.call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, ctypes.c_uint(LAZY_PEER_ACCESS))
        last = ctypes.c_ulonglong(address.value + NBYTES - 1)
        self.call("cuMemcpyDtoH_v2", ctypes.byref(byte), last, ctypes.c_size_t(1))
        if byte.value != PATTERN:
            raise CudaError("the other process's memory was opened and holds something else")


def inspect(cuda: Cuda) -> dict[str, Any]:
    """Ask every device, and try CUDA IPC on each with another process."""
    count = cuda.count()
    devices = []
    for device in range(count):
        told: dict[str, Any] = {
            name: bool(cuda.attribute(device, number)) for name, number in ATTRIBUTES.items()
        }
        told["peers"] = [other for other in range(count) if other != device and cuda.peer(device, other)]
        cuda.use(device)
        try:
            told["ipc"] = _other_process_reads(device, cuda.share())
        except CudaError as error:
            told["ipc"] = str(error)
        devices.append(told)
    return {"devices": devices}


def _other_process_reads(device: int, handle: str) -> str:
    """Return an empty text when the other process has read the pattern, else what was wrong."""
    done = subprocess.run(
        [sys.executable, "-m", "splitwise.doctor.cuda", OPEN, str(device), handle],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    if done.returncode == 0:
        return ""
    return (done.stderr.strip().splitlines() or [f"the other process ended with {done.returncode}"])[-1]


def main() -> int:
    """Print what the driver told; returns the exit status."""
    try:
        cuda = Cuda(ctypes.CDLL("libcuda.so.1"))
        if OPEN in sys.argv:
            device, handle = sys.argv[sys.argv.index(OPEN) + 1 :]
            cuda.use(int(device))
            cuda.check_shared(handle)
            return 0
        print(json.dumps(inspect(cuda)))
    except (OSError, CudaError, subprocess.TimeoutExpired) as error:
        print(error, file=sys.stderr)
        print(json.dumps({"error": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
