"""GPU memory in the daemon: a CUDA virtual-memory allocation imported from its descriptor.

Not yet run on hardware. The same steps as for a memfd, with the driver's calls:
``cuMemImportFromShareableHandle`` for the descriptor, ``cuMemMap`` for the mapping. The
allocation says which device it is on, so one daemon holds the memory of all GPUs of its node.
That device's context is made current on the daemon's one thread before each use; UCX needs it
when it registers the memory (source: CUDA driver API reference, virtual memory management).
"""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

from services.kvd.mapping import MappingError

if TYPE_CHECKING:
    from services.kvd.mapping import KvMapping

_POSIX_FD = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The head of ``CUmemAllocationProp`` (cuda.h), with room for the rest."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("rest", ctypes.c_ubyte * 64),
    )


class CudaMapping:
    """Imported device memory. Takes the descriptor over; `device` is its CUDA ordinal in this process."""

    kind = "cuda-vmm"

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MappingError(f"GPU memory needs the CUDA driver: {error}") from error
        self._call("cuInit", ctypes.c_uint(0))
        self._handle = ctypes.c_ulonglong()
        self._call(
            "cuMemImportFromShareableHandle",
            ctypes.byref(self._handle),
            ctypes.c_void_p(descriptor),
            ctypes.c_int(_POSIX_FD),
        )
        properties = _Properties()
        self._call("cuMemGetAllocationPropertiesFromHandle", ctypes.byref(properties), self._handle)
        self.device = int(properties.location.id)
        self.context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), ctypes.c_int(self.device))
        self.address = self._map()
        os.close(descriptor)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Copy bytes out for hashing; writing into the copy changes nothing on the device."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise IndexError(f"bytes {offset} to {offset + nbytes} are outside the {self.nbytes} mapped")
        copy = (ctypes.c_char * nbytes)()
        self._use_device()
        self._call(
            "cuMemcpyDtoH_v2", copy, ctypes.c_ulonglong(self.address + offset), ctypes.c_size_t(nbytes)
        )
        return memoryview(copy).cast("B")

    def copy_to(self, offset: int, target: KvMapping, target_offset: int, nbytes: int) -> None:
        """Copy bytes into another engine's device memory, on this device or another."""
        if not isinstance(target, CudaMapping):
            raise MappingError(f"GPU memory cannot be copied into {target.kind} memory")
        source = ctypes.c_ulonglong(self.address + offset)
        there = ctypes.c_ulonglong(target.address + target_offset)
        size = ctypes.c_size_t(nbytes)
        self._use_device()
        self._call("cuMemcpyPeer", there, target.context, source, self.context, size)

    def fence(self) -> None:
        """Unmap the old addresses and map the memory elsewhere.

        Nothing takes the old range's place: device addresses are written by hardware through
        registrations, which fail once the old one is closed.
        """
        old, self.address = self.address, self._map()
        self._unmap(old)

    def close(self, *, late_writers: bool) -> None:
        """Let go of the memory; hardware cannot reach it any more, late or not."""
        del late_writers
        self._unmap(self.address)
        self._call("cuMemRelease", self._handle)

    def _use_device(self) -> None:
        self._call("cuCtxSetCurrent", self.context)

    def _map(self) -> int:
        """Map the memory at new addresses; its device's context stays current for what comes next."""
        self._use_device()
        base, size, zero = ctypes.c_ulonglong(), ctypes.c_size_t(self.nbytes), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(base), size, ctypes.c_size_t(0), zero, zero)
        self._call("cuMemMap", base, size, ctypes.c_size_t(0), self._handle, zero)
        access = _Access(_Location(_DEVICE, self.device), _READ_WRITE)
        self._call("cuMemSetAccess", base, size, ctypes.byref(access), ctypes.c_size_t(1))
        return base.value

    def _unmap(self, address: int) -> None:
        base, size = ctypes.c_ulonglong(address), ctypes.c_size_t(self.nbytes)
        self._call("cuMemUnmap", base, size)
        self._call("cuMemAddressFree", base, size)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._cuda, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorString(status, ctypes.byref(text))
            raise MappingError(f"{name}: {(text.value or b'error').decode()} ({status})")
