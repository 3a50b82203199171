"""Compile a kernel with numba, or leave it plain Python.

``NUMBA_DISABLE_JIT=1`` keeps numba out of the process altogether: an emulated machine
evaluates a few kernels per iteration and must start fast and stay small, and coverage
and debuggers see plain Python.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

F = TypeVar("F", bound="Callable[..., object]")


def kernel(function: F) -> F:
    """Return `function` compiled in nopython mode (cached on disk), or unchanged without numba."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return function
    import numba

    compiled: F = numba.njit(cache=True, nogil=True)(function)
    return compiled
