"""What both clients share: their settings, and how a prompt or a chat becomes a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack

from splitwise.client.requests import SamplingOptions, chat_messages, generate_request
from splitwise.client.retry import DEFAULT_RETRY, Deadline, Tries
from splitwise.launch.state import find_router
from splitwise.rpc.identity import Role
from splitwise.rpc.v1 import router_pb2, router_pb2_grpc
from splitwise.telemetry.tracing import current

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from splitwise.client.retry import RetryPolicy
    from splitwise.client.types import Message, TransferMode
    from splitwise.config import Address, TlsSettings

S = TypeVar("S")


class RouterClient(ABC, Generic[S]):
    """A connection to a cluster's router whose requests are streams of type `S`.

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
        self._channel = self._open(self.address, tls=tls, role=Role.ROUTER)
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
    ) -> S:
        """Continue a text or token ids; returns at once with the stream of the answer.

        `model` may be left out when the cluster serves one. Raises `InvalidRequestError` for
        what cannot be sent; what the router refuses is raised by the stream.
        """
        request = generate_request(
            prompt, sampling, model=model, client_request_id=client_request_id, transfer_mode=transfer_mode
        )
        return self._begin(request, timeout)

    def chat(
        self,
        messages: Iterable[Message | Mapping[str, str]],
        *,
        model: str = "",
        timeout: float | None = None,
        client_request_id: str = "",
        transfer_mode: TransferMode | str | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> S:
        """Answer a conversation, rendered with the model's chat template; as `generate` otherwise."""
        request = generate_request(
            chat_messages(messages),
            sampling,
            model=model,
            client_request_id=client_request_id,
            transfer_mode=transfer_mode,
        )
        return self._begin(request, timeout)

    @staticmethod
    @abstractmethod
    def _open(address: Address, *, tls: TlsSettings | None, role: Role | None) -> Any:
        """Return a channel to the router."""

    @abstractmethod
    def _stream(self, start: Callable[[float | None], Any], tries: Tries) -> S:
        """Return the stream whose calls `start(seconds)` makes."""

    def _begin(self, request: router_pb2.GenerateRequest, timeout: float | None) -> S:
        def start(seconds: float | None) -> Any:
            return self._stub.Generate(request, timeout=seconds, metadata=current())

        return self._stream(start, self._tries(timeout))

    def _tries(self, timeout: float | None) -> Tries:
        return Tries(self._retry, Deadline(self._timeout if timeout is None else timeout))
