"""Putting the tokens of one attempt in order: the first from the prompt side, then the rest.

The two sides report on two streams, so the second token may be seen before the first. An
attempt's tokens come out in order, each once, and nothing comes out after its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH, FinishReason, TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)  # made for every token: a frozen one takes twice as long
class Arrived:
    """Tokens as one machine sent them; `finish` 0 means that more may come."""

    token_ids: list[int]
    logprobs: Sequence[TokenLogprob] = field(default_factory=list)
    finish: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED


class AttemptMerge:
    """The order of one attempt's tokens. `single`: the prompt side's token is also the last."""

    def __init__(self, *, single: bool) -> None:
        self.single = single
        self._early: list[Arrived] = []
        self.first_seen = False
        self.over = False

    def from_prompt(self, arrived: Arrived) -> list[Arrived]:
        """Take the first token; return it and whatever waited for it."""
        if self.first_seen or self.over:
            return []
        self.first_seen = True
        finish = arrived.finish
        if self.single:
            finish = finish or FINISH_REASON_LENGTH
        elif finish == FINISH_REASON_LENGTH:  # the prompt side's own bound of one token
            finish = FinishReason.FINISH_REASON_UNSPECIFIED
        first = Arrived(arrived.token_ids[:1], arrived.logprobs[:1], finish)
        early, self._early = self._early, []
        return self._until_finish([first, *early])

    def from_token(self, arrived: Arrived) -> list[Arrived]:
        """Take later tokens; return them, or nothing while the first is missing."""
        if self.over or self.single:
            return []
        if not self.first_seen:
            self._early.append(arrived)
            return []
        return self._until_finish([arrived])

    def _until_finish(self, ordered: list[Arrived]) -> list[Arrived]:
        for index, arrived in enumerate(ordered):
            if arrived.finish:
                self.over = True
                return ordered[: index + 1]
        return ordered
