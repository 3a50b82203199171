"""What vLLM's CPU ranks would leave behind: their shared memory, and the file by which they met.

Both carry the name in ``VLLM_DIST_IDENT``, which vLLM sets in each rank's process. They are only
needed until all ranks have found each other, so they go then, and a killed engine leaves nothing.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - where POSIX shared memory is


def meeting_name() -> str:
    """Return the name in this rank's process; empty on GPUs."""
    return os.environ.get("VLLM_DIST_IDENT", "")


def remove(name: str) -> None:
    """Remove what carries the name; the ranks keep what they have mapped."""
    if name.startswith("vllm_dist_"):
        for path in (*SHARED_MEMORY.glob(f"{name}-*"), Path(tempfile.gettempdir()) / name):
            path.unlink(missing_ok=True)
