"""The one place that knows how kernels are compiled.

A *kernel* is a small function over flat arrays: the scheduler's over `arrays`, the
performance model's over its rows. It is compiled by numba, and stays a plain Python
function under ``NUMBA_DISABLE_JIT=1``, which also keeps numba out of the process: an
emulated machine evaluates a few kernels per iteration and must start fast and stay small.
A kernel may call other kernels, so the simulator's compiled loop runs the same policies
as the live router. The scheduler's use integers only, which makes both ways of running
them give the same answers.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable

Kernel = TypeVar("Kernel", bound="Callable[..., Any]")


def compiled(function: Kernel) -> Kernel:
    """Compile a kernel on its first call and keep the result on disk for the next process."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        return function
    from numba import njit

    return cast("Kernel", njit(cache=True, nogil=True)(function))
