"""Run one function over many items: on this machine's cores, or on a Ray cluster.

Both give equal results in the order of the items, because the function is pure: what all
items share is handed over once, everything else is in the item. So an answer does not
depend on where it was computed, and a search needs not know.
"""

from __future__ import annotations

import importlib
import logging
import signal
import socket
import sys
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from importlib.metadata import version
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

from splitwise.errors import ConfigError, SplitwiseError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import TracebackType

S = TypeVar("S")
T = TypeVar("T")
R = TypeVar("R")

CONNECT_SECONDS = 5.0


class WorkersError(SplitwiseError):
    """A worker process or the Ray cluster was lost; says which and what to do."""


class Workers(Protocol):
    """Where a function is run. Use as a context manager: leaving it gives everything back.

    `size` is how many items run at a time. Several threads may call `run` at once when it
    is above 1.
    """

    size: int

    def run(
        self,
        function: Callable[[Any, T], R],
        items: Sequence[T],
        done: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """Return ``function(shared, item)`` for every item, in their order.

        `done` is called here once for each finished item. Raises what the function raises,
        and WorkersError when a worker is lost.
        """
        ...

    def close(self) -> None:
        """End the workers; what has not begun is not run."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class _Closing:
    """The context manager of both implementations."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_shared: list[Any] = []  # of a worker process, set once when it starts


def _start(shared: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asked
    _shared[:] = [shared]


def _call(function: Callable[[Any, T], R], item: T) -> R:
    return function(_shared[0], item)


class LocalWorkers(_Closing):
    """`processes` processes of this machine; with one, everything runs in this process."""

    def __init__(self, shared: Any, processes: int = 1) -> None:
        self.size = processes
        self._value = shared
        self._pool = (
            ProcessPoolExecutor(
                processes, mp_context=get_context("spawn"), initializer=_start, initargs=(shared,)
            )
            if processes > 1
            else None
        )

    def run(
        self,
        function: Callable[[Any, T], R],
        items: Sequence[T],
        done: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """See `Workers.run`."""
        if self._pool is None:
            results = []
            for item in items:
                results.append(function(self._value, item))
                done()
            return results
        futures: list[Future[R]] = [self._pool.submit(_call, function, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
                done()
        except BrokenProcessPool:
            raise WorkersError(
                "a worker process was killed, most likely for want of memory: try fewer --workers"
            ) from None
        finally:
            for future in futures:
                future.cancel()
        return [future.result() for future in futures]

    def close(self) -> None:
        """See `Workers.close`."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


class RayWorkers(_Closing):
    """A Ray cluster, which needs this library in the same version on its nodes.

    `address` is what ``ray.init`` takes: ``HOST:PORT`` of the head node, ``ray://HOST:PORT``
    of its client server, or ``auto`` for the cluster of this machine. Raises ConfigError
    when Ray is not installed, the cluster does not answer, or it has another version.
    """

    def __init__(self, shared: Any, address: str) -> None:
        try:
            ray: Any = importlib.import_module("ray")
        except ModuleNotFoundError:
            raise ConfigError("--ray needs Ray: pip install 'splitwise[ray]'") from None
        _check_reachable(address)
        self._ray = ray
        self._address = address
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
            raise ConfigError(
                f"--ray {address}: no Ray cluster answers there ({error}); start one with "
                "`ray start --head` and give its address"
            ) from None
        try:
            self._check_versions()
            self._value = ray.put(shared)
            self.size = max(1, int(ray.cluster_resources().get("CPU", 1)))
        except BaseException:
            ray.shutdown()
            raise

    def _check_versions(self) -> None:
        ours, ray = versions(), self._ray
        told = f"install splitwise {ours[0]} for Python {ours[1]} on every node of the cluster"
        try:
            theirs = ray.get(ray.remote(versions).remote())
        except ray.exceptions.RayError as error:
            last = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"--ray {self._address}: its nodes cannot run splitwise ({last}); {told}"
            ) from None
        if theirs != ours:
            raise ConfigError(
                f"--ray {self._address}: its nodes have splitwise {theirs[0]} for Python {theirs[1]}; {told}"
            )

    def run(
        self,
        function: Callable[[Any, T], R],
        items: Sequence[T],
        done: Callable[[], None] = lambda: None,
    ) -> list[R]:
        """See `Workers.run`."""
        ray = self._ray
        call = ray.remote(function)
        asked = [call.remote(self._value, item) for item in items]
        waiting = asked
        try:
            while waiting:
                ready, waiting = ray.wait(waiting)
                ray.get(ready)
                done()
            results: list[R] = ray.get(asked)
        except (ray.exceptions.RaySystemError, ray.exceptions.WorkerCrashedError) as error:
            raise WorkersError(f"the Ray cluster at {self._address} lost a worker: {error}") from None
        finally:
            for left in waiting:
                ray.cancel(left)
        return results

    def close(self) -> None:
        """Leave the cluster, which goes on running."""
        self._ray.shutdown()


def _check_reachable(address: str) -> None:
    """Raise ConfigError when nothing listens at ``HOST:PORT``: Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return  # such as auto: ray.init knows what it means
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--ray {address}: nothing answers there ({error}); start a cluster with "
            "`ray start --head` and give the address that it prints"
        ) from None


def versions() -> tuple[str, str]:
    """Return this library's version and Python's: what results and their pickles depend on."""
    return version("splitwise"), ".".join(map(str, sys.version_info[:2]))


def open_workers(shared: Any, processes: int, ray_address: str | None = None) -> Workers:
    """Return the workers of a Ray cluster when an address is given, else of this machine."""
    return LocalWorkers(shared, processes) if ray_address is None else RayWorkers(shared, ray_address)
