"""What the gateway needs of the router, and nothing more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from splitwise.rpc.v1.router_pb2 import GenerateRequest, GenerateResponse, ModelDescription


class GatewayBackend(Protocol):
    """One running router, called in its event loop."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateResponse, None]:
        """Serve one request; closing the generator cancels it.

        The last message carries `finished`. Raises the exceptions of `splitwise.errors`,
        before the first message or between two; `FieldError` for a request at fault.
        """

    def list_models(self) -> Sequence[ModelDescription]:
        """Return the models that are known now."""

    def serving(self) -> bool:
        """Return whether new requests are taken: some model is served and nothing drains."""

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt; raises as `generate` does."""

    async def detokenize(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the text of token ids; raises `NotFoundError` and `FieldError` (``token_ids``)."""

    def spell(self, model: str, token_id: int) -> bytes:
        """Return one token's own bytes, a special token's name included."""
