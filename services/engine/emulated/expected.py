"""What an intact cluster of emulated engines answers: for tests and fault campaigns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.engine.emulated.content import KvContent, TokenChoice, model_salt, reference_tokens
from splitwise.requests import derive_seed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from services.engine.emulated.settings import EmulatedSettings


def expected_tokens(
    settings: EmulatedSettings,
    prompt: Sequence[int],
    count: int,
    *,
    seed: int | None = None,
    min_tokens: int = 0,
    ignore_eos: bool = False,
) -> list[int]:
    """Return the tokens of a request that runs without a restart; `seed` None is greedy.

    The token side samples with the seed that the router derives for the second token.
    """
    content = KvContent(model_salt(settings.model), settings.layers, settings.words)
    choice = TokenChoice(settings.vocab_size, settings.eos_probability)
    seeds = [] if seed is None else [seed, derive_seed(seed, 1)]
    return reference_tokens(
        content, choice, prompt, count, seeds=seeds, min_tokens=min_tokens, ignore_eos=ignore_eos
    )
