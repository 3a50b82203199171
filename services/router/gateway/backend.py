"""What the gateway needs of the router, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from splitwise.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse, ModelDescription


class PreparedRequest(Protocol):
    """A request that was checked and not started."""

    @property
    def request_id(self) -> str:
        """The router's id of it."""

    @property
    def prompt_tokens(self) -> int:
        """How many tokens its prompt has."""

    def run(self) -> AsyncGenerator[GenerateResponse, None]:
        """Serve it; closing the generator cancels it. To be called once.

        The last message carries `finished`. Raises the exceptions of `splitwise.errors`,
        before the first message or between two.
        """


class GatewayBackend(Protocol):
    """One running router, called in its event loop."""

    async def prepare(self, request: GenerateRequest) -> PreparedRequest:
        """Check a request fully; raises `FieldError` for one at fault, and other `splitwise.errors`."""

    def list_models(self) -> Sequence[ModelDescription]:
        """Return the models that are known now."""

    def serving(self) -> bool:
        """Return whether new requests are taken: some model is served and nothing drains."""

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt; raises as `prepare` does."""

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; raises `NotFoundError` and `FieldError` (``token_ids``)."""

    def spell(self, model: str, token_id: int) -> bytes:
        """Return one token's own bytes, a special token's name included."""
