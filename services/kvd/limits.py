"""What the host must grant a daemon: memory that it may lock, and room in ``/dev/shm``."""

from __future__ import annotations

import resource
import shutil

from splitwise.errors import ConfigError
from splitwise.telemetry import get_logger

SHM = "/dev/shm"  # noqa: S108 - the kernel's, not a temporary file
# Measured with UCX 1.22: a daemon takes 4.2 MiB. With less than 16 MiB free UCX does without shared
# memory and says nothing; at 16 MiB it ends with a segmentation fault; from 17 MiB on all is well.
SHM_NEEDED = 32 << 20
# Words of UCX_TLS that stand for transports with files in /dev/shm.
SHARED_MEMORY = frozenset({"all", "mm", "posix", "shm", "sm"})


def check_host(tls: str | None) -> None:
    """Warn of what costs speed; raises `ConfigError` for what UCX would crash on."""
    warn_about_memlock()
    if uses_shared_memory(tls):
        try:
            free = shutil.disk_usage(SHM).free
        except OSError as error:
            raise ConfigError(f"{SHM}: {error.strerror}; mount a tmpfs there") from None
        check_shared_memory(free)


def uses_shared_memory(tls: str | None) -> bool:
    """Say whether this UCX_TLS lets UCX use ``/dev/shm``; without one it may use everything."""
    words = (tls or "all").split(",")
    if words[0].startswith("^"):  # all but these
        return not SHARED_MEMORY & {word.removeprefix("^") for word in words}
    return bool(SHARED_MEMORY & set(words))


def check_shared_memory(free: int) -> None:
    """Raise `ConfigError` when `free` bytes are too few."""
    if free < SHM_NEEDED:
        raise ConfigError(
            f"{SHM}: {free >> 20} MiB are free, UCX needs {SHM_NEEDED >> 20} MiB: make it larger (mount -o "
            f"remount,size=1G {SHM}; shm_size of a container), or leave it out by kvd.ucx.tls, as in tcp,cma"
        )


def warn_about_memlock() -> None:
    """Say when registering memory with RDMA will fail."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit != resource.RLIM_INFINITY:
        get_logger().warning(
            "kvd.memlock_limited",
            bytes=limit,
            remedy="RDMA needs LimitMEMLOCK=infinity in the unit (TCP and shared memory do not)",
        )
