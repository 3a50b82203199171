"""Refusing bad requests before anything is allocated, with the path of the field at fault.

Two steps, because tokenizing costs time: `check_request` looks at the message as it came;
`check_prompt_tokens` at the token ids against the model. `complete_sampling` then fills in
every default, so that nothing downstream decides one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitwise.errors import InvalidRequestError
from splitwise.rpc.v1.common_pb2 import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from splitwise.rpc.v1.router_pb2 import ChatPrompt, GenerateRequest


class FieldError(InvalidRequestError):
    """One field of a request is wrong. `field` is its path, such as ``sampling.stop[2]``."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}", code="INVALID_ARGUMENT")
        self.field = field


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that do not depend on the model (router.proto and common.proto name them)."""

    prompt_bytes: int = 4 * 1024 * 1024
    prompt_ids: int = 1024 * 1024
    client_request_id_bytes: int = 256
    stops: int = 16
    stop_bytes: int = 256
    stop_token_ids: int = 64
    logprobs: int = 20
    logit_bias: int = 300


DEFAULT_LIMITS = Limits()
ROLES = ("system", "user", "assistant")
# field: (lowest, highest, lowest is allowed)
_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0, 2, True),
    "top_p": (0, 1, False),
    "min_p": (0, 1, True),
    "presence_penalty": (-2, 2, True),
    "frequency_penalty": (-2, 2, True),
    "repetition_penalty": (0, 10, False),
}


def check_request(request: GenerateRequest, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check all that needs no model; raises `FieldError`."""
    if len(request.client_request_id.encode()) > limits.client_request_id_bytes:
        raise FieldError("client_request_id", f"longer than {limits.client_request_id_bytes} bytes")
    _check_prompt(request, limits)
    if request.transfer_mode not in (0, 1, 2):
        raise FieldError("transfer_mode", f"{request.transfer_mode} is not a TransferMode")
    check_sampling(request.sampling, limits)


def _check_prompt(request: GenerateRequest, limits: Limits) -> None:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise FieldError("prompt", "missing: set one of text, chat, token_ids")
    if kind == "text":
        if not request.text:
            raise FieldError("text", "empty")
        _check_size("text", request.text, limits)
    elif kind == "chat":
        _check_chat(request.chat, limits)
    elif not request.token_ids.ids:
        raise FieldError("token_ids.ids", "empty")
    elif len(request.token_ids.ids) > limits.prompt_ids:
        count = len(request.token_ids.ids)
        raise FieldError("token_ids.ids", f"{count} ids; the limit is {limits.prompt_ids}")


def _check_chat(chat: ChatPrompt, limits: Limits) -> None:
    if not chat.messages:
        raise FieldError("chat.messages", "empty")
    total = 0
    for index, message in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        if message.role not in ROLES:
            raise FieldError(f"{path}.role", f"{message.role[:40]!r} is not one of {', '.join(ROLES)}")
        total += len(message.content.encode())
        if total > limits.prompt_bytes:
            raise FieldError(f"{path}.content", f"the chat is longer than {limits.prompt_bytes} bytes")


def _check_size(field: str, text: str, limits: Limits) -> None:
    size = len(text.encode())
    if size > limits.prompt_bytes:
        raise FieldError(field, f"{size} bytes; the limit is {limits.prompt_bytes}")


def check_sampling(sampling: SamplingParams, limits: Limits = DEFAULT_LIMITS) -> None:
    """Check the fields that are set; raises `FieldError`."""
    for name, (low, high, closed) in _RANGES.items():
        if not sampling.HasField(name):  # type: ignore[arg-type]  # the stub wants literals
            continue
        value: float = getattr(sampling, name)
        if not (low <= value <= high) or (value == low and not closed):  # NaN fails too
            bracket = "[" if closed else "("
            raise FieldError(f"sampling.{name}", f"{value:g} is outside {bracket}{low:g}, {high:g}]")
    if sampling.HasField("max_tokens") and sampling.max_tokens < 1:
        raise FieldError("sampling.max_tokens", "must be at least 1")
    if sampling.HasField("max_tokens") and sampling.min_tokens > sampling.max_tokens:
        problem = f"{sampling.min_tokens} is more than max_tokens ({sampling.max_tokens})"
        raise FieldError("sampling.min_tokens", problem)
    if sampling.top_k < -1:
        raise FieldError("sampling.top_k", f"{sampling.top_k}: write -1 or 0 for all, or at least 1")
    if sampling.HasField("n") and sampling.n != 1:
        raise FieldError("sampling.n", f"{sampling.n}: only 1 is served; send the request several times")
    if sampling.logprobs > limits.logprobs:
        raise FieldError("sampling.logprobs", f"{sampling.logprobs} is more than {limits.logprobs}")
    _check_stops(sampling, limits)
    _check_bias(sampling, limits)


