"""How the simulator's loops are compiled and where the result is kept.

Numba keeps a compiled function until *its* file changes, but a loop holds the code of all
functions it calls: the scheduler's kernels, the performance model's, each other's. So the
cache directory is named after the contents of all those files, and a change anywhere
compiles anew instead of simulating yesterday's scheduler.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numba

if TYPE_CHECKING:
    from collections.abc import Callable

Kernel = TypeVar("Kernel", bound="Callable[..., Any]")

_PACKAGE = Path(__file__).parents[1]
_MARKS = (b"@compiled", b"@kernel", b"register_model", b"njit")  # what only files with compiled code hold


@lru_cache(maxsize=1)
def cache_folder() -> Path:
    """Return where loops compiled from the present sources are kept."""
    digest = hashlib.sha256()
    for folder in ("perf", "scheduling", "sim"):
        for source in sorted((_PACKAGE / folder).glob("*.py")):
            text = source.read_bytes()
            if any(mark in text for mark in _MARKS):
                digest.update(source.name.encode() + text)
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "splitwise" / f"loops-{digest.hexdigest()[:16]}"


def compiled(function: Kernel) -> Kernel:
    """Compile on the first call and keep the result on disk; in memory only where that fails."""
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(cache_folder())
    try:
        return cast("Kernel", numba.njit(cache=True, nogil=True)(function))
    except RuntimeError:  # no place to write to
        return cast("Kernel", numba.njit(nogil=True)(function))
    finally:
        numba.config.CACHE_DIR = before
