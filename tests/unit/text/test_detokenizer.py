"""Tokens become text in whole characters, soon and without a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitwise.models import cache_dir
from splitwise.text import ByteVocabulary, TokenizerVocabulary, WindowDetokenizer, load_vocabulary
from splitwise.text.detokenizer import MAX_HELD_TOKENS, REPLACEMENT
from tests.support.tokenizers_small import byte_fallback, byte_level

if TYPE_CHECKING:
    from pathlib import Path

HARD = [
    "👩‍👩‍👧‍👦 family",
    "你好世界",
    "e\u0301\u0323 n\u0303",
    "🇩🇪🏳️‍🌈",
    "naïve — “quotes”",
    " two  spaces ",
]


@pytest.mark.parametrize("text", HARD)
@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_one_token_at_a_time_gives_the_whole_text_and_no_part_of_a_character(text: str, make: object) -> None:
    tokenizer = make()  # type: ignore[operator]
    vocabulary = TokenizerVocabulary(tokenizer)
    ids = vocabulary.encode(text)
    detokenizer = vocabulary.detokenizer()
    pieces = [detokenizer.push([token]) for token in ids]
    assert all(REPLACEMENT not in piece for piece in pieces)
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids) == text


def test_an_emoji_comes_out_with_its_last_byte_and_not_before() -> None:
    detokenizer = ByteVocabulary().detokenizer()
    assert [detokenizer.push([byte]) for byte in "😀".encode()] == ["", "", "", "😀"]


def test_flush_gives_an_unfinished_character_as_a_replacement() -> None:
    for vocabulary in (TokenizerVocabulary(byte_level()), TokenizerVocabulary(byte_fallback())):
        ids = vocabulary.encode("at 你")
        detokenizer = vocabulary.detokenizer()
        text = detokenizer.push(ids[:-1])
        assert text.rstrip() == "at"
        assert set(detokenizer.flush().strip()) == {REPLACEMENT}


def test_special_tokens_have_no_text_and_other_added_tokens_have_theirs() -> None:
    tokenizer = byte_level()
    end, tool = tokenizer.token_to_id("<|end|>"), tokenizer.token_to_id("<tool call>")
    ids = [*tokenizer.encode("on").ids, tool, end, *tokenizer.encode("é").ids]
    detokenizer = TokenizerVocabulary(tokenizer).detokenizer()
    assert "".join(detokenizer.push([token]) for token in ids) == tokenizer.decode(ids) == "on<tool call>é"


def test_ids_that_no_token_has_give_no_text() -> None:
    assert TokenizerVocabulary(byte_level(), size=5000).detokenizer().push([4999]) == ""


def test_invalid_bytes_are_not_held_for_ever() -> None:
    detokenizer = TokenizerVocabulary(byte_fallback()).detokenizer()
    text = "".join(detokenizer.push([0xFF]) for _ in range(3 * MAX_HELD_TOKENS))
    assert len(text) >= 2 * MAX_HELD_TOKENS


def test_the_window_stays_short() -> None:
    seen: list[int] = []
    tokenizer = byte_fallback()
    vocabulary = TokenizerVocabulary(tokenizer)

    def decode(ids: object) -> str:
        seen.append(len(ids))  # type: ignore[arg-type]
        return tokenizer.decode(ids)  # type: ignore[arg-type, no-any-return]

    detokenizer = WindowDetokenizer(decode)
    ids = vocabulary.encode("the cat " * 200)
    assert "".join(detokenizer.push([token]) for token in ids) == tokenizer.decode(ids)
    assert max(seen) <= 4


def default_model() -> Path:
    found = sorted(cache_dir().glob("**/tokenizer.json"))
    if not found:
        pytest.skip("the default model is not prepared: run `splitwise demo` once")
    return found[0].parent


def test_the_default_model() -> None:
    vocabulary = load_vocabulary(default_model())
    for text in HARD:
        ids = vocabulary.encode(text)
        detokenizer = vocabulary.detokenizer()
        assert "".join(detokenizer.push([token]) for token in ids) + detokenizer.flush() == text
    chat = vocabulary.encode_chat([{"role": "user", "content": "Hi"}])
    assert vocabulary.detokenizer().push(chat).rstrip().endswith("assistant")
