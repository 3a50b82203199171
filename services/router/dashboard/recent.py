"""The last requests of a router, for the dashboard: when, where, how long, how they ended.

No prompts and no outputs are kept. Bounded in number and in age.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from splitwise.rpc.v1.common_pb2 import TransferMode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from splitwise.rpc.v1.router_pb2 import Finished

MODES = {
    TransferMode.TRANSFER_MODE_SERIALIZED: "serialized",
    TransferMode.TRANSFER_MODE_LAYERWISE: "layerwise",
}


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """One finished transfer. What was pushed while the prompt was computed is hidden."""

    bytes: int
    push_us: int
    exposed_us: int
    mode: str  # serialized, layerwise, or empty
    transport: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request, over or still running. Times are microseconds; 0 where there is none."""

    request_id: str
    model: str
    outcome: str  # running, stop, length, cancelled, or an error's gRPC status name
    began_unix_ms: float
    queued_us: int = 0
    ttft_us: int = 0
    second_us: int = 0
    tbt_mean_us: int = 0
    e2e_us: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_prompt_tokens: int = 0
    prompt_machine: str = ""
    token_machine: str = ""
    reason: str = ""
    restarts: int = 0
    transfer: TransferRecord | None = None
    pushing: str = ""  # the mode of a push that has not arrived yet


class RecentRequests:
    """Keeps the records of requests that are over."""

    def __init__(self, *, limit: int = 4000, keep_s: float = 600.0) -> None:
        self._records: deque[tuple[float, RequestRecord]] = deque(maxlen=limit)
        self._keep_s = keep_s

    def add(self, record: RequestRecord) -> None:
        """Keep one request that is over now."""
        self._records.append((time.monotonic(), record))

    def finished(self, request_id: str, model: str, finished: Finished, outcome: str) -> None:
        """Keep a request that ended with `finished` now; `outcome` is how (see `RequestRecord`)."""
        timing, placement = finished.timing, finished.placement
        transfer = None
        if finished.HasField("transfer"):
            stats = finished.transfer
            transfer = TransferRecord(
                stats.bytes, stats.push_us, stats.exposed_us, MODES.get(stats.mode, ""), stats.transport
            )
        self.add(
            RequestRecord(
                request_id=request_id,
                model=model,
                outcome=outcome,
                began_unix_ms=time.time() * 1e3 - timing.e2e_us / 1e3,
                queued_us=timing.queued_us,
                ttft_us=timing.ttft_us,
                second_us=timing.second_us,
                tbt_mean_us=timing.tbt_mean_us,
                e2e_us=timing.e2e_us,
                prompt_tokens=finished.prompt_tokens,
                output_tokens=finished.output_tokens,
                cached_prompt_tokens=finished.cached_prompt_tokens,
                prompt_machine=placement.prompt_machine,
                token_machine=placement.token_machine,
                reason=placement.reason,
                restarts=finished.restarts,
                transfer=transfer,
            )
        )

    def within(self, seconds: float) -> list[RequestRecord]:
        """Return what ended in the last `seconds`, oldest first."""
        self._forget()
        begin = time.monotonic() - seconds
        return [record for at, record in self._records if at >= begin]

    def _forget(self) -> None:
        oldest = time.monotonic() - self._keep_s
        while self._records and self._records[0][0] < oldest:
            self._records.popleft()

    def __iter__(self) -> Iterator[RequestRecord]:
        return (record for _, record in self._records)

    def __len__(self) -> int:
        return len(self._records)
