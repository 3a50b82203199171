"""Stop strings over the cuts between pieces."""

from __future__ import annotations

import pytest

from splitwise.text import StopMatcher, StopResult


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    out = ""
    for piece in pieces:
        result = matcher.push(piece)
        out += result.text
        if result.matched is not None:
            return out, result.matched
    return out + matcher.flush(), None


@pytest.mark.parametrize(
    ("stops", "pieces", "wanted"),
    [
        (["ab"], ["xa", "bc"], ("x", "ab")),  # over two pieces, as over the hand-over
        (["abc"], ["xa", "b", "c"], ("x", "abc")),  # over three
        (["ab", "abc"], ["xabc"], ("x", "ab")),  # the one that is complete first
        (["xabc", "bc"], ["xab", "c"], ("", "xabc")),  # complete together: the longest
        (["aab"], ["aaa", "b"], ("a", "aab")),  # falls back inside itself
        (["ab"], ["a", "a"], ("aa", None)),
        (["👍🏽"], ["ok 👍", "🏽!"], ("ok ", "👍🏽")),
        (["\n\n"], ["a\n", "b\n", "\nc"], ("a\nb", "\n\n")),
        ([], ["anything"], ("anything", None)),
    ],
)
def test_matches(stops: list[str], pieces: list[str], wanted: tuple[str, str | None]) -> None:
    assert run(stops, pieces) == wanted


def test_only_what_may_become_a_stop_is_held_back() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("the E") == StopResult("the ")
    assert matcher.push("N") == StopResult("")
    assert matcher.push("x") == StopResult("ENx")


def test_a_match_that_does_not_count_is_output_and_later_ones_stop() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", enabled=False) == StopResult("a")  # its end may begin the next
    assert matcher.push("a") == StopResult("", "aa")


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="everywhere"):
        StopMatcher([""])
