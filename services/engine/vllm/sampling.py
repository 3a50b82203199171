"""Sampling parameters of the contract, in vLLM's terms, for each phase.

Stop strings are not among them: the router matches those, across the hand-over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from services.engine.interface import WorkRefusedError

if TYPE_CHECKING:
    import vllm

    from splitwise.rpc.v1.common_pb2 import SamplingParams

_PLAIN: tuple[
    Literal[
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "logprobs",
    ],
    ...,
] = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logprobs",
)


def prompt_sampling(sampling: SamplingParams, extra: dict[str, Any] | None) -> vllm.SamplingParams:
    """Return how to sample the first token, and nothing after it.

    Of `min_tokens` only one thing matters here: whether the first token may end the text.
    """
    return _convert(sampling, 1, min(sampling.min_tokens, 1), extra)


def token_sampling(sampling: SamplingParams, room: int, extra: dict[str, Any] | None) -> vllm.SamplingParams:
    """Return how to sample the later tokens. Both limits count the first token, which is output here too.

    `room`: tokens that fit between the prompt and the model's limit.
    """
    max_tokens = sampling.max_tokens if sampling.HasField("max_tokens") else room
    return _convert(sampling, max_tokens, sampling.min_tokens, extra)


def _convert(
    sampling: SamplingParams, max_tokens: int, min_tokens: int, extra: dict[str, Any] | None
) -> vllm.SamplingParams:
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.exceptions import VLLMValidationError
    from vllm.sampling_params import RequestOutputKind

    given = {name: getattr(sampling, name) for name in _PLAIN if sampling.HasField(name)}
    if given.get("top_k") == -1:
        given["top_k"] = 0  # vLLM's word for all
    try:
        return VllmSamplingParams(
            **given,
            max_tokens=max_tokens,
            min_tokens=min_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            logit_bias=dict(sampling.logit_bias) or None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            skip_reading_prefix_cache=False,
            extra_args=extra,
        )
    except (VLLMValidationError, ValueError) as error:
        raise WorkRefusedError(f"sampling: {error}") from error
