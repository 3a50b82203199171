"""An emulated model whose tokens are parts of characters, and the text that they must give.

Emulated engines choose token ids by their KV bytes. Here the ids that they can choose stand for
the first bytes of emoji and CJK characters, for the bytes that end them, for letters with a
combining mark, and for a joiner: most answers are broken text, and some are whole.
"""

from __future__ import annotations

from string import ascii_letters
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.text.vocabulary import _BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MODEL = "characters"
FACTS: dict[str, Any] = {"model": MODEL, "vocab_size": 512}
FIRST_MADE = 256  # the engine answers with ids from here on
COUNT = 8


def _pieces() -> Iterator[bytes]:
    yield from (bytes((0xF0, 0x9F, third)) for third in range(0x90, 0xC0))
    yield from (bytes((0xE5, second)) for second in range(0x80, 0xA5))
    yield from (bytes((last,)) for last in range(0x80, 0xC0))
    yield from (f"{letter}\u0301".encode() for letter in ascii_letters)
    yield "\u200d".encode()
    yield from (chr(0x4E00 + index).encode() for index in range(53))


PIECES = tuple(_pieces())
EMOJI_HEADS = range(0xC0 - 0x90)


def bytes_of(token: int) -> bytes:
    return PIECES[token - FIRST_MADE]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level tokenizer with these pieces."""
    letters = {byte: letter for letter, byte in _BYTES.items()}
    vocabulary = {f"<{token}>": token for token in (*range(FIRST_MADE), FIRST_MADE + len(PIECES))}
    for index, piece in enumerate(PIECES):
        vocabulary["".join(letters[byte] for byte in piece)] = FIRST_MADE + index
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))


def answer(prompt: list[int]) -> list[int]:
    return expected_tokens(settings_from_options(FACTS), prompt, COUNT, ignore_eos=True)


def prompts() -> tuple[list[int], list[int]]:
    """Return a prompt whose answer is whole text with an emoji across the hand-over, and one of broken."""
    whole = broken = None
    for number in range(100_000):
        prompt = [number % 256, number // 256]
        tokens = answer(prompt)
        if tokens[0] - FIRST_MADE not in EMOJI_HEADS:
            continue
        if "\ufffd" not in b"".join(map(bytes_of, tokens)).decode(errors="replace"):
            whole = whole or prompt
        else:
            broken = broken or prompt
        if whole and broken:
            return whole, broken
    raise AssertionError("no such answer")
