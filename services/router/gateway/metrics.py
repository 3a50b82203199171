"""The gateway's own metrics; what happens to requests is measured in the router."""

from __future__ import annotations

from prometheus_client import Counter, Gauge

REQUESTS = Counter(
    "splitwise_gateway_requests_total",
    "HTTP requests answered, by route and status; status 499: the client went away first.",
    ("route", "status"),
)
STREAMS = Gauge("splitwise_gateway_streams_open", "Answers that are being streamed now.")
FAILED_STREAMS = Counter(
    "splitwise_gateway_streams_failed_total",
    "Streams that ended in an error event, by error code.",
    ("code",),
)
STALLED_STREAMS = Counter(
    "splitwise_gateway_streams_stalled_total",
    "Streams given up because the client took no data.",
)
