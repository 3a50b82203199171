"""The client for asyncio: `AsyncClient`, and the `AsyncStream` that its `generate` returns."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

import grpc
import grpc.aio

from splitwise.client import answers
from splitwise.client.requests import SamplingOptions, chat_messages, generate_request
from splitwise.client.retry import DEFAULT_RETRY, Deadline, Tries
from splitwise.errors import CancelledError, RemoteError
from splitwise.launch.state import find_router
from splitwise.rpc.channels import open_channel
from splitwise.rpc.identity import Role
from splitwise.rpc.v1 import router_pb2, router_pb2_grpc
from splitwise.telemetry.tracing import current

if TYPE_CHECKING:
    from collections.abc import (
        AsyncGenerator,
        AsyncIterator,
        Awaitable,
        Callable,
        Iterable,
        Mapping,
        Sequence,
    )
    from types import TracebackType

    from splitwise.client.retry import RetryPolicy
    from splitwise.client.types import (
        Chunk,
        Cluster,
        DecisionRecord,
        Generation,
        Message,
        Model,
        TransferMode,
    )
    from splitwise.config import Address, TlsSettings

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


class AsyncClient:
    """A connection to a cluster's router, for use in one event loop.

    `address` is ``host:port``; without it ``$SPLITWISE_ROUTER`` counts, then the cluster that
    `splitwise up` runs. `timeout` (seconds) is the default for every call, retries included.
    """

    def __init__(
        self,
        address: Address | str | None = None,
        *,
        tls: TlsSettings | None = None,
        timeout: float | None = None,
        retry: RetryPolicy = DEFAULT_RETRY,
    ) -> None:
        self.address = find_router(address)
        self._timeout = timeout
        self._retry = retry
        self._channel = open_channel(self.address, tls=tls, role=Role.ROUTER)
        self._stub = router_pb2_grpc.RouterStub(self._channel)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        model: str = "",
        timeout: float | None = None,
        client_request_id: str = "",
        transfer_mode: TransferMode | str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Continue a text or token ids; returns at once with the stream of the answer.

        `model` may be left out when the cluster serves one. Raises `InvalidRequestError` for
        what cannot be sent; what the router refuses is raised by the stream.
        """
        request = generate_request(
            prompt, sampling, model=model, client_request_id=client_request_id, transfer_mode=transfer_mode
        )
        return self._stream(request, timeout)

    def chat(
        self,
        messages: Iterable[Message | Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        client_request_id: str = "",
        transfer_mode: TransferMode | str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Answer a conversation, rendered with the model's chat template; as `generate` otherwise."""
        request = generate_request(
            chat_messages(messages),
            sampling,
            model=model,
            client_request_id=client_request_id,
            transfer_mode=transfer_mode,
        )
        return self._stream(request, timeout)

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
        return (await self._ask(self._stub.DrainMachine, request, timeout)).state

    async def close(self) -> None:
        """Close the connection; running streams are cancelled."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _stream(self, request: router_pb2.GenerateRequest, timeout: float | None) -> AsyncStream:
        def start(seconds: float | None) -> Any:
            return self._stub.Generate(request, timeout=seconds, metadata=current())

        return AsyncStream(start, self._tries(timeout), self.address)

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(self._retry, Deadline(self._timeout if timeout is None else timeout))

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
