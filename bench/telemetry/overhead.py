"""What telemetry costs the router for each request, in CPU microseconds of this thread.

    python -m bench.telemetry.overhead [--requests 5000]

Counts what the router does for one request besides serving it: its spans, off, sampled out and
recorded (sent to nowhere by the usual thread), and its metrics. Nothing of it grows with the
number of tokens.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

from services.router import metrics
from services.router.traces import begin_trace
from splitwise.rpc.v1.common_pb2 import TransferStats
from splitwise.rpc.v1.router_pb2 import Finished, Timing
from splitwise.scheduling.decisions import Assign
from splitwise.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

FINISHED = Finished(
    prompt_tokens=1024,
    output_tokens=211,
    timing=Timing(queued_us=900, ttft_us=90_000, second_us=30_000, tbt_mean_us=28_000, e2e_us=6_000_000),
    transfer=TransferStats(bytes=1 << 28, push_us=60_000, exposed_us=4_000),
)
DECISION = Assign("jsq:prompt-pool/token-pool", "0" * 32, 1, "prompt-0", "token-0", 1)


class Nowhere(SpanExporter):
    """Takes spans and forgets them."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Say that all went well."""
        del spans
        return SpanExportResult.SUCCESS


def traced() -> None:
    """Tell a trace all that happens to a request."""
    admitted = SimpleNamespace(
        arrived=time.monotonic(), model="m", token_ids=range(1024), sampling=SimpleNamespace(max_tokens=211)
    )
    trace = begin_trace("0" * 32, cast("Any", admitted))
    trace.assigned(DECISION)
    trace.first_token()
    trace.kv_received(FINISHED.transfer)
    trace.ended("finished", FINISHED)


def measured() -> None:
    """Count a request that is over."""
    session = SimpleNamespace(
        admitted=SimpleNamespace(model="m"), outcome="finished", finished=FINISHED, attempt=1
    )
    metrics.observe(cast("Any", session))


def microseconds(work: Callable[[], None], count: int) -> float:
    """Return the CPU time of one call."""
    began = time.thread_time()
    for _ in range(count):
        work()
    return (time.thread_time() - began) / count * 1e6


def main() -> None:
    """Measure and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=5000)
    count = parser.parse_args().requests
    print(f"metrics              {microseconds(measured, count):7.1f} us a request")
    print(f"traces off           {microseconds(traced, count):7.1f} us a request")
    for ratio, name in ((0.0, "sampled out"), (1.0, "recorded")):
        provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=tracing.MAX_QUEUED_SPANS))
        tracing._tracer = provider.get_tracer("bench")  # noqa: SLF001 - without a process around it
        print(f"traces {name:<13} {microseconds(traced, count):7.1f} us a request")
        provider.shutdown()


if __name__ == "__main__":
    main()
