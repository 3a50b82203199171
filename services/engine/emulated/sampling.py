"""From a digest to an output: which sampling fields the emulated engine honours, and how."""

from __future__ import annotations

from math import log
from typing import TYPE_CHECKING

from services.engine.emulated.content import FIRST_WORD, mix
from services.engine.interface import TokenOutput, WorkRefusedError

if TYPE_CHECKING:
    from services.engine.emulated.content import TokenChoice
    from splitwise.rpc.v1.common_pb2 import SamplingParams


def seed_of(sampling: SamplingParams, drawn: int) -> int | None:
    """Return the seed that decides the tokens: none when greedy, `drawn` when the user gave none."""
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    if temperature == 0.0:
        return None
    return sampling.seed if sampling.HasField("seed") else drawn


def refuse_unserved(sampling: SamplingParams) -> None:
    """Raise `WorkRefusedError` for fields that need logits, which the emulated engine does not have."""
    for name in ("presence_penalty", "frequency_penalty"):
        if sampling.HasField(name) and getattr(sampling, name) != 0.0:
            raise WorkRefusedError(f"sampling.{name}: the emulated engine has no logits to change")
    if sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1.0:
        raise WorkRefusedError("sampling.repetition_penalty: the emulated engine has no logits to change")
    if sampling.logit_bias:
        raise WorkRefusedError("sampling.logit_bias: the emulated engine has no logits to change")


def output_of(
    choice: TokenChoice,
    digest: int,
    seed: int | None,
    sampling: SamplingParams,
    *,
    made: int,
    room: int,
    cached: int,
) -> TokenOutput:
    """Choose the token after `made` earlier ones; `room`: tokens that the context can still take."""
    number = made + 1
    free_to_end = number >= sampling.min_tokens
    token = choice.choose(digest, seed, may_end=free_to_end and not sampling.ignore_eos)
    finish, stop_token = None, None
    if free_to_end and (
        token in sampling.stop_token_ids or (token == choice.eos_token_id and not sampling.ignore_eos)
    ):
        finish, stop_token = "stop", token
    elif number >= sampling.max_tokens > 0 or room <= 1:
        finish = "length"
    logprobs = []
    if sampling.HasField("logprobs"):
        logprobs.append(_logprobs(choice, digest, token, sampling.logprobs))
    return TokenOutput([token], logprobs, finish, stop_token, cached)


def _logprobs(choice: TokenChoice, digest: int, token: int, alternatives: int) -> dict[int, float]:
    """Made-up log probabilities that depend on the KV like the token does: the chosen one halves the rest."""
    found = {token: log(0.5)}
    step = 0
    while len(found) < alternatives:
        step += 1
        other = FIRST_WORD + mix(digest + step) % (choice.vocab_size - 1 - FIRST_WORD)
        found.setdefault(other, log(0.5) * (len(found) + 1))
    return found
