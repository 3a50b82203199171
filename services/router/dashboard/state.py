"""What the page shows, as one JSON object made from the cluster's description and its requests."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from splitwise.rpc.v1.common_pb2 import Phase, Pool

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from services.router.dashboard.recent import RequestRecord
    from splitwise.config import SloSettings
    from splitwise.rpc.v1.router_pb2 import ClusterDescription, Explanation, MachineStatus

PERCENTILES = (50, 90, 99)
_POOLS = {Pool.POOL_PROMPT: "prompt", Pool.POOL_TOKEN: "token", Pool.POOL_MIXED: "mixed"}
_PHASES = {Phase.PHASE_PROMPT: "prompt", Phase.PHASE_TOKEN: "token"}
_FINISHED = frozenset({"stop", "length"})


def cluster_state(
    cluster: ClusterDescription,
    over: Sequence[RequestRecord],
    running: Iterable[RequestRecord],
    *,
    window_s: float,
    shown: int,
    targets: SloSettings,
) -> dict[str, Any]:
    """Return the page's state. `over` ended within `window_s`; at most `shown` are listed."""
    finished = [record for record in over if record.outcome in _FINISHED]
    running = list(running)
    return {
        "now_ms": time.time() * 1e3,
        "window_s": window_s,
        "policy": cluster.policy,
        "queued": cluster.queued,
        "running": cluster.running,
        "counters": {field.name: value for field, value in cluster.counters.ListFields()},
        "models": [{"name": model.name, "serving": model.serving} for model in cluster.models],
        "machines": [_machine(machine) for machine in cluster.machines],
        "power": {field.name: value for field, value in cluster.power.ListFields()},
        "rates": _rates(over, finished, window_s),
        "latency": _latency(finished, targets),
        "transfers": _transfers(finished, running),
        "requests": [_request(record) for record in [*over[-shown:], *running]],
    }


def explanation_state(explanation: Explanation) -> dict[str, Any]:
    """Return one request's decisions."""
    return {
        "request_id": explanation.request_id,
        "decisions": [
            {
                "kind": record.kind,
                "reason": record.reason,
                "prompt_machine": record.prompt_machine,
                "token_machine": record.token_machine,
                "at_us": record.at_us,
                "candidates": [
                    {
                        "machine": seen.machine_id,
                        "phase": _PHASES.get(seen.phase, ""),
                        "pool": _POOLS.get(seen.pool, ""),
                        "queue_tokens": seen.queue_tokens,
                        "kv_used": seen.kv_blocks_used,
                        "kv_total": seen.kv_blocks,
                        "cached_tokens": seen.cached_tokens,
                        "chosen": seen.chosen,
                    }
                    for seen in record.candidates
                ],
            }
            for record in explanation.decisions
        ],
    }


def _machine(machine: MachineStatus) -> dict[str, Any]:
    described, load = machine.description, machine.load
    home = _POOLS.get(described.home_pool, "")
    return {
        "id": described.identity.machine_id,
        "node": described.node,
        "engine": described.engine,
        "model": described.model,
        "home": home,
        "pool": _POOLS.get(machine.pool, home),
        "pool_reason": machine.pool_reason,
        "state": machine.state,
        "prompt_requests": load.prompt_requests,
        "prompt_tokens": load.prompt_tokens,
        "token_requests": load.token_requests,
        "token_waiting": load.token_waiting,
        "pending_prompt_tokens": machine.pending_prompt_tokens,
        "pending_token_requests": machine.pending_token_requests,
        "kv_used": load.kv_blocks_used,
        "kv_total": load.kv_blocks_total or described.kv_blocks,
        "max_running": described.max_running,
        "preemptions": load.preemptions,
        "power_watts": load.power_watts,
        "power_limit_watts": load.power.enforced_watts,
        "power_reason": ", ".join(filter(None, (load.power.reason, load.power.problem))),
        "report_age_ms": machine.report_age_ms,
    }


def _request(record: RequestRecord) -> dict[str, Any]:
    shown = asdict(record)
    return {name: value for name, value in shown.items() if value not in (0, "", None)}


def _rates(
    over: Sequence[RequestRecord], finished: Sequence[RequestRecord], window_s: float
) -> dict[str, float]:
    return {
        "requests_per_s": len(over) / window_s,
        "prompt_tokens_per_s": sum(record.prompt_tokens for record in finished) / window_s,
        "output_tokens_per_s": sum(record.output_tokens for record in finished) / window_s,
    }


def _latency(finished: Sequence[RequestRecord], targets: SloSettings) -> list[dict[str, Any]]:
    """Return one row per figure, in milliseconds."""
    rows = (
        ("TTFT", [record.ttft_us for record in finished], targets.ttft_ms),
        ("second token", [record.second_us for record in finished], targets.second_ms),
        ("TBT", [record.tbt_mean_us for record in finished], targets.tbt_ms),
        ("E2E", [record.e2e_us for record in finished], targets.e2e_ms),
    )
    return [
        {
            "name": name,
            "count": sum(value > 0 for value in values),
            "target_p90_ms": target,
            **{f"p{rank}": value for rank, value in _percentiles(values).items()},
        }
        for name, values, target in rows
    ]


def _percentiles(microseconds: Iterable[int]) -> dict[int, float | None]:
    """Return percentiles (nearest rank) in milliseconds; figures of 0 were not measured."""
    ordered = sorted(value for value in microseconds if value > 0)
    if not ordered:
        return dict.fromkeys(PERCENTILES)
    return {rank: ordered[math.ceil(rank / 100 * len(ordered)) - 1] / 1e3 for rank in PERCENTILES}


def _transfers(finished: Sequence[RequestRecord], running: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """Return one row per mode: what is in flight, how much was pushed, and what the client saw of it.

    A push is exposed as soon as the first token is out: from then on it delays the second.
    """
    rows = []
    for mode in ("layerwise", "serialized"):
        some = [r.transfer for r in finished if r.transfer is not None and r.transfer.mode == mode]
        pushed = sum(transfer.push_us for transfer in some)
        exposed = sum(min(transfer.exposed_us, transfer.push_us) for transfer in some)
        rows.append(
            {
                "mode": mode,
                "open": sum(record.pushing == mode for record in running),
                "open_exposed": sum(record.pushing == mode and record.ttft_us > 0 for record in running),
                "count": len(some),
                "bytes": sum(transfer.bytes for transfer in some),
                "hidden_share": None if pushed == 0 else 1 - exposed / pushed,
                "push": _percentiles(transfer.push_us for transfer in some),
                "exposed": _percentiles(max(1, transfer.exposed_us) for transfer in some),
            }
        )
    return rows
