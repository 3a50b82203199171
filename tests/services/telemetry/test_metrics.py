"""Metrics of a real cluster: the documented ones, all of them, and values that follow the requests."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.services.router.cluster import PATIENCE, request
from tests.services.telemetry.conftest import NODES
from tests.support.tables import code, rows

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.services.telemetry.conftest import MeasuredCluster
    from tests.support.scraping import Scrape

UNITS = ("seconds", "bytes", "tokens", "blocks", "requests", "total", "info", "serving", "open", "machines",
         "engines", "connected", "watts", "problem", "only", "suspended")  # fmt: skip


def documented(process: str) -> dict[str, tuple[str, set[str]]]:
    """Return type and labels of each metric that the guide gives to a process."""
    table = {}
    for row in rows("telemetry.md", "metric"):
        if row["process"] in (process, "all"):
            labels = {label.strip() for label in row["labels"].split(",") if label.strip()}
            table[code(row["metric"])] = (row["type"], labels)
    return table


def test_names_end_in_their_unit_and_no_row_comes_twice() -> None:
    names = [code(row["metric"]) for row in rows("telemetry.md", "metric")]
    assert len(names) == len(set(names)) > 50
    for name in names:
        assert name.rsplit("_", 1)[1] in UNITS, name
    for row in rows("telemetry.md", "metric"):
        assert (row["type"] == "counter") == code(row["metric"]).endswith("_total"), row
        for unit in ("seconds", "watts", "blocks"):
            assert (row["unit"] == unit) == code(row["metric"]).endswith(f"_{unit}"), row


async def settled(
    cluster: MeasuredCluster,
    http: aiohttp.ClientSession,
    condition: Callable[[dict[str, Scrape]], float],
    without: str = "",
) -> dict[str, Scrape]:
    """Scrape until a condition holds; returns that scrape."""
    end = time.monotonic() + PATIENCE
    while not condition(seen := await cluster.metrics(http, without)):
        assert time.monotonic() < end, seen
        await asyncio.sleep(0.05)
    return seen


async def test_exported_is_documented_and_values_follow_the_requests(
    measured: MeasuredCluster, http: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    await measured.start_router()
    await measured.start_nodes(NODES)
    await measured.start_power_agent(monkeypatch)
    before = await measured.metrics(http)
    assert before.keys() == {"router", "a", "b", "node", *measured.machines}, measured.metric_addresses()

    five = (await measured.ask(request(max_tokens=5))).finished
    assert five.output_tokens == 5
    assert (await measured.ask(request(max_tokens=1))).finished.output_tokens == 1
    assert (await measured.ask(request(max_tokens=0))).error is not None
    assert (await measured.ask(request(model="nobody"))).error is not None
    await measured.until_free()
    after = await settled(measured, http, lambda seen: seen["a"].value("splitwise_kvd_push_seconds_count"))

    prompt, token = measured.machines
    for name, process in (
        ("router", "router"),
        ("a", "kvd"),
        ("b", "kvd"),
        (prompt, "machine"),
        (token, "machine"),
        ("node", "power"),
    ):
        scrape = after[name]
        table = documented(process)
        assert scrape.kinds.keys() == table.keys(), (name, scrape.kinds.keys() ^ table.keys())
        for metric, (kind, labels) in table.items():
            assert scrape.kinds[metric] == kind, (name, metric)
            # A metric that nothing has happened to yet has no sample to show its labels.
            assert scrape.labels[metric] == labels or not scrape.labels[metric], (name, metric)

    def moved(process: str, metric: str, **labels: str) -> float:
        return after[process].value(metric, **labels) - before[process].value(metric, **labels)

    # The router: two finished requests of 700 prompt tokens, two refused ones.
    assert moved("router", "splitwise_router_requests_total", outcome="finished") == 2
    assert moved("router", "splitwise_router_refusals_total", code="INVALID_ARGUMENT") == 1
    assert moved("router", "splitwise_router_refusals_total", code="NOT_FOUND") == 1
    assert moved("router", "splitwise_router_tokens_total", phase="prompt") == 1400
    assert moved("router", "splitwise_router_tokens_total", phase="token") == 6
    assert moved("router", "splitwise_router_ttft_seconds_count") == 2
    assert moved("router", "splitwise_router_e2e_seconds_count") == 2
    assert moved("router", "splitwise_router_queue_seconds_count") == 2
    assert moved("router", "splitwise_router_second_token_seconds_count") == 1
    assert moved("router", "splitwise_router_tbt_seconds_count") == 1
    exposed, pushed = five.transfer.exposed_us / 1e6, five.transfer.push_us / 1e6
    for process, metric in (("router", "splitwise_router_transfer"), ("a", "splitwise_kvd")):
        assert moved(process, f"{metric}_exposed_seconds_count") == 1
        assert moved(process, f"{metric}_exposed_seconds_sum") == pytest.approx(exposed)
        assert moved(process, f"{metric}_hidden_seconds_sum") == pytest.approx(max(0.0, pushed - exposed))
    assert moved("router", "splitwise_router_restarts_total") == 0
    assert after["router"].value("splitwise_router_machines", pool="prompt", state="serving") == 1
    assert after["router"].value("splitwise_router_queue_tokens") == 0
    assert after["router"].value("splitwise_router_open_requests") == 0

    # The machines: both prompts here, four later tokens there.
    assert moved(prompt, "splitwise_machine_tokens_total", phase="prompt") == 2
    assert moved(token, "splitwise_machine_tokens_total", phase="token") == 4
    assert moved(prompt, "splitwise_machine_prompt_tokens_total") == 1400
    assert moved(prompt, "splitwise_machine_work_total", phase="prompt", outcome="finished") == 2
    assert moved(token, "splitwise_machine_work_total", phase="token", outcome="finished") == 1
    assert moved(prompt, "splitwise_machine_prompt_seconds_count") == 2
    assert moved(token, "splitwise_machine_kv_wait_seconds_count") == 1
    for machine in measured.machines:
        assert after[machine].value("splitwise_machine_kv_used_blocks") == 0
        assert after[machine].value("splitwise_machine_kv_capacity_blocks") > 0
        assert after[machine].value("splitwise_machine_leases_open") == 0
        assert after[machine].value("splitwise_machine_streams_open") == 2
        assert after[machine].value("splitwise_machine_serving") == 1
        assert after[machine].value("splitwise_machine_info", machine=machine) == 1

    # The daemons: one push of 700 tokens' KV.
    machine_info = (await measured.describe()).machines[0].description
    blocks = -(-700 // machine_info.block_tokens)
    assert moved("a", "splitwise_kvd_pushed_bytes_total") == blocks * machine_info.block_bytes
    assert moved("a", "splitwise_kvd_push_seconds_count", mode="layerwise", transport="ucx") == 1
    assert moved("a", "splitwise_kvd_hand_over_seconds_count") == 1
    assert moved("b", "splitwise_kvd_transfers_total", outcome="delivered") == 1
    assert moved("b", "splitwise_kvd_grants_total") == 1
    assert moved("a", "splitwise_kvd_rejections_total") == moved("b", "splitwise_kvd_rejections_total") == 0
    for node in ("a", "b"):
        assert after[node].value("splitwise_kvd_transfers_open") == 0
        assert after[node].value("splitwise_kvd_granted_blocks") == 0


async def test_gauges_show_running_work_and_a_lost_machine_is_counted(
    measured: MeasuredCluster, http: aiohttp.ClientSession
) -> None:
    await measured.start_router()
    await measured.start_nodes(NODES, b={"time_scale": 1.0})
    token = measured.machines[1]
    asked = asyncio.create_task(measured.ask(request(max_tokens=2000, ignore_eos=True)))
    running = await settled(
        measured, http, lambda seen: seen[token].value("splitwise_machine_batch_requests")
    )
    scrape = running[token]
    assert scrape.value("splitwise_machine_batch_tokens") == 1
    assert scrape.value("splitwise_machine_open_requests", phase="token") == 1
    assert scrape.value("splitwise_machine_kv_used_blocks") >= 700 // 16
    assert running["router"].value("splitwise_router_open_requests") == 1
    assert running["router"].value("splitwise_router_token_requests", pool="token") == 1

    await measured.signal_machine(token)
    lost = await settled(
        measured,
        http,
        lambda seen: seen["router"].value("splitwise_router_machines_lost_total"),
        without=token,
    )
    assert lost["router"].value("splitwise_router_restarts_total", reason="machine:lost") == 1
    asked.cancel()
