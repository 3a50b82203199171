"""Every exception that users of the library meet, and the exit codes of its processes.

The remote ones follow gRPC's status codes (the table is in `splitwise.rpc.status`), so that
``except`` clauses read as what happened and not as a number.
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of every process and command. systemd must not restart `CONFIG`."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 69  # sysexits.h EX_UNAVAILABLE: the cluster cannot be reached or is overloaded
    CONFIG = 78  # sysexits.h EX_CONFIG: starting again will not help
    INTERRUPTED = 130


class SplitwiseError(Exception):
    """Base of all errors of this library."""


class ConfigError(SplitwiseError):
    """A setting is unknown, malformed or does not fit another; names where it was read."""


class ListenError(SplitwiseError):
    """An address cannot be listened on: in use (which may pass), or not this host's."""


class NotRunningError(SplitwiseError):
    """No running cluster was found and no address was given."""


class RemoteError(SplitwiseError):
    """A call failed at the other end or on the way.

    `code` is the gRPC status name; `retry_after` is in seconds and is set when the server
    said when a retry is worth it.
    """

    def __init__(self, message: str, *, code: str = "UNKNOWN", retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retry_after = retry_after


class InvalidRequestError(RemoteError):
    """The request is refused for good; the message names the field (INVALID_ARGUMENT, OUT_OF_RANGE)."""


class NotFoundError(RemoteError):
    """The model, machine or request is not known (NOT_FOUND)."""


class AlreadyExistsError(RemoteError):
    """The name is in use by another (ALREADY_EXISTS)."""


class PreconditionError(RemoteError):
    """The other side's state does not allow it, such as another KV layout (FAILED_PRECONDITION)."""


class StaleError(RemoteError):
    """A newer incarnation or generation is known (ABORTED)."""


class AuthenticationError(RemoteError):
    """No or wrong credentials (UNAUTHENTICATED)."""


class NotAllowedError(RemoteError):
    """The credentials do not allow this call (PERMISSION_DENIED)."""


class OverloadedError(RemoteError):
    """The queue is full; nothing was started (RESOURCE_EXHAUSTED). See `retry_after`."""


class UnavailableError(RemoteError):
    """No machine can serve it, or the connection is lost (UNAVAILABLE). See `retry_after`."""


class DeadlineError(RemoteError):
    """The deadline passed (DEADLINE_EXCEEDED)."""


class CancelledError(RemoteError):
    """The call was cancelled (CANCELLED)."""


class DataLossError(RemoteError):
    """The KV cache did not verify and could not be made again (DATA_LOSS)."""


class UnsupportedError(RemoteError):
    """The other side does not offer this (UNIMPLEMENTED)."""


class ServerError(RemoteError):
    """The other side failed (INTERNAL, UNKNOWN)."""
