"""The calls that GPU memory takes, against a driver that only keeps books. Not hardware's word."""

from __future__ import annotations

import os
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from services.kvd import cuda
from services.kvd.cuda import CudaMapping
from services.kvd.mapping import MappingError

if TYPE_CHECKING:
    import ctypes


class Driver:
    """A stand-in for libcuda: where allocations are, what is mapped, whose context is current."""

    def __init__(self, devices: dict[int, int]) -> None:
        self.devices = devices  # descriptor to device
        self.mapped: dict[int, int] = {}  # address to handle
        self.current: int | None = None
        self.copies: list[tuple[int, int, int, int, int]] = []
        self.released: list[int] = []
        self.calls: Counter[str] = Counter()
        self.failing = ""

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls[name] += 1
            if name == self.failing:
                return 801
            handler = getattr(self, f"on_{name}", None)
            if handler is not None:
                handler(*(argument._obj if hasattr(argument, "_obj") else argument for argument in arguments))
            return 0

        if name.startswith("on_"):
            raise AttributeError(name)
        return call

    def on_cuMemImportFromShareableHandle(self, handle: Any, descriptor: Any, _kind: Any) -> None:
        handle.value = 1000 + descriptor.value

    def on_cuMemGetAllocationPropertiesFromHandle(self, properties: Any, handle: Any) -> None:
        properties.location.id = self.devices[handle.value - 1000]

    def on_cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> None:
        context.value = 70 + device.value

    def on_cuCtxSetCurrent(self, context: Any) -> None:
        self.current = context.value - 70

    def on_cuMemAddressReserve(self, base: Any, *_rest: Any) -> None:
        base.value = 0x10000 * (1 + self.calls["cuMemAddressReserve"])

    def on_cuMemMap(self, base: Any, _size: Any, _offset: Any, handle: Any, _flags: Any) -> None:
        self.mapped[base.value] = handle.value

    def on_cuMemSetAccess(self, base: Any, _size: Any, access: Any, _count: Any) -> None:
        device = self.devices[self.mapped[base.value] - 1000]
        assert access.location.id == device
        assert self.current == device

    def on_cuMemUnmap(self, base: Any, _size: Any) -> None:
        del self.mapped[base.value]

    def on_cuMemcpyPeer(self, there: Any, target: Any, source: Any, context: Any, size: Any) -> None:
        self.copies.append((there.value, target.value - 70, source.value, context.value - 70, size.value))

    def on_cuMemRelease(self, handle: Any) -> None:
        self.released.append(handle.value)

    def on_cuGetErrorString(self, _status: Any, text: Any) -> None:
        text.value = b"operation not supported"


def descriptors(count: int) -> list[int]:
    return [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Driver, CudaMapping, CudaMapping]:
    """Memory of two ranks on devices 3 and 5."""
    first, second = descriptors(2)
    driver = Driver({first: 3, second: 5})
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _name: driver)
    return driver, CudaMapping(first, 4096), CudaMapping(second, 4096)


def test_each_memory_is_mapped_on_its_own_device(two: tuple[Driver, CudaMapping, CudaMapping]) -> None:
    driver, one, other = two
    assert (one.device, other.device) == (3, 5)
    assert set(driver.mapped) == {one.address, other.address}


def test_bytes_go_from_device_to_device(two: tuple[Driver, CudaMapping, CudaMapping]) -> None:
    driver, one, other = two
    one.copy_to(16, other, 32, 64)
    assert driver.copies == [(other.address + 32, 5, one.address + 16, 3, 64)]
    assert driver.current == 3


def test_a_fence_moves_the_memory_and_unmaps_the_old_addresses(
    two: tuple[Driver, CudaMapping, CudaMapping],
) -> None:
    driver, one, other = two
    before = one.address
    one.fence()
    assert one.address != before
    assert set(driver.mapped) == {one.address, other.address}


def test_closing_unmaps_and_releases(two: tuple[Driver, CudaMapping, CudaMapping]) -> None:
    driver, one, other = two
    for memory in (one, other):
        memory.close(late_writers=True)
    assert not driver.mapped
    assert len(driver.released) == 2


def test_a_view_outside_the_memory_is_refused(two: tuple[Driver, CudaMapping, CudaMapping]) -> None:
    _, one, _ = two
    with pytest.raises(IndexError, match="outside the 4096"):
        one.view(4090, 7)


def test_a_failing_call_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    (descriptor,) = descriptors(1)
    driver = Driver({descriptor: 0})
    driver.failing = "cuMemMap"
    monkeypatch.setattr(cuda.ctypes, "CDLL", lambda _name: driver)
    with pytest.raises(MappingError, match=r"cuMemMap: operation not supported \(801\)"):
        CudaMapping(descriptor, 4096)
    os.close(descriptor)


def test_a_host_without_the_driver_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_name: str) -> ctypes.CDLL:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(cuda.ctypes, "CDLL", missing)
    (descriptor,) = descriptors(1)
    with pytest.raises(MappingError, match="needs the CUDA driver"):
        CudaMapping(descriptor, 4096)
    os.close(descriptor)
