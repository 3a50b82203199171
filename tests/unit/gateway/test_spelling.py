"""A token's own bytes, as log probabilities show them, for each kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from splitwise.text.vocabulary import ByteVocabulary, TokenizerVocabulary


def byte_level() -> TokenizerVocabulary:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return TokenizerVocabulary(tokenizer)


def byte_fallback() -> TokenizerVocabulary:
    names = ["<unk>", *[f"<0x{byte:02X}>" for byte in range(256)], "\u2581the", "cat"]
    tokenizer = Tokenizer(
        models.BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return TokenizerVocabulary(tokenizer)


@given(st.text(min_size=1))
def test_spelled_tokens_of_a_text_are_its_bytes(text: str) -> None:
    vocabulary = byte_level()
    assert b"".join(map(vocabulary.spell, vocabulary.encode(text))) == text.encode()


def test_special_tokens_have_their_name() -> None:
    vocabulary = byte_level()
    assert vocabulary.spell(256) == b"<|end|>"
    assert vocabulary.detokenizer().push([256]) == ""


@pytest.mark.parametrize(("token", "spelled"), [(1 + 0xE4, b"\xe4"), (257, b" the"), (258, b"cat")])
def test_sentencepiece_spelling(token: int, spelled: bytes) -> None:
    assert byte_fallback().spell(token) == spelled


@pytest.mark.parametrize("vocabulary", [byte_level(), byte_fallback()])
def test_an_unknown_id_spells_nothing(vocabulary: TokenizerVocabulary) -> None:
    assert vocabulary.spell(100_000) == b""


def test_the_built_in_vocabulary() -> None:
    assert ByteVocabulary().spell(0xC3) == b"\xc3"
    assert ByteVocabulary(1000).spell(900) == b" t900"
