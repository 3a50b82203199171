"""The client for asyncio: `AsyncClient`, and the `AsyncStream` that its `generate` returns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar

import grpc
import grpc.aio

from splitwise.client import answers
from splitwise.client.base import RouterClient
from splitwise.errors import CancelledError, RemoteError
from splitwise.rpc.channels import open_channel
from splitwise.rpc.v1 import router_pb2

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
    )
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


class AsyncStream:
    """One running request. Iterating gives text; leaving the loop or the ``with`` cancels.

    The request is sent when the stream is made. Everything that was received is kept, so
    that `result` gives the whole answer after (or instead of) iterating.
    """

    def __init__(self, start: Callable[[float | None], Any], tries: Tries, router: Address) -> None:
        self._start = start
        self._tries = tries
        self._router = router
        self._collector = answers.Collector()
        self._cancelled = asyncio.Event()
        self._complete = False
        self._failure: RemoteError | None = None
        self._call = start(tries.start())

    @property
    def request_id(self) -> str:
        """The router's id of the request, for `AsyncClient.explain`; empty before the first message."""
        return self._collector.request_id

    async def chunks(self) -> AsyncGenerator[Chunk]:
        """Iterate over text with its token ids and log probabilities."""
        try:
            while (chunk := await self._next()) is not None:
                yield chunk
        finally:
            self.cancel()

    async def __aiter__(self) -> AsyncIterator[str]:
        chunks = self.chunks()
        try:
            async for chunk in chunks:
                if chunk.text:
                    yield chunk.text
        finally:
            await chunks.aclose()

    async def result(self) -> Generation:
        """Wait for the end and return the whole answer."""
        while await self._next() is not None:
            pass
        return self._collector.generation()

    def cancel(self) -> None:
        """Stop the request; the machines free what it held. No effect once it is complete."""
        if not self._complete:
            self._cancelled.set()
            self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _next(self) -> Chunk | None:
        """Return the next message's content, or None at the end; retries before the first."""
        while not self._complete:
            if self._cancelled.is_set():
                raise CancelledError("the stream was left or cancelled before its end", code="CANCELLED")
            try:
                message = await self._call.read()
                if message is not grpc.aio.EOF:  # type: ignore[attr-defined]  # missing in the stubs
                    return self._collector.add(message)
                self._complete = True
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._cancelled.is_set() or (task is not None and task.cancelling()):
                    raise
            except grpc.RpcError as error:
                await self._again(answers.failure(error, self._router))
        if self._failure is not None:
            raise self._failure from None
        return None

    async def _again(self, failed: RemoteError) -> None:
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
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._cancelled.wait(), wait)
        self._call = self._start(self._tries.start())
        if self._cancelled.is_set():
            self._call.cancel()


class AsyncClient(RouterClient[AsyncStream]):
    """A connection to a cluster's router, for use in one event loop.

    `address` is ``host:port``; without it ``$SPLITWISE_ROUTER`` counts, then the cluster that
    `splitwise up` runs. `timeout` (seconds) is the default for every call, retries included.
    """

    _open = staticmethod(open_channel)

    async def models(self, *, timeout: float | None = None) -> list[Model]:
        """Return the models that can be asked for."""
        answer = await self._ask(self._stub.ListModels, router_pb2.ListModelsRequest(), timeout)
        return [answers.model(model) for model in answer.models]

    async def cluster(self, *, timeout: float | None = None) -> Cluster:
        """Return the machines, their pools and queues, now."""
        return answers.cluster(
            await self._ask(self._stub.DescribeCluster, router_pb2.DescribeClusterRequest(), timeout)
        )

    async def explain(self, request_id: str, *, timeout: float | None = None) -> list[DecisionRecord]:
        """Return every scheduling decision about a request, oldest first."""
        request = router_pb2.ExplainRequest(request_id=request_id)
        return answers.decisions(await self._ask(self._stub.Explain, request, timeout))

    async def drain(self, machine_id: str, *, undo: bool = False, timeout: float | None = None) -> str:
        """Give a machine no new work (or again, with `undo`); returns its state."""
        request = router_pb2.DrainMachineRequest(machine_id=machine_id, undo=undo)
        drained: router_pb2.DrainMachineResponse = await self._ask(self._stub.DrainMachine, request, timeout)
        return drained.state

    async def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, start: Callable[[float | None], Any], tries: Tries) -> AsyncStream:
        return AsyncStream(start, tries, self.address)

    async def _ask(
        self, method: Callable[..., Awaitable[Answer]], request: object, timeout: float | None
    ) -> Answer:
        """Call a method that may be repeated, with retries."""
        tries = self._tries(timeout)
        while True:
            try:
                return await method(request, timeout=tries.start())
            except grpc.RpcError as error:
                await asyncio.sleep(tries.wait_after(answers.failure(error, self.address)))
