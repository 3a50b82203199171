"""Tracing without processes: off it is nothing at all, on it follows its parent."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from splitwise.config import TelemetrySettings
from splitwise.errors import ConfigError
from splitwise.telemetry import tracing
from splitwise.telemetry.tracing import NO_SPAN, start_span

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    """Keeps the spans that end while the test runs."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(tracing, "_tracer", provider.get_tracer("test"))
    return exporter


def test_off_nothing_is_imported_and_a_span_is_nothing() -> None:
    code = (
        "import sys; from splitwise.telemetry import tracing; import services.router.service;"
        "assert tracing.start_span('request', '', root=True) is tracing.NO_SPAN;"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_off_a_parent_is_passed_on_so_that_the_chain_holds() -> None:
    span = start_span("prompt phase", PARENT)
    span.set(a=1)
    span.event("first token")
    span.end(error="engine")
    assert span.traceparent == PARENT
    assert NO_SPAN.traceparent == ""


def test_off_a_clients_parent_is_not_looked_at() -> None:
    tracing.accept([("traceparent", PARENT)])
    assert tracing.incoming() == ""


def test_on_a_child_names_its_parent_and_is_named_by_its_own(recorded: InMemorySpanExporter) -> None:
    outer = start_span("attempt", PARENT, attempt=1)
    inner = start_span("prompt phase", outer.traceparent)
    inner.end()
    outer.end(error="machine:lost")
    child, parent = recorded.get_finished_spans()
    assert child.parent is not None
    assert parent.parent is not None
    assert child.parent.span_id == parent.context.span_id
    assert f"{parent.parent.span_id:016x}" in PARENT
    assert f"{child.context.trace_id:032x}" in PARENT
    assert parent.attributes == {"splitwise.attempt": 1}
    assert parent.status.description == "machine:lost"


@pytest.mark.parametrize(
    "parent", ["", "nonsense", "00-" + "0" * 32 + "-b7ad6b7169203331-01", "ff" + PARENT[2:]]
)
def test_on_only_a_root_begins_a_trace(recorded: InMemorySpanExporter, parent: str) -> None:
    assert start_span("prompt phase", parent) is NO_SPAN
    root = start_span("request", parent, root=True)
    assert len(root.traceparent) == len(PARENT)
    root.end()
    [span] = recorded.get_finished_spans()
    assert span.parent is None


def test_a_span_ends_once_and_takes_moments_of_the_monotonic_clock(recorded: InMemorySpanExporter) -> None:
    now = time.monotonic()
    span = start_span("KV push", PARENT, at=now - 2.0)
    span.end(at=now - 1.0)
    span.end(error="late")
    [ended] = recorded.get_finished_spans()
    assert ended.start_time is not None
    assert ended.end_time is not None
    assert abs(ended.end_time - ended.start_time - 1e9) < 5e7  # two readings of two clocks
    assert ended.status.description is None


def test_headers_are_found_whatever_their_case_and_type(recorded: InMemorySpanExporter) -> None:
    tracing.accept([("Other", "x"), ("TraceParent", PARENT)])
    assert tracing.incoming() == PARENT
    tracing.accept([("traceparent", PARENT.encode())])
    assert tracing.incoming() == PARENT
    tracing.accept([("other", "x")])
    assert tracing.incoming() == ""


def test_wanted_without_the_extra_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    settings = TelemetrySettings(traces_endpoint="http://127.0.0.1:4317")
    with (
        pytest.raises(ConfigError, match=r"splitwise\[otel\]"),
        tracing.tracing(settings, service="router", name="r"),
    ):
        pass


def test_a_client_names_its_callers_span_and_has_none_without_one() -> None:
    assert tracing.current() == ()
    provider = TracerProvider(shutdown_on_exit=False)
    with provider.get_tracer("caller").start_as_current_span("page") as page:
        [(name, value)] = tracing.current()
    assert name == "traceparent"
    assert f"{page.get_span_context().span_id:016x}" in value


@pytest.mark.parametrize("bad", ["127.0.0.1:4317", "ftp://host:4317", "http://host:4317/path"])
def test_an_endpoint_that_is_none_is_refused(bad: str) -> None:
    with pytest.raises(ValidationError, match="traces_endpoint"):
        TelemetrySettings(traces_endpoint=bad)