def _check_stops(sampling: SamplingParams, limits: Limits) -> None:
    if len(sampling.stop) > limits.stops:
        raise FieldError("sampling.stop", f"{len(sampling.stop)} strings; the limit is {limits.stops}")
    for index, stop in enumerate(sampling.stop):
        if not 1 <= len(stop) <= limits.stop_bytes:
            problem = f"{len(stop)} bytes; a stop string has 1 to {limits.stop_bytes}"
            raise FieldError(f"sampling.stop[{index}]", problem)
    decode_stops(sampling)
    if len(sampling.stop_token_ids) > limits.stop_token_ids:
        problem = f"{len(sampling.stop_token_ids)} ids; the limit is {limits.stop_token_ids}"
        raise FieldError("sampling.stop_token_ids", problem)


def _check_bias(sampling: SamplingParams, limits: Limits) -> None:
    if len(sampling.logit_bias) > limits.logit_bias:
        problem = f"{len(sampling.logit_bias)} entries; the limit is {limits.logit_bias}"
        raise FieldError("sampling.logit_bias", problem)
    for token_id, bias in sampling.logit_bias.items():
        if not -100 <= bias <= 100:
            raise FieldError(f"sampling.logit_bias[{token_id}]", f"{bias:g} is outside [-100, 100]")


def decode_stops(sampling: SamplingParams) -> list[str]:
    """Return the stop strings as text; raises `FieldError` for invalid UTF-8."""
    stops = []
    for index, stop in enumerate(sampling.stop):
        try:
            stops.append(stop.decode())
        except UnicodeDecodeError as error:
            problem = f"not valid UTF-8 at byte {error.start}"
            raise FieldError(f"sampling.stop[{index}]", problem) from None
    return stops


def check_prompt_tokens(
    field: str, token_ids: Sequence[int], sampling: SamplingParams, *, max_model_len: int, vocab_size: int
) -> None:
    """Check the tokenized prompt against the model; `vocab_size` 0 means unknown.

    `field` is where the prompt came from (``text``, ``chat``, ``token_ids.ids``).
    """
    if not token_ids:
        raise FieldError(field, "gives no tokens")
    length = len(token_ids)
    if length >= max_model_len:
        problem = f"{length} tokens; the model takes {max_model_len} with the output, so at most"
        raise FieldError(field, f"{problem} {max_model_len - 1}")
    if length + sampling.max_tokens > max_model_len:
        problem = f"{sampling.max_tokens} and a prompt of {length} tokens are more than the model's"
        raise FieldError("sampling.max_tokens", f"{problem} {max_model_len}")
    if sampling.min_tokens > max_model_len - length:
        problem = f"{sampling.min_tokens} and a prompt of {length} tokens are more than the model's"
        raise FieldError("sampling.min_tokens", f"{problem} {max_model_len}")
    if vocab_size:
        _check_ids(field, token_ids, vocab_size)
        _check_ids("sampling.stop_token_ids", sampling.stop_token_ids, vocab_size)
        _check_ids("sampling.logit_bias", list(sampling.logit_bias), vocab_size)


def _check_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and max(token_ids) >= vocab_size:
        index, bad = next((i, token) for i, token in enumerate(token_ids) if token >= vocab_size)
        raise FieldError(f"{field}[{index}]", f"token id {bad} is outside the vocabulary of {vocab_size}")


def complete_sampling(
    sampling: SamplingParams, *, room: int, recommended: SamplingParams | None = None
) -> SamplingParams:
    """Return a copy with every default filled in; `room` is what the context leaves for output.

    `recommended`: what the model's makers would have, used before the defaults.
    """
    complete = SamplingParams(
        max_tokens=room,
        min_tokens=0,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        n=1,
    )
    if recommended is not None:
        complete.MergeFrom(recommended)
    complete.MergeFrom(sampling)
    complete.top_k = max(complete.top_k, 0)
    return complete
