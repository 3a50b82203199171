"""gRPC status codes and our exceptions: one table, read in both directions.

A server ends a call with `abort`, a client turns what it caught into an exception with
`to_exception`; ``retry-after-ms`` travels in the trailing metadata.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

import grpc
import grpc.aio

from splitwise import errors

if TYPE_CHECKING:
    from collections.abc import Iterable


RETRY_AFTER = "retry-after-ms"

# Status to exception. Where two codes share an exception, `CODES` below holds the first.
EXCEPTIONS: dict[grpc.StatusCode, type[errors.RemoteError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequestError,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyExistsError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.PreconditionError,
    grpc.StatusCode.ABORTED: errors.StaleError,
    grpc.StatusCode.UNAUTHENTICATED: errors.AuthenticationError,
    grpc.StatusCode.PERMISSION_DENIED: errors.NotAllowedError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.OverloadedError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineError,
    grpc.StatusCode.CANCELLED: errors.CancelledError,
    grpc.StatusCode.DATA_LOSS: errors.DataLossError,
    grpc.StatusCode.UNIMPLEMENTED: errors.UnsupportedError,
    grpc.StatusCode.INTERNAL: errors.ServerError,
    grpc.StatusCode.UNKNOWN: errors.ServerError,
}
CODES: dict[type[errors.RemoteError], grpc.StatusCode] = {
    exception: code for code, exception in reversed(EXCEPTIONS.items())
}

# What gRPC says of a connection that was not made, and what it means where TLS is set. A server
# that refuses a caller's certificate tells nothing (TLS 1.3): the caller sees only the end.
NOT_CONNECTED = "failed to connect"
REMEDIES: dict[str, str] = {
    "Hostname Verification Check failed": "the peer's certificate is for another role",
    "CERTIFICATE_VERIFY_FAILED": "the peer's certificate does not verify with our tls.ca",
    "WRONG_VERSION_NUMBER": "the peer does not speak TLS",
    "Socket closed": "where it has TLS, it takes only certificates of its own tls.ca",
    "Connection reset by peer": "where it has TLS, it takes only certificates of its own tls.ca",
}


def to_exception(error: grpc.RpcError) -> errors.RemoteError:
    """Return our exception for a failed call, sync or asyncio."""
    call: Any = error  # both kinds of RpcError that are raised are calls as well
    code = call.code() if hasattr(call, "code") else grpc.StatusCode.UNKNOWN
    details = (call.details() if hasattr(call, "details") else "") or str(error)
    if NOT_CONNECTED in details:
        means = next((remedy for sign, remedy in REMEDIES.items() if sign in details), "")
        details += f" ({means}; see docs/security.md)" if means else ""
    metadata = (call.trailing_metadata() if hasattr(call, "trailing_metadata") else ()) or ()
    kind = EXCEPTIONS.get(code, errors.ServerError)
    return kind(details, code=code.name, retry_after=retry_after(metadata))


def retry_after(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Read ``retry-after-ms`` as seconds; None when absent or not a number >= 0."""
    for key, value in metadata:
        if key == RETRY_AFTER:
            text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
            return int(text) / 1000 if text.isascii() and text.isdigit() else None
    return None


def status_of(error: errors.RemoteError) -> grpc.StatusCode:
    """Return the status that stands for `error`: the named one, else its class's."""
    named = getattr(grpc.StatusCode, error.code, None)
    if isinstance(named, grpc.StatusCode) and isinstance(error, EXCEPTIONS.get(named, ())):
        return named
    kinds = (kind for kind in type(error).__mro__ if kind in CODES)
    return CODES.get(next(kinds, errors.ServerError), grpc.StatusCode.UNKNOWN)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: errors.RemoteError) -> NoReturn:
    """End the call on a server with the status, message and retry delay of `error`."""
    metadata: tuple[tuple[str, str], ...] = ()
    if error.retry_after is not None:
        metadata = ((RETRY_AFTER, str(max(0, round(error.retry_after * 1000)))),)
    await context.abort(status_of(error), error.message, metadata)
    raise AssertionError("abort returned")
