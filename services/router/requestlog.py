"""The request log: one JSON line for each finished request, for replay and comparison.

``splitwise simulate`` takes the file as a trace and lays its own times beside the measured
ones. Lines hold sizes, times and places; never prompts, outputs or the client's own ids.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from splitwise.errors import ConfigError
from splitwise.rpc.v1.common_pb2 import FinishReason
from splitwise.telemetry import get_logger

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from services.router.session import Session
    from splitwise.rpc.v1.router_pb2 import Finished


class RequestLog:
    """Appends to one file, a line at a time. A full disk costs lines, never requests."""

    def __init__(self, path: Path) -> None:
        """Open the file; raises `ConfigError`."""
        try:
            self._file = path.open("a", buffering=1, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"router.request_log: {path}: {error.strerror}") from None
        self._failing = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError as failed:
            get_logger().warning("request_log.failing", error=failed.strerror)

    def add(self, session: Session) -> None:
        """Write one request that is over; one that did not finish has no times and no line."""
        if session.finished is None:
            return
        age_s = time.monotonic() - session.admitted.arrived
        line = json.dumps(entry(session, session.finished, time.time_ns() - round(age_s * 1e9)))
        try:
            self._file.write(line + "\n")
        except OSError as error:
            if not self._failing:
                get_logger().warning("request_log.failing", error=error.strerror)
            self._failing = True
        else:
            self._failing = False


def entry(session: Session, finished: Finished, arrived_unix_ns: int) -> dict[str, Any]:
    """Return the line of one finished request. What there was not (a second token) is left out."""
    timing = finished.timing
    line: dict[str, Any] = {
        "arrived_unix_ns": arrived_unix_ns,
        "request_id": session.request_id,
        "model": session.admitted.model,
        "prompt_tokens": finished.prompt_tokens,
        "output_tokens": finished.output_tokens,
        "cached_prompt_tokens": finished.cached_prompt_tokens,
        "finish": FinishReason.Name(finished.reason).removeprefix("FINISH_REASON_").lower(),
        "restarts": finished.restarts,
        "prompt_machine": finished.placement.prompt_machine,
        "token_machine": finished.placement.token_machine,
        "reason": finished.placement.reason,
        "queued_us": timing.queued_us,
        "ttft_us": timing.ttft_us,
        "e2e_us": timing.e2e_us,
    }
    if finished.output_tokens > 1:
        line["second_us"] = timing.second_us
    if finished.output_tokens > 2:
        line |= {"tbt_mean_us": timing.tbt_mean_us, "tbt_max_us": timing.tbt_max_us}
    if finished.HasField("transfer"):
        stats = finished.transfer
        line["transfer"] = {
            "bytes": stats.bytes,
            "push_us": stats.push_us,
            "exposed_us": stats.exposed_us,
            "transport": stats.transport,
        }
    return line
