"""KV memory that can be handed to the KV daemon: on CPUs a memfd that holds the KV cache itself.

vLLM enters `get_mem_pool_context()` around the one allocation of its KV cache; inside it
this module puts shared memory where vLLM asked for zeros, so that no byte of KV is ever
copied between engine and daemon.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.overrides import TorchFunctionMode

from services.kvd.memfd import MemfdMemory

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from services.kvd.memfd import KvMemory


class KvAllocation(Protocol):
    """Where the KV cache lies: a context for its allocation, then the order of notices."""

    @property
    def memory(self) -> KvMemory | None:
        """What to hand to the daemon; None before the KV cache was allocated."""

    @property
    def base(self) -> int:
        """Address of byte 0 in this process."""

    def begin_pass(self) -> None:
        """Get ready for a pass whose layers will be announced."""

    def after_kernels(self, notice: Callable[[], None]) -> None:
        """Call `notice`, from any thread, once all work launched so far on the device is done."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None: ...


def kv_allocation(device: str) -> KvAllocation:
    """Return the allocation for vLLM's device type."""
    if device == "cpu":
        return SharedMemoryAllocation()
    if device == "cuda":
        from services.engine.vllm.cuda_memory import CudaVmmAllocation

        return CudaVmmAllocation()
    raise ValueError(f"device {device!r}: the KV cache can be shared on cpu and cuda only")


class CatchAllocation(TorchFunctionMode):  # type: ignore[misc]
    """While entered, the first ``torch.zeros(nbytes, dtype=int8)`` on `device` is made by `make` instead.

    That is the KV cache: the only flat int8 tensor that vLLM makes there.
    """

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device
        self._made = False

    def make(self, nbytes: int) -> torch.Tensor:
        """Return `nbytes` zeros."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Callable[..., Any], _types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self._made and func is torch.zeros and self._is_kv_cache(args, kwargs):
            self._made = True
            return self.make(args[0])
        return func(*args, **kwargs)

    def _is_kv_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return (
            len(args) == 1
            and isinstance(args[0], int)
            and kwargs.get("dtype") is torch.int8
            and torch.device(kwargs.get("device") or "cpu").type == self._device
        )


class SharedMemoryAllocation(CatchAllocation):
    """On CPUs: the KV cache is a memfd's mapping."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.memory: MemfdMemory | None = None
        self.base = 0

    def make(self, nbytes: int) -> torch.Tensor:
        """Return the mapping of new shared memory."""
        self.memory = MemfdMemory(nbytes)
        tensor = torch.frombuffer(self.memory.buffer, dtype=torch.int8)
        self.base = tensor.data_ptr()
        return tensor

    def begin_pass(self) -> None:
        """Nothing to prepare."""

    def after_kernels(self, notice: Callable[[], None]) -> None:
        """Call `notice`: on a CPU, what was called has run."""
        notice()
