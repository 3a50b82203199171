"""Token ids to text, as they arrive, without ever giving out part of a character.

A token may hold any bytes: half an emoji, the middle of a Chinese character. What is not
yet a whole code point is held until the rest comes or the output ends. The pieces'
concatenation equals the decoding of all ids at once.

Two ways, by the tokenizer's kind. Byte-level tokenizers (GPT-2, Llama 3, Qwen, SmolLM2) map
each token to fixed bytes, so an incremental UTF-8 decoder is exact and cheap. All others
(SentencePiece with byte fallback) decode a token differently depending on its neighbours;
there a window of the last tokens is decoded again at each step.
"""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

REPLACEMENT = "\ufffd"
MAX_HELD_TOKENS = 32
"""Window decoding: after so many tokens without a whole character the bytes are taken for
invalid and given out as they decode. UTF-8 needs four bytes; runs of byte tokens more."""


class Detokenizer(Protocol):
    """The text side of one answer."""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is now certain (whole code points)."""

    def flush(self) -> str:
        """End the output; return what was held, invalid bytes as U+FFFD."""


class ByteLevelDetokenizer:
    """For tokenizers in which each token is a fixed run of bytes."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        return self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))

    def flush(self) -> str:
        """End the output; return what was held, invalid bytes as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any tokenizer: decodes the last tokens again and gives out what was added.

    `decode` turns a list of ids into text. The window begins at a token whose text is out
    already, so that the decoder sees a left neighbour (leading spaces are stripped only at
    the true beginning).
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._known = 0  # tokens of the window whose text is out
        self._known_text = ""

    def push(self, token_ids: Iterable[int]) -> str:
        """Take the next ids; return the text that is now certain."""
        return "".join([self._step(token_id) for token_id in token_ids])

    def _step(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        held = len(self._window) - self._known
        unsure = text.endswith(REPLACEMENT) and held < MAX_HELD_TOKENS
        if unsure or len(text) <= len(self._known_text):
            return ""
        added = text[len(self._known_text) :]
        del self._window[: self._known]
        self._known = len(self._window)
        self._known_text = self._decode(self._window)
        return added

    def flush(self) -> str:
        """End the output; return what was held, invalid bytes as U+FFFD."""
        added = self._decode(self._window)[len(self._known_text) :]
        self._window.clear()
        self._known, self._known_text = 0, ""
        return added
