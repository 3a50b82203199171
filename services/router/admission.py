"""From a client's message to a request that may run: everything is checked before anything runs."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from services.router.session import Admitted
from splitwise.requests import (
    FieldError,
    check_prompt_tokens,
    check_request,
    complete_sampling,
    decode_stops,
)
from splitwise.text import ChatTemplateError

if TYPE_CHECKING:
    from services.router.models import Model, Models
    from splitwise.rpc.v1.router_pb2 import GenerateRequest

INLINE_BYTES = 16_384
"""Text up to this size is tokenized in the event loop (well under a millisecond)."""
MAX_PREFIX_BLOCKS = 512


class Admission:
    """Validates and tokenizes."""

    def __init__(self, models: Models) -> None:
        self._models = models

    async def admit(self, request: GenerateRequest, deadline: float | None) -> Admitted:
        """Return the request ready to run; raises `FieldError` or `NotFoundError`.

        `deadline` is on the monotonic clock.
        """
        arrived = time.monotonic()
        model, field, token_ids = await self._checked(request)
        room = max(1, model.max_model_len - len(token_ids))
        sampling = complete_sampling(request.sampling, room=room, recommended=model.recommended)
        check_prompt_tokens(
            field, token_ids, sampling, max_model_len=model.max_model_len, vocab_size=model.vocab_size
        )
        return Admitted(
            model=model.name,
            client_request_id=request.client_request_id,
            token_ids=token_ids,
            sampling=sampling,
            stops=decode_stops(request.sampling),
            detokenizer=model.vocabulary.detokenizer(),
            transfer_mode=request.transfer_mode,
            deadline=deadline,
            arrived=arrived,
        )

    async def tokenize(self, request: GenerateRequest) -> list[int]:
        """Return the token ids of a request's prompt; raises as `admit` does."""
        _, _, token_ids = await self._checked(request)
        return token_ids

    async def _checked(self, request: GenerateRequest) -> tuple[Model, str, list[int]]:
        check_request(request)
        model = self._models.get(request.model)
        field, token_ids = await _tokenize(request, model)
        return model, field, token_ids


async def _tokenize(request: GenerateRequest, model: Model) -> tuple[str, list[int]]:
    kind = request.WhichOneof("prompt")
    if kind == "token_ids":
        return "token_ids.ids", list(request.token_ids.ids)
    if kind == "text":
        if len(request.text) <= INLINE_BYTES:
            return "text", model.vocabulary.encode(request.text)
        return "text", await asyncio.to_thread(model.vocabulary.encode, request.text)
    messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
    try:
        return "chat", await asyncio.to_thread(model.vocabulary.encode_chat, messages)
    except ChatTemplateError as error:
        raise FieldError("chat", str(error)) from None


def prefix_hashes(token_ids: list[int], block_tokens: int) -> tuple[int, ...]:
    """Name each full KV block of a prompt by a hash over all tokens up to its end."""
    count = min(len(token_ids) // block_tokens, MAX_PREFIX_BLOCKS)
    running, names = xxhash.xxh3_64(), []
    ids = np.asarray(token_ids[: count * block_tokens], np.uint32).reshape(count, block_tokens)
    for block in ids:
        running.update(block.tobytes())
        names.append(running.intdigest() >> 1)  # fits a signed 64-bit number
    return tuple(names)
