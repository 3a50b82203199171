"""Log probabilities in OpenAI's two shapes, with tokens spelled as OpenAI spells them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from splitwise.rpc.v1.common_pb2 import TokenAlternative, TokenLogprob

    Spell = Callable[[int], bytes]

LOWEST = -9999.0
"""JSON has no minus infinity; this is what OpenAI and vLLM write for it."""


class LogprobWriter:
    """The log probabilities of one answer; `count` alternatives stand beside each chosen token."""

    def __init__(self, spell: Spell, count: int, *, tokens_as_ids: bool = False) -> None:
        self._spell = spell
        self._count = count
        self._tokens_as_ids = tokens_as_ids
        self._offset = 0  # characters of the answer before the next token

    def completion(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the shape of ``/v1/completions``: parallel lists."""
        tokens: list[str] = []
        offsets: list[int] = []
        chosen: list[float] = []
        tops: list[dict[str, float]] = []
        for entry in logprobs:
            token = self._token(entry.token_id)
            tokens.append(token)
            offsets.append(self._offset)
            chosen.append(_finite(entry.logprob))
            top = {self._token(other.token_id): _finite(other.logprob) for other in self._most_likely(entry)}
            top.setdefault(token, chosen[-1])
            tops.append(top)
            self._offset += len(self._spell(entry.token_id).decode(errors="replace"))
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets}

    def chat(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the shape of ``/v1/chat/completions``: one object per token."""
        content = []
        for entry in logprobs:
            described = self._described(entry)
            described["top_logprobs"] = [self._described(other) for other in self._most_likely(entry)]
            content.append(described)
        return {"content": content, "refusal": None}

    def _most_likely(self, entry: TokenLogprob) -> Sequence[TokenAlternative]:
        return entry.top[: self._count]

    def _described(self, entry: TokenLogprob | TokenAlternative) -> dict[str, Any]:
        return {
            "token": self._token(entry.token_id),
            "logprob": _finite(entry.logprob),
            "bytes": list(self._spell(entry.token_id)),
        }

    def _token(self, token_id: int) -> str:
        if self._tokens_as_ids:
            return f"token_id:{token_id}"
        spelled = self._spell(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob) if math.isfinite(logprob) else LOWEST
