"""From arguments to protobuf requests, for both clients; what cannot be sent is refused here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

from splitwise.client.types import Message, TransferMode
from splitwise.errors import InvalidRequestError
from splitwise.rpc.channels import MESSAGE_BYTES
from splitwise.rpc.v1 import common_pb2, router_pb2

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

MODES = {
    None: common_pb2.TRANSFER_MODE_UNSPECIFIED,
    TransferMode.SERIALIZED: common_pb2.TRANSFER_MODE_SERIALIZED,
    TransferMode.LAYERWISE: common_pb2.TRANSFER_MODE_LAYERWISE,
}


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen; what is left out has the default of ``SamplingParams`` in the protos."""

    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    stop: str | bytes | Sequence[str | bytes]
    stop_token_ids: Sequence[int]
    seed: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logprobs: int
    ignore_eos: bool
    n: int
    logit_bias: Mapping[int, float]


def generate_request(
    prompt: str | Sequence[int] | Sequence[Message],
    options: SamplingOptions,
    *,
    model: str,
    client_request_id: str,
    transfer_mode: TransferMode | str | None,
) -> router_pb2.GenerateRequest:
    """Build the request; raises `InvalidRequestError` that names the field which cannot be sent."""
    request = router_pb2.GenerateRequest(sampling=_sampling(options), transfer_mode=_mode(transfer_mode))
    _set(request, "model", model)
    _set(request, "client_request_id", client_request_id)
    if isinstance(prompt, str):
        _set(request, "text", prompt)
        return _sendable(request)
    messages = [part for part in prompt if isinstance(part, Message)]
    if messages:
        for index, message in enumerate(messages):
            added = request.chat.messages.add()
            _set(added, "role", message.role, f"chat.messages[{index}].role")
            _set(added, "content", message.content, f"chat.messages[{index}].content")
        return _sendable(request)
    request.token_ids.SetInParent()
    _extend(request.token_ids.ids, prompt, "token_ids.ids")
    return _sendable(request)


def chat_messages(messages: Iterable[Message | Mapping[str, str]]) -> list[Message]:
    """Accept messages as objects or as ``{"role": ..., "content": ...}``."""
    result = []
    for index, message in enumerate(messages):
        if isinstance(message, Message):
            result.append(message)
            continue
        if set(message) != {"role", "content"}:
            has = ", ".join(sorted(message)) or "nothing"
            raise InvalidRequestError(
                f"chat.messages[{index}]: needs role and content, has {has}",
                code="INVALID_ARGUMENT",
            )
        result.append(Message(message["role"], message["content"]))
    if not result:
        raise InvalidRequestError("chat.messages: at least one is needed", code="INVALID_ARGUMENT")
    return result


def _sendable(request: router_pb2.GenerateRequest) -> router_pb2.GenerateRequest:
    size = request.ByteSize()
    if size > MESSAGE_BYTES:
        raise InvalidRequestError(
            f"prompt: the request has {size:,} bytes, more than the {MESSAGE_BYTES:,} of one message",
            code="INVALID_ARGUMENT",
        )
    return request


def _sampling(options: SamplingOptions) -> common_pb2.SamplingParams:
    sampling = common_pb2.SamplingParams()
    for name, value in options.items():
        if value is None:
            continue
        if name == "stop":
            stops = [value] if isinstance(value, str | bytes) else list(value)  # type: ignore[call-overload]
            encoded = [_utf8(stop, f"sampling.stop[{index}]") for index, stop in enumerate(stops)]
            _extend(sampling.stop, encoded, "sampling.stop")
        elif name == "stop_token_ids":
            _extend(sampling.stop_token_ids, value, "sampling.stop_token_ids")
        elif name == "logit_bias":
            _bias(sampling, value)
        elif name in SamplingOptions.__annotations__:
            _set(sampling, name, value, f"sampling.{name}")
        else:
            raise TypeError(
                f"unknown sampling option {name!r}; known: {', '.join(SamplingOptions.__annotations__)}"
            )
    return sampling


def _bias(sampling: common_pb2.SamplingParams, bias: Any) -> None:
    for token_id, value in dict(bias).items():
        try:
            sampling.logit_bias[token_id] = value
        except (TypeError, ValueError) as error:
            raise _refused(f"sampling.logit_bias[{token_id!r}]", error) from None


def _set(message: Any, field: str, value: object, path: str | None = None) -> None:
    try:
        setattr(message, field, value)
    except (TypeError, ValueError) as error:
        raise _refused(path or field, error) from None


def _extend(field: Any, values: Any, path: str) -> None:
    values = list(values)
    try:
        field.extend(values)
    except (TypeError, ValueError):
        for index, value in enumerate(values):  # once more, to name the bad one
            try:
                field.append(value)
            except (TypeError, ValueError) as error:
                raise _refused(f"{path}[{index}]", error) from None


def _utf8(text: str | bytes, path: str) -> bytes:
    try:
        return text if isinstance(text, bytes) else text.encode()
    except UnicodeEncodeError as error:
        raise _refused(path, error) from None


def _mode(mode: TransferMode | str | None) -> common_pb2.TransferMode.ValueType:
    try:
        return MODES[mode if mode is None else TransferMode(mode)]
    except ValueError as error:
        raise _refused("transfer_mode", error) from None


def _refused(path: str, error: Exception) -> InvalidRequestError:
    return InvalidRequestError(f"{path}: {error}", code="INVALID_ARGUMENT")
