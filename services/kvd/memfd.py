"""An engine's KV memory on a CPU: one memfd, mapped by the engine and by its node's KV daemon.

Engines import this module: it must stay free of gRPC and UCX.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from typing import Protocol


class KvMemory(Protocol):
    """Memory that can be handed to the daemon as a file descriptor."""

    @property
    def kind(self) -> str:
        """``memfd`` or ``cuda-vmm``."""

    @property
    def fd(self) -> int:
        """The descriptor, owned by this object."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""


class MemfdMemory:
    """`nbytes` of zeroed shared memory. `buffer` is the mapping; the kernel frees it with its last user."""

    kind = "memfd"

    def __init__(self, nbytes: int, name: str = "splitwise-kv") -> None:
        if nbytes <= 0:
            raise ValueError(f"KV memory of {nbytes} bytes: must be above 0")
        self.nbytes = nbytes
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # The daemon maps it too: memory that shrank under the mapping would kill it.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
            self.buffer = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except OSError as error:
            os.close(self.fd)
            raise MemoryError(f"cannot map {nbytes} bytes of KV memory: {error}") from error

    def close(self) -> None:
        """Give the memory back. Views of `buffer` must be gone; the descriptor is closed in any case."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self.buffer.close()
