"""How far a request has come, and how another attempt goes on from there.

A new attempt's prompt is the prompt plus all tokens that the client has been sent; its
limits are what is left of the user's. What cannot be continued exactly is refused
(`CannotContinueError`) instead of answered approximately.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitwise.rpc.v1.common_pb2 import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Iterable


class CannotContinueError(Exception):
    """Another attempt would not give the tokens that the first would have; says why."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """What one attempt is given. The token side gets `token_sampling`, the prompt side the other."""

    token_ids: list[int]
    prompt_sampling: SamplingParams
    token_sampling: SamplingParams
    single: bool  # one token is left: no token phase, no transfer


def derive_seed(seed: int, position: int) -> int:
    """Return the seed for sampling that starts at output `position` (0: the user's own).

    Each machine samples with a generator of its own, so a machine that takes over must not
    begin with the numbers that were used before. Equal runs of the split give equal seeds.
    """
    if position == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # positive in 64 bits


class Progress:
    """The prompt, the completed sampling parameters and the tokens that are out."""

    def __init__(self, prompt: list[int], sampling: SamplingParams) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.made: list[int] = []

    @property
    def left(self) -> int:
        """Tokens that may still be made."""
        return self.sampling.max_tokens - len(self.made)

    def add(self, token_ids: Iterable[int]) -> None:
        """Record tokens that go to the client."""
        self.made.extend(token_ids)

    def continuation(self) -> Continuation:
        """Return what the next attempt must be given; raises `CannotContinueError`."""
        made = len(self.made)
        self._check_penalties()
        sampling = SamplingParams()
        sampling.CopyFrom(self.sampling)
        sampling.ClearField("stop")  # strings are the router's
        sampling.max_tokens = self.left
        sampling.min_tokens = max(0, self.sampling.min_tokens - made)
        token_sampling = SamplingParams()
        token_sampling.CopyFrom(sampling)
        if self.sampling.HasField("seed"):
            sampling.seed = derive_seed(self.sampling.seed, made)
            token_sampling.seed = derive_seed(self.sampling.seed, made + 1)
        return Continuation(self.prompt + self.made, sampling, token_sampling, self.left == 1)

    def _check_penalties(self) -> None:
        """Refuse penalties that count output tokens: a new attempt would count them as prompt.

        repetition_penalty looks at prompt and output alike, so it continues exactly.
        """
        if not self.made:
            return
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self.sampling, name) != 0:
                raise CannotContinueError(
                    f"{len(self.made)} tokens were sent and {name} is set: another machine could not"
                    " continue with the same penalties; send the request again"
                )
