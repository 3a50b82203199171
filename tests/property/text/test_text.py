"""Text and stop strings do not depend on how tokens cut them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from splitwise.text import ByteVocabulary, StopMatcher, TokenizerVocabulary
from tests.support.tokenizers_small import byte_level

Cuts = st.lists(st.integers(0, 60), max_size=8)


def cut(text: str, at: list[int]) -> list[str]:
    places = sorted({0, len(text), *(place for place in at if place < len(text))})
    return [text[a:b] for a, b in pairwise(places)]


def first_match(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule said plainly: earliest end, then longest."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.text("abc", max_size=60), st.lists(st.text("abc", min_size=1, max_size=6), max_size=4), Cuts)
@example("xabcab", ["abca", "ca"], [1, 2, 3, 4, 5])
def test_stops_do_not_depend_on_the_cuts(text: str, stops: list[str], at: list[int]) -> None:
    matcher, out = StopMatcher(stops), ""
    for piece in cut(text, at):
        result = matcher.push(piece)
        out += result.text
        assert text.startswith(out)
        if result.matched is not None:
            assert (out, result.matched) == first_match(text, stops)
            return
    assert (out + matcher.flush(), None) == first_match(text, stops)


@given(st.text("ab", max_size=30), st.text("ab", max_size=30), st.text("ab", min_size=1, max_size=4))
def test_matches_that_end_before_enabling_never_stop(before: str, after: str, stop: str) -> None:
    matcher = StopMatcher([stop])
    out = matcher.push(before, enabled=False).text
    result = matcher.push(after)
    text = before + after
    ends = [e for e in range(len(before) + 1, len(text) + 1) if text[:e].endswith(stop)]
    if ends:
        # What is out already cannot be taken back; the rest is cut at the match.
        assert result.matched == stop
        assert out + result.text == text[: ends[0] - len(stop)]
    else:
        assert result.matched is None
        assert out + result.text + matcher.flush() == text


@given(st.lists(st.integers(0, 331), max_size=80), Cuts)
def test_byte_level_pieces_make_the_library_s_whole(ids: list[int], at: list[int]) -> None:
    tokenizer = byte_level()
    detokenizer = TokenizerVocabulary(tokenizer).detokenizer()
    places = sorted({0, len(ids), *(place for place in at if place < len(ids))})
    out = "".join(detokenizer.push(ids[a:b]) for a, b in pairwise(places))
    assert out + detokenizer.flush() == tokenizer.decode(ids)


@given(st.text(max_size=40))
def test_every_text_comes_back_in_whole_characters(text: str) -> None:
    for vocabulary in (ByteVocabulary(), TokenizerVocabulary(byte_level())):
        try:
            ids = vocabulary.encode(text)
        except UnicodeEncodeError:  # a lone surrogate is no text that gRPC could carry
            return
        detokenizer, out = vocabulary.detokenizer(), ""
        for token in ids:
            out += detokenizer.push([token])
            assert text.startswith(out)
        assert out + detokenizer.flush() == text
