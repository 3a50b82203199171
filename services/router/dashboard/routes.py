"""The dashboard's HTTP routes: a page of three static files and two JSON endpoints."""

from __future__ import annotations

import json
import time
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Protocol

from aiohttp import hdrs, web

from services.router.dashboard.state import cluster_state, explanation_state
from services.router.gateway.app import ExtraRoutes
from services.router.gateway.refusals import Refusal
from splitwise.config import SloSettings
from splitwise.errors import NotFoundError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from services.router.dashboard.recent import RecentRequests, RequestRecord
    from splitwise.rpc.v1.router_pb2 import ClusterDescription, Explanation

PAGE_FILES = {
    "/dashboard": ("page.html", "text/html"),
    "/dashboard/page.css": ("page.css", "text/css"),
    "/dashboard/page.js": ("page.js", "text/javascript"),
    "/dashboard/timeline.js": ("timeline.js", "text/javascript"),
}
HEADERS = {
    # Names come from machines: even if one were taken for HTML, nothing in it could run or load.
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self';"
    " img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
WINDOW_S = 120.0
SHOWN = 600
FRESH_S = 0.5
"""A state is made at most so often, however many pages look at it."""


class DashboardSource(Protocol):
    """What the dashboard needs of the router."""

    def cluster(self) -> ClusterDescription:
        """Return the cluster as it is now."""

    def explain(self, request_id: str) -> Explanation:
        """Return why a request ran where it ran; raises `NotFoundError`."""

    @property
    def recent(self) -> RecentRequests:
        """The requests that are over."""

    def running(self) -> Iterable[RequestRecord]:
        """Return the requests that have a machine and are not over."""


def dashboard_routes(
    source: DashboardSource, targets: Callable[[], SloSettings] = SloSettings
) -> ExtraRoutes:
    """Return the routes for `serve_gateway`. The page itself needs no key; what it shows does.

    `targets` returns what latencies are measured against, as it is now.
    """
    handlers = _Handlers(source, targets)
    routes = [
        *[web.get(path, _static(name, kind)) for path, (name, kind) in PAGE_FILES.items()],
        web.get("/", _to_the_page),
        web.get("/dashboard/state", handlers.state),
        web.get("/dashboard/requests/{request_id}", handlers.request),
    ]
    return ExtraRoutes(routes, frozenset({"/", *PAGE_FILES}))


async def _to_the_page(_request: web.Request) -> web.Response:
    return web.Response(status=302, headers={hdrs.LOCATION: "/dashboard"})


class _Handlers:
    def __init__(self, source: DashboardSource, targets: Callable[[], SloSettings]) -> None:
        self._source = source
        self._targets = targets
        self._began = time.monotonic()
        self._made_at = -FRESH_S
        self._text = ""

    async def state(self, _request: web.Request) -> web.Response:
        now = time.monotonic()
        if now - self._made_at >= FRESH_S:
            self._text = json.dumps(self._state())
            self._made_at = now
        return web.json_response(text=self._text, headers=HEADERS)

    def _state(self) -> dict[str, Any]:
        window_s = min(WINDOW_S, max(1.0, time.monotonic() - self._began))  # a young router has less to show
        return cluster_state(
            self._source.cluster(),
            self._source.recent.within(WINDOW_S),
            self._source.running(),
            window_s=window_s,
            shown=SHOWN,
            targets=self._targets(),
        )

    async def request(self, request: web.Request) -> web.Response:
        try:
            explanation = self._source.explain(request.match_info["request_id"])
        except NotFoundError as error:
            raise Refusal(404, error.message, code="unknown_request") from error
        return web.json_response(explanation_state(explanation), headers=HEADERS)


def _static(name: str, kind: str) -> Any:
    text = (files("services.router.dashboard") / name).read_text()

    async def serve(_request: web.Request) -> web.Response:
        return web.Response(text=text, content_type=kind, charset="utf-8", headers=HEADERS)

    return serve
