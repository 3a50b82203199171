"""An engine's KV memory as the daemon sees it: mapped without a copy, and fenceable.

`KvMapping` is what the daemon needs; `MemfdMapping` is the CPU's, `services.kvd.cuda` has
the GPU's. To *fence* is to make every address that was ever given to a peer land nowhere:
the old addresses get anonymous memory, and the engine's memory is mapped anew elsewhere. So
a writer that was stopped and wakes up late, or one that never heard of the revoke, cannot
harm blocks that have a new owner.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

_PROT_READ_WRITE = 0x1 | 0x2
_MAP_SHARED, _MAP_PRIVATE, _MAP_FIXED, _MAP_ANONYMOUS, _MAP_NORESERVE = 0x01, 0x02, 0x10, 0x20, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class MappingError(Exception):
    """The memory that an engine handed over cannot be mapped."""


class KvMapping(Protocol):
    """One engine's memory in this process."""

    kind: str
    address: int
    nbytes: int

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes for hashing; must not be kept over a fence."""

    def copy_to(self, offset: int, target: KvMapping, target_offset: int, nbytes: int) -> None:
        """Copy bytes into another engine's memory of the same kind."""

    def fence(self) -> None:
        """Make old addresses harmless and map the memory again; `address` changes."""

    def close(self, *, late_writers: bool) -> None:
        """Let go of the memory; with `late_writers` the addresses stay reserved and harmless."""


class MemfdMapping:
    """A mapped memfd. Takes the descriptor over."""

    kind = "memfd"

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self._fd = descriptor
        self.nbytes = nbytes
        try:
            have = os.fstat(descriptor).st_size
            seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
        except OSError as error:
            raise MappingError(f"the KV memory is not a memfd: {error.strerror}") from error
        if have < nbytes:
            raise MappingError(f"the KV memory has {have} bytes, {nbytes} were announced")
        if not seals & fcntl.F_SEAL_SHRINK:
            raise MappingError("the KV memory may shrink under this process: seal it with F_SEAL_SHRINK")
        self.address = self._map()
        self._fenced: list[int] = []

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return bytes of the memory."""
        if not 0 <= offset <= offset + nbytes <= self.nbytes:
            raise IndexError(f"bytes {offset} to {offset + nbytes} are outside the {self.nbytes} mapped")
        return memoryview((ctypes.c_char * nbytes).from_address(self.address + offset)).cast("B")

    def copy_to(self, offset: int, target: KvMapping, target_offset: int, nbytes: int) -> None:
        """Copy bytes into another engine's memory."""
        target.view(target_offset, nbytes)[:] = self.view(offset, nbytes)

    def fence(self) -> None:
        """Replace the old addresses by anonymous memory and map the memory again."""
        old, self.address = self.address, self._map()
        self._overlay(old)
        self._fenced.append(old)

    def close(self, *, late_writers: bool) -> None:
        """Let go of the memory at once, whoever still has its addresses."""
        self._overlay(self.address)
        self._fenced.append(self.address)
        os.close(self._fd)
        if not late_writers:
            for address in self._fenced:
                _libc.munmap(address, self.nbytes)
            self._fenced.clear()

    def _map(self) -> int:
        return _mmap(0, self.nbytes, _MAP_SHARED, self._fd)

    def _overlay(self, address: int) -> None:
        _mmap(address, self.nbytes, _MAP_PRIVATE | _MAP_FIXED | _MAP_ANONYMOUS | _MAP_NORESERVE, -1)


def _mmap(address: int, nbytes: int, flags: int, descriptor: int) -> int:
    mapped: int | None = _libc.mmap(address or None, nbytes, _PROT_READ_WRITE, flags, descriptor, 0)
    if mapped is None or mapped == _MAP_FAILED:
        reason = os.strerror(ctypes.get_errno())
        raise MappingError(f"cannot map {nbytes} bytes of KV memory: {reason}")
    return mapped


def _open_cuda(descriptor: int, nbytes: int) -> KvMapping:
    from services.kvd.cuda import CudaMapping

    return CudaMapping(descriptor, nbytes)


OPENERS: dict[str, Callable[[int, int], KvMapping]] = {"memfd": MemfdMapping, "cuda-vmm": _open_cuda}


def open_mapping(kind: str, descriptor: int, nbytes: int) -> KvMapping:
    """Map an engine's memory; takes the descriptor over, also when it raises `MappingError`."""
    opener = OPENERS.get(kind)
    if opener is None:
        os.close(descriptor)
        raise MappingError(f"memory kind {kind!r} is not one of {', '.join(OPENERS)}")
    try:
        return opener(descriptor, nbytes)
    except MappingError:
        os.close(descriptor)
        raise
