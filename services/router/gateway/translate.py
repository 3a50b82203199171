"""From a client's body to the router's `GenerateRequest` and the form of the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pydantic import ValidationError

from services.router.gateway.bodies import Body, ChatBody, CompletionBody, GenerationBody, TokenizeBody
from services.router.gateway.prompts import put_messages, put_prompt, split_prompts
from services.router.gateway.refusals import ParamNames, from_validation, invalid
from services.router.gateway.unserved import refuse_unserved
from splitwise.rpc.v1.router_pb2 import GenerateRequest

if TYPE_CHECKING:
    from splitwise.rpc.v1.common_pb2 import SamplingParams

B = TypeVar("B", bound=Body)


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt with its sampling: a request of its own to the router."""

    request: GenerateRequest
    names: ParamNames


@dataclass(frozen=True, slots=True)
class Call:
    """What one body asks for, one answer for each prompt, and how they are to look."""

    prompts: tuple[Asked, ...]
    chat: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    logprobs: int | None  # alternatives beside the chosen token; None: no log probabilities
    tokens_as_ids: bool = False
    echo: bool = False


# Fields that are called the same in `SamplingParams`.
_SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "n",
)


def parse(kind: type[B], body: bytes) -> B:
    """Read a body; raises a `Refusal` that names the first field at fault."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error) from None


def completion_call(body: CompletionBody, client_request_id: str) -> Call:
    """Translate ``/v1/completions``."""
    refuse_unserved(body.model_extra, chat=False)
    if body.best_of is not None and body.best_of != 1:
        raise invalid("best_of", f"{body.best_of}: only 1 is served; send the request several times")
    if body.echo and body.logprobs is not None:
        raise invalid("echo", "not served with logprobs: the prompt has no log probabilities here")
    prompts = []
    for path, prompt in split_prompts(body.prompt):
        request = GenerateRequest(model=body.model or "", client_request_id=client_request_id)
        put_prompt(request, prompt, path)
        _put_sampling(request.sampling, body, body.logprobs)
        prompts.append(Asked(request, ParamNames(prompt=path, sampling=_sampling_names(body))))
    return _call(prompts, body, body.logprobs, echo=bool(body.echo))


def chat_call(body: ChatBody, client_request_id: str) -> Call:
    """Translate ``/v1/chat/completions``."""
    refuse_unserved(body.model_extra, chat=True)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = GenerateRequest(model=body.model or "", client_request_id=client_request_id)
    put_messages(request, body.messages)
    sampling = _sampling_names(body) | {"logprobs": "top_logprobs"}
    _put_sampling(request.sampling, body, logprobs)
    return _call([Asked(request, ParamNames(sampling=sampling))], body, logprobs, chat=True)


def tokenize_request(body: TokenizeBody) -> GenerateRequest:
    """Translate ``/tokenize``."""
    chat = body.messages is not None
    refuse_unserved(body.model_extra, chat=chat)
    request = GenerateRequest(model=body.model or "")
    if chat:
        put_messages(request, body.messages)
    else:
        put_prompt(request, body.prompt)
    return request


def _call(
    prompts: list[Asked],
    body: GenerationBody,
    logprobs: int | None,
    *,
    chat: bool = False,
    echo: bool = False,
) -> Call:
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("stream_options", "only allowed when stream is true")
    return Call(
        tuple(prompts),
        chat=chat,
        stream=bool(body.stream),
        include_usage=bool(options and options.include_usage),
        continuous_usage=bool(options and options.continuous_usage_stats),
        logprobs=logprobs,
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        echo=echo,
    )


def _sampling_names(body: GenerationBody) -> dict[str, str]:
    return {"max_tokens": "max_completion_tokens"} if body.max_completion_tokens is not None else {}


def _put_sampling(sampling: SamplingParams, body: GenerationBody, logprobs: int | None) -> None:
    for name in _SAME:
        value = getattr(body, name)
        if value is not None:
            setattr(sampling, name, value)
    limit = _max_tokens(body)
    if limit is not None:
        sampling.max_tokens = limit
    if logprobs is not None:
        sampling.logprobs = logprobs
    sampling.ignore_eos = bool(body.ignore_eos)
    sampling.stop.extend(stop.encode() for stop in body.stop or ())
    sampling.stop_token_ids.extend(body.stop_token_ids or ())
    for token_id, bias in (body.logit_bias or {}).items():
        sampling.logit_bias[token_id] = bias


def _max_tokens(body: GenerationBody) -> int | None:
    """Return the limit; the two names may both be given when they agree."""
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        problem = f"{new} and max_tokens is {old}: give one of them, or the same number"
        raise invalid("max_completion_tokens", problem)
    return old if new is None else new
