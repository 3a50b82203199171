"""Finding stop strings in text that arrives in pieces, wherever the pieces are cut.

Text that may yet turn out to be the beginning of a stop string is held back, so that a stop
string is never part of the output. Which match counts does not depend on the cuts: the one
that is complete first; of those complete at the same character, the longest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True)
class StopResult:
    """Text that may be given out, and the stop string that ended the output, if one did."""

    text: str
    matched: str | None = None


class _Pattern:
    """One stop string and how much of it the text's end matches (Knuth, Morris and Pratt)."""

    __slots__ = ("_failure", "length", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.matched = 0
        self._failure = [0] * self.length
        border = 0
        for index in range(1, self.length):
            while border and text[index] != text[border]:
                border = self._failure[border - 1]
            if text[index] == text[border]:
                border += 1
            self._failure[index] = border

    def advance(self, character: str) -> bool:
        """Take one character; True when the pattern is complete with it."""
        if self.matched == self.length:  # complete before, but it did not count
            self.matched = self._failure[-1]
        while self.matched and character != self.text[self.matched]:
            self.matched = self._failure[self.matched - 1]
        if character == self.text[self.matched]:
            self.matched += 1
        return self.matched == self.length

    @property
    def open(self) -> int:
        """Characters at the text's end that may yet become this pattern."""
        return self._failure[-1] if self.matched == self.length else self.matched


class StopMatcher:
    """The stop strings of one request, over one answer. Work per character is constant."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._patterns = [_Pattern(stop) for stop in stops]
        if any(not pattern.length for pattern in self._patterns):
            raise ValueError("an empty stop string matches everywhere")
        self._held = ""
        self.any = bool(self._patterns)  # without stop strings no text is ever held

    def push(self, text: str, *, enabled: bool = True) -> StopResult:
        """Take more text; with `enabled` false, strings that end in it do not stop the output."""
        if not self._patterns:
            return StopResult(text)
        buffer = self._held + text
        end = len(self._held)
        for character in text:
            end += 1
            complete = [pattern for pattern in self._patterns if pattern.advance(character)]
            if complete and enabled:
                longest = max(complete, key=lambda pattern: pattern.length)
                self._held = ""
                return StopResult(buffer[: end - longest.length], longest.text)
        hold = max(pattern.open for pattern in self._patterns)
        self._held = buffer[len(buffer) - hold :]
        return StopResult(buffer[: len(buffer) - hold])

    def flush(self) -> str:
        """End the output without a match; return what was held."""
        held, self._held = self._held, ""
        return held
