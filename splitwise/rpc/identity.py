"""Who may call what: the role in a peer's certificate and the methods that it opens.

A certificate's DNS name ``ROLE.splitwise`` says what a process is; addresses say nothing.
Clients check the server's role as its TLS name, servers check the caller's against the
table below. Without TLS there is no check, which is why processes then listen on loopback.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from splitwise.errors import AuthenticationError, NotAllowedError, RemoteError
from splitwise.rpc.status import abort

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Handler = grpc.RpcMethodHandler[Any, Any]
    Context = grpc.aio.ServicerContext[Any, Any]
    _Interceptor = grpc.aio.ServerInterceptor[Any, Any]
else:
    _Interceptor = grpc.aio.ServerInterceptor

SUFFIX = ".splitwise"
FIRST_MESSAGE_S = 5.0
"""How long a caller that is refused may take for the first message of its stream."""


class Role(StrEnum):
    """What a process is in the cluster."""

    ROUTER = "router"
    MACHINE = "machine"
    KVD = "kvd"
    POWER = "power"
    CLIENT = "client"
    OPERATOR = "operator"


# Service or method to the roles that may call it; the longest match counts.
ALLOWED: dict[str, frozenset[Role]] = {
    "/splitwise.v1.Router/": frozenset({Role.CLIENT, Role.OPERATOR}),
    "/splitwise.v1.Router/Register": frozenset({Role.MACHINE}),
    "/splitwise.v1.Router/DrainMachine": frozenset({Role.OPERATOR}),
    "/splitwise.v1.PromptService/": frozenset({Role.ROUTER}),
    "/splitwise.v1.TokenService/": frozenset({Role.ROUTER}),
    "/splitwise.v1.KvdPeer/": frozenset({Role.KVD}),
    # A machine whose transfer nobody waits for any more tells its own node's daemon.
    "/splitwise.v1.KvdPeer/Revoke": frozenset({Role.KVD, Role.MACHINE}),
    "/splitwise.v1.Kvd/": frozenset({Role.MACHINE, Role.OPERATOR}),
    "/splitwise.v1.PowerAgent/": frozenset({Role.MACHINE}),
    "/splitwise.v1.PowerAgent/Describe": frozenset({Role.OPERATOR}),
    "/splitwise.v1.PowerAgent/Suspend": frozenset({Role.OPERATOR}),
    "/grpc.": frozenset(Role),  # health and reflection
}


def server_name(role: Role) -> str:
    """Return the DNS name that a certificate of `role` carries."""
    return f"{role.value}{SUFFIX}"


def allowed_roles(method: str) -> frozenset[Role]:
    """Return who may call `method` (``/package.Service/Method``); nobody, when it is not listed."""
    matches = [prefix for prefix in ALLOWED if method.startswith(prefix)]
    return ALLOWED[max(matches, key=len)] if matches else frozenset()


def peer_roles(context: Context) -> frozenset[Role]:
    """Return the roles in the caller's certificate."""
    # Only DNS names: a URI or an address in the certificate that reads the same is none.
    names = {name.decode("ascii", "replace") for name in context.auth_context().get("peer_dns", ())}
    return frozenset(role for role in Role if server_name(role) in names)


class Guard(_Interceptor):
    """Refuse calls from peers whose certificate does not open the method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Put the check in front of the method's handler."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return _guarded(handler, str(handler_call_details.method))


def refusal(method: str, roles: frozenset[Role]) -> RemoteError | None:
    """Return why a caller with these roles may not call `method`, or None when it may."""
    allowed = allowed_roles(method)
    if roles & allowed:
        return None
    need = " or ".join(sorted(role.value for role in allowed)) or "nobody"
    if not roles:
        return AuthenticationError(f"{method}: the certificate names no role; needs {need}")
    have = ", ".join(sorted(role.value for role in roles))
    return NotAllowedError(f"{method}: the certificate is for {have}; needs {need}")


async def _check(method: str, request: Any, context: Context) -> None:
    refused = refusal(method, peer_roles(context))
    if refused is None:
        return
    if isinstance(request, AsyncIterator):
        # A call that ends while its client still writes gives the client an internal error of
        # grpc's in place of our status: so the first message is read, and ignored.
        with suppress(StopAsyncIteration, TimeoutError):
            await asyncio.wait_for(anext(request), FIRST_MESSAGE_S)
    await abort(context, refused)


def _guarded(handler: Handler, method: str) -> Handler:
    kind = "_".join(
        "stream" if s else "unary" for s in (handler.request_streaming, handler.response_streaming)
    )
    inner = getattr(handler, kind)

    async def one(request: Any, context: Context) -> Any:
        await _check(method, request, context)
        answer = inner(request, context)
        return await answer if inspect.isawaitable(answer) else answer

    async def many(request: Any, context: Context) -> AsyncIterator[Any]:
        await _check(method, request, context)
        answers = inner(request, context)
        if inspect.isawaitable(answers):  # a handler that writes to the context itself
            await answers
            return
        async for answer in answers:
            yield answer

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    guarded: Handler = make(
        many if handler.response_streaming else one,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )
    return guarded
