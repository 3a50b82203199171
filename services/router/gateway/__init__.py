"""The OpenAI-compatible HTTP gateway: JSON bodies to `GenerateRequest`, answers back as JSON or SSE."""

from services.router.gateway.app import ExtraRoutes
from services.router.gateway.backend import GatewayBackend
from services.router.gateway.server import Gateway, GatewayOptions, read_api_keys, serve_gateway

__all__ = ["ExtraRoutes", "Gateway", "GatewayBackend", "GatewayOptions", "read_api_keys", "serve_gateway"]
