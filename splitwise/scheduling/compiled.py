"""The one place that knows how kernels are compiled.

A *kernel* is a small function over the flat arrays of `arrays` or `batching`. It is
compiled by numba, and stays a plain Python function under ``NUMBA_DISABLE_JIT=1``; a
kernel may call other kernels, so the simulator's compiled loop runs the same policies
as the live router. Kernels use integers only, which makes both ways of running them
give the same answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

Kernel = TypeVar("Kernel", bound="Callable[..., Any]")


def compiled(function: Kernel) -> Kernel:
    """Compile a kernel on its first call and keep the result on disk for the next process."""
    return cast("Kernel", njit(cache=True, nogil=True)(function))
