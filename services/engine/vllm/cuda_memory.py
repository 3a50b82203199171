"""KV memory on a GPU: a CUDA virtual-memory allocation whose descriptor the KV daemon imports.

Not yet run on hardware. The KV cache's one allocation is made with ``cuMemCreate`` as an
exportable, GPUDirect-RDMA-capable handle and mapped; vLLM sees an ordinary tensor in it.
`cuMemExportToShareableHandle` gives the descriptor that goes to the daemon, which maps the
same physical memory (the path of a memfd on a CPU, with another call at each step). Plain
CUDA IPC handles would not do: they cannot be registered for RDMA by a third process.

A layer's notice must come after its kernels. An event is recorded on the layer's stream and
a thread waits for it, since host callbacks inside a stream (``cudaLaunchHostFunc``) may not
take Python's lock without stalling the stream.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

import torch

from services.engine.vllm.memory import CatchAllocation

if TYPE_CHECKING:
    from collections.abc import Callable

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_RECOMMENDED = 1  # CU_MEM_ALLOC_GRANULARITY_RECOMMENDED


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp`` of the driver API (cuda.h)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_metadata", ctypes.c_void_p),
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaError(Exception):
    """A call of the CUDA driver failed."""


class _Driver:
    """The few driver calls needed, each raising `CudaError`."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def __call__(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({status})")


class CudaVmmMemory:
    """One exportable allocation on the current device, mapped at `base`."""

    kind = "cuda-vmm"

    def __init__(self, nbytes: int) -> None:
        self._driver = _Driver()
        device = torch.cuda.current_device()
        location = _Location(_DEVICE, device)
        wanted = _AllocationProperties(
            type=_PINNED, requested_handle_types=_POSIX_FD, location=location, gpu_direct_rdma_capable=1
        )
        unit = ctypes.c_size_t()
        self._driver(
            "cuMemGetAllocationGranularity",
            ctypes.byref(unit),
            ctypes.byref(wanted),
            ctypes.c_int(_RECOMMENDED),
        )
        self.nbytes = -(-nbytes // unit.value) * unit.value
        self._handle = ctypes.c_ulonglong()
        size = ctypes.c_size_t(self.nbytes)
        self._driver(
            "cuMemCreate", ctypes.byref(self._handle), size, ctypes.byref(wanted), ctypes.c_ulonglong(0)
        )
        base = ctypes.c_ulonglong()
        zero = ctypes.c_ulonglong(0)
        self._driver("cuMemAddressReserve", ctypes.byref(base), size, unit, zero, zero)
        self.base = base.value
        self._driver("cuMemMap", base, size, ctypes.c_size_t(0), self._handle, zero)
        access = _Access(location, _READ_WRITE)
        self._driver("cuMemSetAccess", base, size, ctypes.byref(access), ctypes.c_size_t(1))
        descriptor = ctypes.c_int(-1)
        self._driver(
            "cuMemExportToShareableHandle",
            ctypes.byref(descriptor),
            self._handle,
            ctypes.c_int(_POSIX_FD),
            zero,
        )
        self.fd = descriptor.value

    def tensor(self, nbytes: int) -> torch.Tensor:
        """Return the first `nbytes` as a tensor of zeros; it must not outlive this object."""
        tensor = torch.as_tensor(_ArrayInterface(self.base, nbytes), device="cuda")
        return tensor.zero_()

    def close(self) -> None:
        """Close the descriptor and unmap; the daemon's own mapping keeps the memory until it drops it."""
        os.close(self.fd)
        base, size = ctypes.c_ulonglong(self.base), ctypes.c_size_t(self.nbytes)
        self._driver("cuMemUnmap", base, size)
        self._driver("cuMemAddressFree", base, size)
        self._driver("cuMemRelease", self._handle)


class _ArrayInterface:
    """Lets torch view device memory that it did not allocate."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|i1",
            "data": (base, False),
            "version": 3,
        }


class CudaVmmAllocation(CatchAllocation):
    """On GPUs: the KV cache is an exportable allocation."""

    def __init__(self) -> None:
        super().__init__("cuda")
        self.memory: CudaVmmMemory | None = None
        self._notices: queue.Queue[tuple[torch.cuda.Event, Callable[[], None]]] = queue.Queue()
        self._thread = threading.Thread(target=self._notify, name="splitwise-layers", daemon=True)
        self._thread.start()

    @property
    def base(self) -> int:
        """Address of byte 0 on the device."""
        return self.memory.base if self.memory is not None else 0

    def make(self, nbytes: int) -> torch.Tensor:
        """Return a view of new exportable memory."""
        self.memory = CudaVmmMemory(nbytes)
        return self.memory.tensor(nbytes)

    def begin_pass(self) -> None:
        """Wait until the previous pass's layers are announced: a plan counts layers from there."""
        self._notices.join()

    def after_kernels(self, notice: Callable[[], None]) -> None:
        """Call `notice` once what was launched on the current stream has run; calls keep their order."""
        event = torch.cuda.Event(blocking=True)
        event.record()
        self._notices.put((event, notice))

    def _notify(self) -> None:
        while True:
            event, notice = self._notices.get()
            event.synchronize()
            notice()
            self._notices.task_done()
