"""Logs and metrics: one set-up for every process."""

from splitwise.telemetry.logs import configure_logs, get_logger
from splitwise.telemetry.metrics import REGISTRY, serve_metrics

__all__ = ["REGISTRY", "configure_logs", "get_logger", "serve_metrics"]
