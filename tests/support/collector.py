"""An OpenTelemetry collector that keeps what it is sent: the real service, in this process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

PATIENCE = 60.0


@dataclass(frozen=True)
class ReceivedSpan:
    """One span. Ids are hexadecimal; `events` are (name, attributes)."""

    name: str
    service: str
    instance: str
    trace_id: str
    span_id: str
    parent_id: str
    began_ns: int
    ended_ns: int
    error: str
    attributes: dict[str, Any] = field(default_factory=dict)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)


class Collector(TraceServiceServicer):
    """Takes spans. `raw` is every message as it came over the wire."""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.raw: list[bytes] = []
        self.address = ""
        self._came = asyncio.Event()

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        del context
        self.raw.append(request.SerializeToString())
        for resource_spans in request.resource_spans:
            resource = _values(resource_spans.resource.attributes)
            for scope in resource_spans.scope_spans:
                self.spans.extend(_span(span, resource) for span in scope.spans)
        self._came.set()
        return pb.ExportTraceServiceResponse()

    async def until(self, condition: Callable[[list[ReceivedSpan]], Any]) -> list[ReceivedSpan]:
        """Wait until the spans so far meet a condition; returns them."""
        async with asyncio.timeout(PATIENCE):
            while not condition(self.spans):
                self._came.clear()
                await self._came.wait()
        return list(self.spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]


def _span(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        service=resource["service.name"],
        instance=resource["service.instance.id"],
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began_ns=span.start_time_unix_nano,
        ended_ns=span.end_time_unix_nano,
        error=span.status.message if span.status.code == span.status.STATUS_CODE_ERROR else "",
        attributes=_values(span.attributes),
        events=[(event.name, _values(event.attributes)) for event in span.events],
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    """Listen on a free port while the block runs."""
    collector = Collector()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0)
