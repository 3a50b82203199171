"""Errors as OpenAI clients expect them: an HTTP status and an ``error`` object with `param`.

Statuses follow what the official client acts on: it retries 408, 409, 429 and 5xx and waits
as long as ``retry-after-ms`` or ``Retry-After`` says. Input at fault is 4xx, never 5xx.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from splitwise import errors
from splitwise.requests import FieldError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

INVALID = "invalid_request_error"
SERVER = "server_error"


class Refusal(Exception):  # noqa: N818 - what the client is told, not a fault of ours
    """An HTTP answer that is not a success."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> str:
        """Return the JSON body; also the data of an SSE error event."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error})


def invalid(param: str | None, problem: str) -> Refusal:
    """Return the refusal of one field."""
    return Refusal(400, f"{param}: {problem}" if param else problem, param=param)


def from_validation(error: ValidationError) -> Refusal:
    """Name the first field that does not fit; the input itself is never repeated."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return invalid(None, f"the body is not valid JSON: {first['msg'].removeprefix('Invalid JSON: ')}")
    if not first["loc"]:
        return invalid(None, "the body must be a JSON object")
    return invalid(_path(first), first["msg"].removeprefix("Value error, "))


def _path(error: ErrorDetails) -> str:
    text = ""
    for part in error["loc"]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]":
            text += f".{part}" if text else part
    return text


@dataclass(frozen=True, slots=True)
class ParamNames:
    """How this client named what the protocol names otherwise."""

    prompt: str = "prompt"
    sampling: Mapping[str, str] = field(default_factory=dict)

    def translate(self, path: str) -> str:
        """Turn a field's path in `GenerateRequest` into the client's."""
        for ours, theirs in (
            ("chat.messages", "messages"),
            ("token_ids.ids", self.prompt),
            ("token_ids", self.prompt),
            ("text", self.prompt),
            ("chat", "messages"),
            ("client_request_id", "x-request-id"),
        ):
            if path == ours or path.startswith((f"{ours}[", f"{ours}.")):
                return theirs + path[len(ours) :]
        path = path.removeprefix("sampling.")
        name = path.partition("[")[0]
        return self.sampling.get(name, name) + path[len(name) :]


def from_error(error: errors.RemoteError, names: ParamNames | None = None) -> Refusal:
    """Return what the client is told for one of the router's exceptions."""
    names = names or ParamNames()
    if isinstance(error, FieldError):
        return invalid(names.translate(error.field), error.message.removeprefix(f"{error.field}: "))
    path, found, problem = error.message.partition(": ")
    if isinstance(error, errors.InvalidRequestError) and found and path.startswith("sampling."):
        return invalid(names.translate(path), problem)  # an engine's own refusal
    for kind, (status, label, code) in _STATUSES.items():
        if isinstance(error, kind):
            param = "model" if code == "model_not_found" else None
            return Refusal(
                status, error.message, kind=label, param=param, code=code, headers=_retry(status, error)
            )
    return Refusal(500, error.message, kind=SERVER, code="internal_error")


_STATUSES: dict[type[errors.RemoteError], tuple[int, str, str | None]] = {
    errors.InvalidRequestError: (400, INVALID, None),
    errors.NotFoundError: (404, INVALID, "model_not_found"),
    errors.AuthenticationError: (401, INVALID, "invalid_api_key"),
    errors.NotAllowedError: (403, INVALID, "not_allowed"),
    errors.OverloadedError: (429, "rate_limit_error", "overloaded"),
    errors.UnavailableError: (503, SERVER, "unavailable"),
    errors.PreconditionError: (503, SERVER, "unavailable"),
    errors.StaleError: (503, SERVER, "unavailable"),
    errors.CancelledError: (503, SERVER, "cancelled"),
    errors.DeadlineError: (504, SERVER, "timeout"),
    errors.UnsupportedError: (501, SERVER, "unsupported"),
    errors.DataLossError: (500, SERVER, "data_loss"),
}


def _retry(status: int, error: errors.RemoteError) -> dict[str, str]:
    """Say when to try again; whole seconds are all that ``Retry-After`` can say."""
    if status not in (429, 503):
        return {}
    seconds = 1.0 if error.retry_after is None else max(0.0, error.retry_after)
    return {"Retry-After": str(max(1, math.ceil(seconds))), "retry-after-ms": str(round(seconds * 1000))}
