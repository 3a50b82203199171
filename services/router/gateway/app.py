"""All routes of the gateway, and the frame around them: keys, errors, counting."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING

from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from services.router.gateway.bodies import DetokenizeBody, TokenizeBody
from services.router.gateway.generation import GenerationRoutes
from services.router.gateway.metrics import REQUESTS
from services.router.gateway.refusals import ParamNames, Refusal, from_error
from services.router.gateway.requests import check_key, read_body
from services.router.gateway.translate import parse, tokenize_request
from splitwise.errors import NotFoundError, RemoteError
from splitwise.telemetry import get_logger, tracing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from aiohttp.typedefs import Middleware

    from services.router.gateway.backend import GatewayBackend
    from services.router.gateway.requests import GatewayOptions
    from splitwise.rpc.v1.router_pb2 import ModelDescription

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Answered without a key: they say nothing about requests, and probes have no keys.
OPEN_PATHS = frozenset({"/health", "/metrics", "/version"})


@dataclass(frozen=True, slots=True)
class ExtraRoutes:
    """Routes of another part (the dashboard) in the same frame. `open_paths` need no key."""

    routes: Sequence[web.RouteDef] = ()
    open_paths: frozenset[str] = frozenset()


def make_app(
    backend: GatewayBackend, options: GatewayOptions, extra: ExtraRoutes | None = None
) -> web.Application:
    """Return the application with all its routes."""
    extra = extra or ExtraRoutes()
    frame = _frame(options, OPEN_PATHS | extra.open_paths)
    app = web.Application(client_max_size=options.body_bytes, middlewares=[frame])
    generation = GenerationRoutes(backend, options)
    plain = PlainRoutes(backend, options)
    app.add_routes(
        [
            web.post("/v1/completions", generation.completions),
            web.post("/v1/chat/completions", generation.chat_completions),
            web.get("/v1/models", plain.models),
            web.get("/v1/models/{name:.+}", plain.model),
            web.post("/tokenize", plain.tokenize),
            web.post("/detokenize", plain.detokenize),
            web.get("/health", plain.health),
            web.get("/metrics", plain.metrics),
            web.get("/version", plain.version),
            *extra.routes,
        ]
    )
    return app


class PlainRoutes:
    """Everything that answers at once."""

    def __init__(self, backend: GatewayBackend, options: GatewayOptions) -> None:
        self._backend = backend
        self._options = options

    async def models(self, _request: web.Request) -> web.Response:
        """List the models, in OpenAI's form."""
        models = [_model(model) for model in self._backend.list_models()]
        return web.json_response({"object": "list", "data": models})

    async def model(self, request: web.Request) -> web.Response:
        """Describe one model."""
        name = request.match_info["name"]
        for model in self._backend.list_models():
            if model.name == name:
                return web.json_response(_model(model))
        raise NotFoundError(f"the model {name!r} does not exist", code="NOT_FOUND")

    async def tokenize(self, request: web.Request) -> web.Response:
        """Count and name the tokens of a prompt or a chat."""
        wanted = tokenize_request(parse(TokenizeBody, await read_body(request, self._options)))
        tokens = await self._backend.tokenize(wanted)
        longest = [m.max_model_len for m in self._backend.list_models() if wanted.model in ("", m.name)]
        body = {"count": len(tokens), "max_model_len": longest[0] if longest else None, "tokens": tokens}
        return web.json_response(body)

    async def detokenize(self, request: web.Request) -> web.Response:
        """Return the text of token ids."""
        body = parse(DetokenizeBody, await read_body(request, self._options))
        try:
            prompt = await self._backend.detokenize(body.model or "", body.tokens)
        except RemoteError as error:
            raise from_error(error, ParamNames(prompt="tokens")) from error
        return web.json_response({"prompt": prompt})

    async def health(self, _request: web.Request) -> web.Response:
        """Return 200 while new requests are taken, else 503."""
        if self._backend.serving():
            return web.json_response({"status": "serving"})
        return web.json_response({"status": "not serving"}, status=503, headers={"Retry-After": "1"})

    async def metrics(self, _request: web.Request) -> web.Response:
        """Return this process's metrics for Prometheus."""
        return web.Response(body=generate_latest(REGISTRY), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE_LATEST})

    async def version(self, _request: web.Request) -> web.Response:
        """Return the version of Splitwise."""
        return web.json_response({"version": version("splitwise")})


def _model(model: ModelDescription) -> dict[str, object]:
    return {
        "id": model.name,
        "object": "model",
        "created": 0,
        "owned_by": "splitwise",
        "max_model_len": model.max_model_len,
        "serving": model.serving,
    }


def _frame(options: GatewayOptions, open_paths: frozenset[str]) -> Middleware:
    @web.middleware
    async def frame(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = 499
        tracing.accept(request.headers.items())
        try:
            response = await _answer(request, handler, None if request.path in open_paths else options)
            status = response.status
        finally:
            REQUESTS.labels(_route(request), str(status)).inc()
        return response

    return frame


async def _answer(request: web.Request, handler: Handler, guard: GatewayOptions | None) -> web.StreamResponse:
    """Handle the request, after a look at its key with `guard`; whatever is raised becomes an answer."""
    try:
        if guard is not None:
            check_key(request, guard)
        return await handler(request)
    except Refusal as refusal:
        return _error(refusal)
    except RemoteError as error:
        return _error(from_error(error))
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        problem = f"{request.method} is not served at {request.path}; use {allowed}"
        return _error(Refusal(405, problem, code="method_not_allowed", headers={hdrs.ALLOW: allowed}))
    except web.HTTPNotFound:
        return _error(Refusal(404, f"{request.path} is not served", code="unknown_url"))
    except web.HTTPException as error:
        return _error(Refusal(error.status, error.reason))
    except ConnectionError:  # the client is gone; there is nobody to answer
        raise
    except Exception as error:  # noqa: BLE001 - the client is owed an answer
        get_logger().exception("gateway.failed", route=_route(request), error=str(error))
        return _error(Refusal(500, "the gateway failed", kind="server_error", code="internal_error"))


def _error(refusal: Refusal) -> web.Response:
    return web.json_response(
        text=refusal.body(), status=refusal.status, headers=refusal.headers, dumps=json.dumps
    )


def _route(request: web.Request) -> str:
    """Return the route's pattern; never a path that a client made up."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unknown"
