"""The router's spans of one request: the request itself, its waits for machines, its attempts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from splitwise.telemetry import tracing
from splitwise.telemetry.tracing import NO_SPAN, start_span

if TYPE_CHECKING:
    from services.router.session import Admitted
    from splitwise.rpc.v1.common_pb2 import TransferStats
    from splitwise.rpc.v1.router_pb2 import Finished
    from splitwise.scheduling.decisions import Assign
    from splitwise.telemetry.tracing import Span


class RequestTrace:
    """Spans of one request, told what happens to it in order."""

    def __init__(self, request_id: str, admitted: Admitted) -> None:
        self._request = start_span(
            "request",
            tracing.incoming(),
            root=True,
            at=admitted.arrived,
            request_id=request_id,
            model=admitted.model,
            prompt_tokens=len(admitted.token_ids),
            max_tokens=admitted.sampling.max_tokens,
        )
        self._queue = start_span("queue", self._request.traceparent, at=admitted.arrived)
        self._attempt: Span = NO_SPAN

    def assigned(self, decision: Assign) -> str:
        """Begin an attempt; returns what its machines name as their spans' parent."""
        self._queue.end()
        self._attempt = start_span(
            "attempt",
            self._request.traceparent,
            attempt=decision.attempt,
            prompt_machine=decision.prompt_machine,
            token_machine=decision.token_machine,
            reason=decision.reason,
        )
        return self._attempt.traceparent

    def first_token(self) -> None:
        """The attempt's first token came."""
        self._attempt.event("first token")

    def kv_received(self, stats: TransferStats) -> None:
        """The attempt's KV cache arrived."""
        hidden = max(0, stats.push_us - stats.exposed_us)
        self._attempt.event("KV received", bytes=stats.bytes, hidden_us=hidden, exposed_us=stats.exposed_us)

    def attempt_failed(self, phase: str, cause: str) -> None:
        """A machine reported a failure; what it said may hold anything and stays in its log."""
        self._attempt.event("attempt failed", phase=phase, cause=cause)

    def restarted(self, reason: str) -> None:
        """The attempt was given up; the request waits for another pair."""
        self._attempt.end(error=reason)
        self._request.event("restart", reason=reason)
        self._queue = start_span("queue", self._request.traceparent, restart=True)

    def ended(self, outcome: str, finished: Finished | None) -> None:
        """The request is over: finished, failed, cancelled or rejected."""
        error = outcome if outcome in ("failed", "rejected") else ""
        self._queue.end()
        self._attempt.end(error=error)
        self._request.set(outcome=outcome)
        if finished is not None:
            self._request.set(
                output_tokens=finished.output_tokens,
                cached_prompt_tokens=finished.cached_prompt_tokens,
                restarts=finished.restarts,
                ttft_us=finished.timing.ttft_us,
                second_us=finished.timing.second_us,
            )
        self._request.end(error=error)


class _NoTrace(RequestTrace):
    """The same while this process traces nothing."""

    def __init__(self) -> None:
        self._request = self._queue = self._attempt = NO_SPAN

    def assigned(self, decision: Assign) -> str:
        return ""

    def restarted(self, reason: str) -> None:
        pass

    def ended(self, outcome: str, finished: Finished | None) -> None:
        pass


NO_TRACE: RequestTrace = _NoTrace()


def begin_trace(request_id: str, admitted: Admitted) -> RequestTrace:
    """Begin the trace of a request, or continue its client's."""
    return RequestTrace(request_id, admitted) if tracing.on() else NO_TRACE
