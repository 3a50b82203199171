"""Taking HTTP requests in: who may call, how large and how slow a body may be."""

from __future__ import annotations

import asyncio
import hmac
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiohttp import web

from services.router.gateway.refusals import Refusal

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(slots=True)
class GatewayOptions:
    """Bounds of the gateway; what is changed counts from the next request on.

    `api_keys`: empty lets everybody in.
    """

    api_keys: Sequence[str] = field(default=(), repr=False)
    body_bytes: int = 16 * 1024 * 1024
    body_s: float = 30.0  # a body must be complete within this time
    stall_s: float = 60.0  # a stream whose client takes no data for so long is given up
    drain_s: float = 120.0  # how long open answers may go on after the gateway was told to stop


async def read_body(request: web.Request, options: GatewayOptions) -> bytes:
    """Return the body of a JSON request; raises a `Refusal`."""
    if request.content_type not in ("application/json", "application/octet-stream"):
        problem = f"Content-Type {request.content_type!r} is not served; send application/json"
        raise Refusal(415, problem, code="unsupported_media_type")
    if (request.content_length or 0) > options.body_bytes:
        raise too_large(options)
    try:
        async with asyncio.timeout(options.body_s):
            return await request.read()
    except TimeoutError:
        problem = f"the body did not arrive within {options.body_s:g} s"
        raise Refusal(408, problem, code="timeout", headers={"Connection": "close"}) from None
    except web.HTTPRequestEntityTooLarge:
        raise too_large(options) from None
    except (web.RequestPayloadError, ValueError) as error:  # cut short, or a broken encoding
        raise Refusal(400, "the body could not be read", headers={"Connection": "close"}) from error


def too_large(options: GatewayOptions) -> Refusal:
    """Return the refusal of a body over the bound; the rest of it is not read."""
    problem = f"the body is larger than {options.body_bytes} bytes"
    return Refusal(413, problem, code="request_too_large", headers={"Connection": "close"})


def check_key(request: web.Request, options: GatewayOptions) -> None:
    """Raise a `Refusal` (401) unless the request carries one of the keys."""
    if not options.api_keys:
        return
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    given_bytes = given.strip().encode(errors="surrogateescape")
    # Every key is compared, in constant time, whichever matches.
    matches = [hmac.compare_digest(given_bytes, key.encode()) for key in options.api_keys]
    if scheme.lower() == "bearer" and any(matches):
        return
    problem = "wrong API key" if given else "no API key: send Authorization: Bearer KEY"
    headers = {"WWW-Authenticate": "Bearer"}
    raise Refusal(401, problem, code="invalid_api_key", headers=headers)
