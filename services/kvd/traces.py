"""The source's spans of one transfer, made when it is over: nothing is traced while bytes move."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.kvd.metrics import MODES
from splitwise.telemetry.tracing import start_span

if TYPE_CHECKING:
    from services.kvd.sources import SourceSide
    from splitwise.kv.source import Release


def trace_push(side: SourceSide, end: Release) -> None:
    """Record the push below the destination's span, and below it the hand-over."""
    stats, began = side.stats, side.first_put or side.granted_at
    push = start_span(
        "KV push",
        side.traceparent,
        at=began,
        transfer=str(side.key),
        bytes=stats.bytes,
        blocks=stats.blocks,
        blocks_skipped=stats.blocks_skipped,
        puts=stats.puts,
        mode=MODES.get(stats.mode, "unknown"),
        transport=stats.transport,
        hidden_us=max(0, stats.push_us - stats.exposed_us),
        exposed_us=stats.exposed_us,
        granted_us=round((began - side.granted_at) * 1e6),
    )
    if not end.delivered:
        push.end(error=side.transfer.state.value)
        return
    if side.token_at is not None:
        start_span("hand-over", push.traceparent, at=side.token_at).end()
    push.end(at=max(began, side.last_put))
