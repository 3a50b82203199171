"""The client for threads: `Client`, and the `Stream` that its `generate` returns."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc

from splitwise.client import answers
from splitwise.client.base import RouterClient
from splitwise.errors import CancelledError, RemoteError
from splitwise.rpc.channels import open_sync_channel
from splitwise.rpc.v1 import router_pb2

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator
    from types import TracebackType

    from splitwise.client.retry import Tries
    from splitwise.client.types import (
        Chunk,
        Cluster,
        DecisionRecord,
        Generation,
        Model,
    )
    from splitwise.config import Address

Answer = TypeVar("Answer")


class Stream:
    """One running request. Iterating gives text; leaving the loop or the ``with`` cancels.

    The request is sent when the stream is made. Everything that was received is kept, so
    that `result` gives the whole answer after (or instead of) iterating.
    """

    def __init__(self, start: Callable[[float | None], Any], tries: Tries, router: Address) -> None:
        self._start = start
        self._tries = tries
        self._router = router
        self._collector = answers.Collector()
        self._cancelled = threading.Event()
        self._complete = False
        self._failure: RemoteError | None = None
        self._call = start(tries.start())

    @property
    def request_id(self) -> str:
        """The router's id of the request, for `Client.explain`; empty before the first message."""
        return self._collector.request_id

    def chunks(self) -> Generator[Chunk]:
        """Iterate over text with its token ids and log probabilities."""
        try:
            while (chunk := self._next()) is not None:
                yield chunk
        finally:
            self.cancel()

    def __iter__(self) -> Iterator[str]:
        chunks = self.chunks()
        try:
            for chunk in chunks:
                if chunk.text:
                    yield chunk.text
        finally:
            chunks.close()

    def result(self) -> Generation:
        """Wait for the end and return the whole answer."""
        while self._next() is not None:
            pass
        return self._collector.generation()

    def cancel(self) -> None:
        """Stop the request; the machines free what it held. No effect once it is complete."""
        if not self._complete:
            self._cancelled.set()
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _next(self) -> Chunk | None:
        """Return the next message's content, or None at the end; retries before the first."""
        while not self._complete:
            if self._cancelled.is_set():
                raise CancelledError("the stream was left or cancelled before its end", code="CANCELLED")
            try:
                return self._collector.add(next(self._call))
            except StopIteration:
                self._complete = True
            except grpc.RpcError as error:
                self._again(answers.failure(error, self._router))
        if self._failure is not None:
            raise self._failure from None
        return None

    def _again(self, failed: RemoteError) -> None:
        """Start anew where that is safe and the policy says so, else end with `failed`."""
        if self._cancelled.is_set():
            return
        try:
            if self._collector.started:
                raise failed
            wait = self._tries.wait_after(failed)
        except RemoteError:
            self._complete, self._failure = True, failed
            return
        self._cancelled.wait(wait)
        self._call = self._start(self._tries.start())
        if self._cancelled.is_set():  # meanwhile, by another thread
            self._call.cancel()


class Client(RouterClient[Stream]):
    """A connection to a cluster's router, for use from any thread.

    `address` is ``host:port``; without it ``$SPLITWISE_ROUTER`` counts, then the cluster that
    `splitwise up` runs. `timeout` (seconds) is the default for every call, retries included.
    """

    _open = staticmethod(open_sync_channel)

    def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that can be asked for."""
        answer = self._ask(self._stub.ListModels, router_pb2.ListModelsRequest(), timeout)
        return [answers.model(model) for model in answer.models]

    def cluster(self, *, timeout: float | None = None) -> Cluster:
        """Return the machines, their pools and queues, now."""
        return answers.cluster(
            self._ask(self._stub.DescribeCluster, router_pb2.DescribeClusterRequest(), timeout)
        )

    def explain(self, request_id: str, *, timeout: float | None = None) -> list[DecisionRecord]:
        """Return every scheduling decision about a request, oldest first."""
        request = router_pb2.ExplainRequest(request_id=request_id)
        return answers.decisions(self._ask(self._stub.Explain, request, timeout))

    def drain(self, machine_id: str, *, undo: bool = False, timeout: float | None = None) -> str:
        """Give a machine no new work (or again, with `undo`); returns its state."""
        request = router_pb2.DrainMachineRequest(machine_id=machine_id, undo=undo)
        drained: router_pb2.DrainMachineResponse = self._ask(self._stub.DrainMachine, request, timeout)
        return drained.state

    def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _stream(self, start: Callable[[float | None], Any], tries: Tries) -> Stream:
        return Stream(start, tries, self.address)

    def _ask(self, method: Callable[..., Answer], request: object, timeout: float | None) -> Answer:
        """Call a method that may be repeated, with retries."""
        tries = self._tries(timeout)
        while True:
            try:
                return method(request, timeout=tries.start())
            except grpc.RpcError as error:
                time.sleep(tries.wait_after(answers.failure(error, self.address)))
