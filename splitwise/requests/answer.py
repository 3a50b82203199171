"""From the merged tokens of a request to what the client is sent.

One answer goes through all attempts of its request: its detokenizer and stop strings see
every token once, whichever machine made it, so both work across the hand-over and across
restarts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.requests.merge import Arrived
    from splitwise.rpc.v1.common_pb2 import TokenLogprob
    from splitwise.text.detokenizer import Detokenizer
    from splitwise.text.stops import StopMatcher


@dataclass(slots=True)  # made for every token: a frozen one takes twice as long
class Piece:
    """The next part of an answer; `finish` 0 means that more comes."""

    text: str
    token_ids: list[int]
    logprobs: Sequence[TokenLogprob]
    finish: FinishReason.ValueType
    stop_matched: str = ""
    by_text: bool = False  # a stop string or max_tokens ended it: the engine does not know yet


class Answer:
    """The text of one request. `min_tokens`: stop strings count only after so many tokens."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopMatcher, *, min_tokens: int, max_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._max_tokens = max_tokens
        self.count = 0
        self.finished = False

    def push(self, arrived: Arrived) -> Piece:
        """Take tokens in order; the piece ends at the token that ends the answer."""
        ids = arrived.token_ids
        if not (self._stops.any or arrived.finish or self.count + len(ids) >= self._max_tokens):
            self.count += len(ids)
            return Piece(self._detokenizer.push(ids), ids, arrived.logprobs, arrived.finish)
        parts: list[str] = []
        last = len(arrived.token_ids) - 1
        for index, token_id in enumerate(arrived.token_ids):
            self.count += 1
            ended = index == last and arrived.finish == FINISH_REASON_STOP
            # The token that the engine stopped at (EOS or a stop token) has no text.
            text = "" if ended else self._detokenizer.push((token_id,))
            result = self._stops.push(text, enabled=self.count > self._min_tokens)
            parts.append(result.text)
            if result.matched is not None:
                return self._end(arrived, index, parts, FINISH_REASON_STOP, result.matched, by_text=True)
            if self.count == self._max_tokens and not (index == last and arrived.finish):
                return self._end(arrived, index, parts, FINISH_REASON_LENGTH, by_text=True)
        if arrived.finish:
            return self._end(arrived, last, parts, arrived.finish)
        return Piece("".join(parts), arrived.token_ids, arrived.logprobs, arrived.finish)

    def _end(
        self,
        arrived: Arrived,
        last: int,
        parts: list[str],
        finish: FinishReason.ValueType,
        matched: str = "",
        *,
        by_text: bool = False,
    ) -> Piece:
        self.finished = True
        if not matched:
            result = self._stops.push(self._detokenizer.flush(), enabled=self.count > self._min_tokens)
            parts.append(result.text)
            if result.matched is None:
                parts.append(self._stops.flush())
            else:
                finish, matched = FINISH_REASON_STOP, result.matched
        ids = arrived.token_ids[: last + 1]
        return Piece("".join(parts), ids, arrived.logprobs[: last + 1], finish, matched, by_text)
