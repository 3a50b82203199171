"""Logs, metrics and traces: one set-up for every process."""

from splitwise.telemetry.logs import configure_logs, get_logger, set_log_level
from splitwise.telemetry.metrics import (
    REGISTRY,
    TOKEN_BUCKETS,
    TRANSFER_BUCKETS,
    WAIT_BUCKETS,
    identify_process,
    serve_metrics,
)

__all__ = [
    "REGISTRY",
    "TOKEN_BUCKETS",
    "TRANSFER_BUCKETS",
    "WAIT_BUCKETS",
    "configure_logs",
    "get_logger",
    "identify_process",
    "serve_metrics",
    "set_log_level",
]
