"""OpenTelemetry traces: one for each request, across router, machines and KV daemons.

Off unless ``telemetry.traces_endpoint`` is set: then nothing of OpenTelemetry is imported, and a
span costs one comparison. Spans travel as W3C ``traceparent`` values: from the client in gRPC
metadata or an HTTP header, on in ``StartPrompt``, ``StartToken``, ``Reserve`` and ``GrantRequest``.
Every span is explained in ``docs/telemetry.md``. Attributes are ids, sizes, times and words of
ours, never prompts, outputs or other people's text.
"""

from __future__ import annotations

import sys
import time
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Protocol

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry import trace

    from splitwise.config import TelemetrySettings

HEADER = "traceparent"
EXPORT_EVERY_MS = 1000
EXPORT_TIMEOUT_S = 5
MAX_QUEUED_SPANS = 8192  # beyond it spans are dropped: tracing never holds up a request

Value = str | int | float | bool


class Span(Protocol):
    """A piece of a request's way with a beginning and an end."""

    @property
    def traceparent(self) -> str:
        """What a child of this span names as its parent; empty when there is no trace."""

    def set(self, **attributes: Value) -> None:
        """Add attributes, each under ``splitwise.<name>``."""

    def event(self, name: str, **attributes: Value) -> None:
        """Note something that happened now."""

    def end(self, error: str = "", at: float | None = None) -> None:
        """End it, once; later calls do nothing. `error`: a word for what went wrong; `at`: monotonic."""


class _Silent:
    """A span that is not recorded: this process traces nothing, but passes its parent on."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str) -> None:
        self.traceparent = traceparent

    def set(self, **attributes: Value) -> None:
        pass

    def event(self, name: str, **attributes: Value) -> None:
        pass

    def end(self, error: str = "", at: float | None = None) -> None:
        pass


class _Recorded:
    """A span of OpenTelemetry's."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        context = span.get_span_context()
        flags = int(context.trace_flags)
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{flags:02x}"

    def set(self, **attributes: Value) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Value) -> None:
        self._span.add_event(name, _named(attributes))

    def end(self, error: str = "", at: float | None = None) -> None:
        if not self._span.is_recording():
            return
        if error:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if at is None else _wall_ns(at))


NO_SPAN: Span = _Silent("")
_tracer: trace.Tracer | None = None
_incoming: ContextVar[str] = ContextVar("splitwise-traceparent", default="")


@contextmanager
def tracing(settings: TelemetrySettings, *, service: str, name: str) -> Iterator[None]:
    """Record this process's spans while the block runs, and send what is left at its end.

    Raises `ConfigError` when they are wanted and the extra ``otel`` is not installed.
    """
    global _tracer
    if settings.traces_endpoint is None:
        yield
        return
    try:
        provider = _provider(settings, service, name)
    except ImportError as error:
        raise ConfigError(
            f"telemetry.traces_endpoint: traces need the extra otel ({error}): pip install 'splitwise[otel]'"
        ) from error
    _tracer = provider.get_tracer("splitwise", version("splitwise"))
    try:
        yield
    finally:
        _tracer = None
        provider.shutdown()


def _provider(settings: TelemetrySettings, service: str, name: str) -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    resource = Resource.create(
        {
            "service.namespace": "splitwise",
            "service.name": f"splitwise-{service}",
            "service.instance.id": name,
            "service.version": version("splitwise"),
        }
    )
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(settings.traces_ratio)),
        resource=resource,
        shutdown_on_exit=False,
    )
    exporter = OTLPSpanExporter(settings.traces_endpoint, timeout=EXPORT_TIMEOUT_S)
    processor = BatchSpanProcessor(
        exporter, max_queue_size=MAX_QUEUED_SPANS, schedule_delay_millis=EXPORT_EVERY_MS
    )
    provider.add_span_processor(processor)
    return provider


def on() -> bool:
    """Whether this process records spans."""
    return _tracer is not None


def start_span(
    name: str, parent: str, *, root: bool = False, at: float | None = None, **attributes: Value
) -> Span:
    """Begin a span now, or at the monotonic time `at`, below the span that `parent` names.

    Without a valid `parent` there is a span only with `root`: it then begins a trace.
    """
    if _tracer is None:
        return _Silent(parent) if parent else NO_SPAN
    from opentelemetry import trace
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    context = TraceContextTextMapPropagator().extract({HEADER: parent} if parent else {})
    if not root and not trace.get_current_span(context).get_span_context().is_valid:
        return NO_SPAN
    start = None if at is None else _wall_ns(at)
    kind = trace.SpanKind.SERVER if root else trace.SpanKind.INTERNAL
    return _Recorded(_tracer.start_span(name, context, kind, _named(attributes), start_time=start))


def accept(headers: Iterable[tuple[str, str | bytes]]) -> None:
    """Remember the ``traceparent`` among a call's metadata or headers for `incoming`, in this task."""
    if _tracer is None:
        return
    found = next((value for name, value in headers if name.lower() == HEADER), "")
    _incoming.set(found if isinstance(found, str) else found.decode("ascii", "replace"))


def incoming() -> str:
    """Return the client's ``traceparent`` of the call that this task serves; empty without one."""
    return _incoming.get()


def current() -> tuple[tuple[str, str], ...]:
    """Return the metadata that names the caller's own span, for clients; empty where it has none.

    A program that has not imported OpenTelemetry has no span, and is not made to import it.
    """
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return ((HEADER, carrier[HEADER]),) if HEADER in carrier else ()


def _named(attributes: dict[str, Value]) -> dict[str, Value]:
    return {f"splitwise.{name}": value for name, value in attributes.items()}


def _wall_ns(moment: float) -> int:
    """Turn a moment of the monotonic clock into nanoseconds of the wall clock."""
    return time.time_ns() - round((time.monotonic() - moment) * 1e9)
