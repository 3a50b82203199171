"""The dashboard's JSON: percentiles, transfers, machines, and what is kept of requests."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.dashboard import RecentRequests, RequestRecord
from services.router.dashboard.recent import TransferRecord
from services.router.dashboard.state import cluster_state, explanation_state
from splitwise.config import SloSettings
from splitwise.rpc.v1 import common_pb2, router_pb2


def record(name: str = "r", **fields: object) -> RequestRecord:
    known: dict[str, object] = {"model": "m", "outcome": "stop", "began_unix_ms": 1.0} | fields
    return RequestRecord(request_id=name, **known)  # type: ignore[arg-type]


def state_of(*records: RequestRecord, running: tuple[RequestRecord, ...] = (), shown: int = 100) -> dict:  # type: ignore[type-arg]
    cluster = router_pb2.ClusterDescription(queued=1, running=2, policy="jsq")
    return cluster_state(cluster, records, running, window_s=10, shown=shown, targets=SloSettings(ttft_ms=50))


def test_percentiles_are_measured_values_in_milliseconds() -> None:
    state = state_of(*[record(ttft_us=1000 * value) for value in range(1, 101)])
    ttft = state["latency"][0]
    assert (ttft["p50"], ttft["p90"], ttft["p99"]) == (50, 90, 99)
    assert (ttft["count"], ttft["target_p90_ms"]) == (100, 50)
    assert state["latency"][1]["p50"] is None  # no second token was measured


def test_power_is_shown_with_its_limit_and_why() -> None:
    power = common_pb2.PowerReport(
        gpus=8, enforced_watts=2800, draw_watts=900, reason="token-cap", problem="hot"
    )
    load = common_pb2.LoadReport(power_watts=900, power=power)
    cluster = router_pb2.ClusterDescription(
        machines=[router_pb2.MachineStatus(load=load), router_pb2.MachineStatus()],
        power=router_pb2.PowerBudget(budget_watts=3000, enforced_watts=2800, unmanaged=1),
    )
    state = cluster_state(cluster, [], [], window_s=10, shown=1, targets=SloSettings())
    shown = [(m["power_watts"], m["power_limit_watts"], m["power_reason"]) for m in state["machines"]]
    assert shown == [(900, 2800, "token-cap, hot"), (0, 0, "")]
    assert state["power"] == {"budget_watts": 3000, "enforced_watts": 2800, "unmanaged": 1}
    assert state_of()["power"] == {}


@given(st.lists(st.integers(1, 10**9), min_size=1))
def test_percentiles_never_leave_the_values(values: list[int]) -> None:
    e2e = state_of(*[record(e2e_us=value) for value in values])["latency"][3]
    known = {value / 1e3 for value in values}
    assert {e2e["p50"], e2e["p90"], e2e["p99"]} <= known
    assert e2e["p50"] <= e2e["p90"] <= e2e["p99"]


def test_failed_requests_count_for_rates_only() -> None:
    state = state_of(record(ttft_us=5, output_tokens=20), record(outcome="UNAVAILABLE", ttft_us=9))
    assert state["latency"][0]["count"] == 1
    assert state["rates"]["requests_per_s"] == 0.2
    assert state["rates"]["output_tokens_per_s"] == 2


def test_hidden_share_is_what_the_client_did_not_wait_for() -> None:
    layerwise = TransferRecord(bytes=10, push_us=1000, exposed_us=100, mode="layerwise", transport="ucx")
    serialized = TransferRecord(bytes=5, push_us=50, exposed_us=80, mode="serialized", transport="ucx")
    rows = state_of(record(transfer=layerwise), record(transfer=serialized), record())["transfers"]
    assert [(row["mode"], row["count"], row["bytes"]) for row in rows] == [
        ("layerwise", 1, 10),
        ("serialized", 1, 5),
    ]
    assert rows[0]["hidden_share"] == pytest.approx(0.9)
    assert rows[1]["hidden_share"] == 0
    assert state_of()["transfers"][0]["hidden_share"] is None


def test_only_the_last_requests_are_shown_and_all_running_ones() -> None:
    over = [record(f"r{index}") for index in range(5)]
    state = state_of(*over, running=(record("open", outcome="running"),), shown=2)
    assert [request["request_id"] for request in state["requests"]] == ["r3", "r4", "open"]


def test_a_borrowed_machine_shows_both_pools() -> None:
    machine = router_pb2.MachineStatus(
        description=common_pb2.MachineDescription(
            identity=common_pb2.MachineIdentity(machine_id="t0"), home_pool=common_pb2.POOL_TOKEN, kv_blocks=9
        ),
        pool=common_pb2.POOL_MIXED,
        state="borrowed",
        pool_reason="prompt-queues",
    )
    cluster = router_pb2.ClusterDescription(machines=[machine])
    state = cluster_state(cluster, (), (), window_s=1, shown=1, targets=SloSettings())
    shown = state["machines"][0]
    assert (shown["home"], shown["pool"], shown["pool_reason"]) == ("token", "mixed", "prompt-queues")
    assert shown["kv_total"] == 9
    json.dumps(state, allow_nan=False)


def test_finished_requests_are_kept_with_all_their_times() -> None:
    recent = RecentRequests()
    finished = router_pb2.Finished(
        reason=common_pb2.FINISH_REASON_STOP,
        prompt_tokens=7,
        output_tokens=3,
        timing=router_pb2.Timing(queued_us=1, ttft_us=2, second_us=3, tbt_mean_us=4, e2e_us=5_000_000),
        placement=router_pb2.Placement(prompt_machine="p", token_machine="t", reason="jsq"),
        transfer=common_pb2.TransferStats(
            bytes=9, mode=common_pb2.TRANSFER_MODE_LAYERWISE, transport="local"
        ),
        restarts=1,
    )
    recent.finished("r1", "m", finished, "stop")
    (kept,) = recent
    assert kept.began_unix_ms == pytest.approx(time.time() * 1e3 - 5000, abs=60_000)
    assert (kept.queued_us, kept.ttft_us, kept.second_us, kept.tbt_mean_us) == (1, 2, 3, 4)
    assert (kept.prompt_machine, kept.token_machine, kept.reason, kept.restarts) == ("p", "t", "jsq", 1)
    assert kept.transfer == TransferRecord(9, 0, 0, "layerwise", "local")


def test_what_is_kept_is_bounded_in_number_and_age() -> None:
    recent = RecentRequests(limit=3, keep_s=1000)
    for index in range(5):
        recent.add(record(f"r{index}"))
    assert [kept.request_id for kept in recent] == ["r2", "r3", "r4"]
    assert len(recent.within(1000)) == 3
    assert recent.within(-1) == []
    aged = RecentRequests(keep_s=-1)
    aged.add(record())
    assert aged.within(1000) == []
    assert len(aged) == 0


def test_explanations_name_phases_and_pools() -> None:
    candidate = router_pb2.Candidate(
        machine_id="p0",
        phase=common_pb2.PHASE_PROMPT,
        pool=common_pb2.POOL_MIXED,
        queue_tokens=5,
        kv_blocks_used=3,
        kv_blocks=9,
        cached_tokens=16,
        chosen=True,
    )
    decision = router_pb2.DecisionRecord(kind="assign", reason="jsq", candidates=[candidate], at_us=3)
    explained = explanation_state(router_pb2.Explanation(request_id="r", decisions=[decision]))
    assert explained["decisions"][0]["candidates"] == [
        {
            "machine": "p0",
            "phase": "prompt",
            "pool": "mixed",
            "queue_tokens": 5,
            "kv_used": 3,
            "kv_total": 9,
            "cached_tokens": 16,
            "chosen": True,
        }
    ]


def test_pushes_in_flight_are_counted_by_mode_and_by_whether_they_delay() -> None:
    running = (
        record("a", outcome="running", pushing="layerwise"),
        record("b", outcome="running", pushing="layerwise", ttft_us=5),
        record("c", outcome="running", pushing="serialized", ttft_us=5),
        record("d", outcome="running", ttft_us=5),  # it has arrived
    )
    rows = {row["mode"]: row for row in state_of(running=running)["transfers"]}
    assert (rows["layerwise"]["open"], rows["layerwise"]["open_exposed"]) == (2, 1)
    assert (rows["serialized"]["open"], rows["serialized"]["open_exposed"]) == (1, 1)
    shown = {request["request_id"]: request for request in state_of(running=running)["requests"]}
    assert (shown["a"]["pushing"], "pushing" in shown["d"]) == ("layerwise", False)
