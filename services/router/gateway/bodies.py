"""The bodies that clients send: OpenAI's fields and vLLM's additions to them.

Types are strict where a mistake would otherwise go unseen (``"max_tokens": "ten"``, a flag
as a number); ``null`` means not given, as OpenAI's servers take it. Unknown fields are kept
aside for `unserved` and otherwise ignored. Ranges are the router's to check.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict

UINT32 = 2**32 - 1
INT64 = 2**63


def _number(value: object) -> object:
    if isinstance(value, str | bool):
        raise ValueError("must be a number")  # noqa: TRY004 - pydantic reports ValueError only
    return value


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, BeforeValidator(_number), Field(ge=0, le=UINT32)]
Number = Annotated[float, BeforeValidator(_number)]
Flag = Annotated[bool, Strict()]
Text = Annotated[str, Strict()]
TokenId = Annotated[int, BeforeValidator(_number), Field(ge=0, le=UINT32)]
Texts = Annotated[list[Text], BeforeValidator(_listed)]


class StreamOptions(BaseModel):
    """OpenAI's `include_usage` and vLLM's `continuous_usage_stats`."""

    include_usage: Flag | None = None
    continuous_usage_stats: Flag | None = None


class Body(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: Text | None = None


class GenerationBody(Body):
    """What completions and chat completions share."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Annotated[int, BeforeValidator(_number), Field(ge=-(2**31), lt=2**31)] | None = None
    min_p: Number | None = None
    stop: Texts | None = None
    stop_token_ids: list[TokenId] | None = None
    seed: Annotated[int, BeforeValidator(_number), Field(ge=-INT64, lt=INT64)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[Annotated[int, Field(ge=0, le=UINT32)], Number] | None = None
    ignore_eos: Flag | None = None
    n: Count | None = None
    stream: Flag | None = None
    stream_options: StreamOptions | None = None
    return_tokens_as_token_ids: Flag | None = None


class CompletionBody(GenerationBody):
    """Body of ``/v1/completions``. `prompt` is read by `prompts`, which can name the element at fault."""

    prompt: Any = None
    echo: Flag | None = None
    logprobs: Count | None = None
    best_of: Count | None = None


class ChatBody(GenerationBody):
    """Body of ``/v1/chat/completions``."""

    messages: Any = None
    logprobs: Flag | None = None
    top_logprobs: Count | None = None


class TokenizeBody(Body):
    """Body of ``/tokenize``: a prompt or messages, as vLLM takes it."""

    prompt: Any = None
    messages: Any = None


class DetokenizeBody(Body):
    """Body of ``/detokenize``."""

    tokens: list[TokenId]
