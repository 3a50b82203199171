"""A model's vocabulary: text and chats to token ids, and a detokenizer for each answer.

Read from a local Hugging Face folder (``tokenizer.json``, ``tokenizer_config.json``, the
chat template) with the `tokenizers` library alone. For engines
without a model there is a built-in byte vocabulary.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Protocol

import tokenizers

from splitwise.errors import ConfigError
from splitwise.text.chat import ChatTemplate, ChatTemplateError
from splitwise.text.detokenizer import ByteLevelDetokenizer, Detokenizer, WindowDetokenizer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ByteVocabulary", "ChatTemplateError", "TokenizerVocabulary", "Vocabulary", "load_vocabulary"]

Message = dict[str, str]
"""One chat message: ``role`` and ``content``."""


class Vocabulary(Protocol):
    """What the router needs of a tokenizer. Safe to use from several threads."""

    @property
    def size(self) -> int:
        """Token ids are below it."""

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the model wants around it."""

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render the chat template and tokenize it; raises `ChatTemplateError`."""

    def detokenizer(self) -> Detokenizer:
        """Return the text side of one answer; special tokens give no text."""

    def spell(self, token_id: int) -> bytes:
        """Return one token's own bytes, a special token's name included; empty for an unknown id."""


def _byte_of_character() -> dict[str, int]:
    """Return the printable stand-ins of byte-level tokenizers (GPT-2's table) as bytes."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTES = _byte_of_character()
# SentencePiece: how a token of one byte is written, and a space.
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_WORD_START = "\u2581"


class TokenizerVocabulary:
    """A `tokenizers` tokenizer with its chat template.

    `size` is the model's where it is known: a model may have more embeddings than the
    tokenizer has names, and such ids are valid and give no text.
    """

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, template: ChatTemplate | None = None, *, size: int = 0
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self.size = max(size, tokenizer.get_vocab_size(with_added_tokens=True))
        decoder = json.loads(tokenizer.to_str()).get("decoder") or {}
        self._byte_level = decoder.get("type") == "ByteLevel"
        self._special = {
            token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special
        }
        self._token_bytes: dict[int, bytes] = {}

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt, with the special tokens that the model wants around it."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render the chat template and tokenize it; raises `ChatTemplateError`."""
        if self._template is None:
            raise ChatTemplateError("the model has no chat template; send text or token_ids")
        rendered = self._template.render(messages)
        return list(self._tokenizer.encode(rendered, add_special_tokens=False).ids)

    def detokenizer(self) -> Detokenizer:
        """Return the text side of one answer; special tokens give no text."""
        if self._byte_level:
            return ByteLevelDetokenizer(self._bytes_of)
        return WindowDetokenizer(self._tokenizer.decode)

    def spell(self, token_id: int) -> bytes:
        """Return one token's own bytes, a special token's name included; empty for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token in self._special:
            return token.encode()
        if self._byte_level:
            return self._bytes_of(token_id)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        return token.replace(_WORD_START, " ").encode()

    def _bytes_of(self, token_id: int) -> bytes:
        """Return a token's bytes as the ByteLevel decoder sees them."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._spell(token_id)
        return known

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token in self._special:
            return b""
        if all(character in _BYTES for character in token):
            return bytes(_BYTES[character] for character in token)
        return token.encode()  # an added token with a space or the like stands for itself


class ByteVocabulary:
    """The built-in vocabulary: ids 0 to 255 are bytes, a higher id is a word that names it.

    For emulated engines, which have no model and may answer with any id.
    """

    def __init__(self, size: int = 256) -> None:
        self.size = max(size, 256)

    def encode(self, text: str) -> list[int]:
        """Tokenize a prompt: its UTF-8 bytes."""
        return list(text.encode())

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Render ``role: content`` lines, then ``assistant:``."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join([*lines, "assistant:"]))

    def detokenizer(self) -> Detokenizer:
        """Return the text side of one answer."""
        return ByteLevelDetokenizer(_word)

    def spell(self, token_id: int) -> bytes:
        """Return one token's own bytes."""
        return _word(token_id)


def _word(token_id: int) -> bytes:
    return bytes((token_id,)) if token_id < 256 else f" t{token_id}".encode()


def load_vocabulary(folder: Path) -> TokenizerVocabulary:
    """Read a model folder; raises `ConfigError` that names the file."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; the folder needs a fast tokenizer (tokenizer.json)")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"{path}: not a tokenizer: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    settings = _json(folder / "tokenizer_config.json")
    size = _json(folder / "config.json").get("vocab_size")
    return TokenizerVocabulary(
        tokenizer,
        ChatTemplate.from_folder(folder, settings),
        size=size if isinstance(size, int) else 0,
    )


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}
