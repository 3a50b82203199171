"""A real Prometheus, with the shipped configuration, over a real cluster."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import pytest

from tests.services.router.cluster import request
from tests.services.telemetry.conftest import NODES
from tests.support.observability import alerts, dashboard_queries
from tests.support.prometheus import needs_prometheus, scraping

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

    from tests.services.telemetry.conftest import MeasuredCluster


@needs_prometheus
@pytest.mark.slow
async def test_every_panel_has_something_to_show_and_the_alerts_speak_when_a_machine_is_killed(
    measured: MeasuredCluster, http: aiohttp.ClientSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await measured.start_router()
    await measured.start_nodes(NODES)
    await measured.start_power_agent(monkeypatch)
    targets = [*measured.metric_addresses().values()]
    async with scraping(tmp_path, targets) as prometheus:
        await prometheus.until(f'count(up{{job="splitwise"}} == 1) == {len(targets)}')
        for _ in range(3):  # between scrapes, so that rates have something to rise from
            answers = await asyncio.gather(*(measured.ask(request(max_tokens=8)) for _ in range(4)))
            assert all(answer.finished is not None for answer in answers)
            body = {"model": "emulated", "prompt": "good morning", "max_tokens": 3}
            async with http.post(f"{measured.http}/v1/completions", json=body) as answer:
                assert answer.status == 200
            seen = (await prometheus.query("max(timestamp(splitwise_process_info))"))[0][1]
            await prometheus.until(f"max(timestamp(splitwise_process_info)) > {seen + 1}")

        empty = []
        for panel, expression in dashboard_queries():
            values = [value for _, value in await prometheus.query(expression)]
            if not values or any(math.isnan(value) for value in values):
                empty.append((panel, expression, values))
        assert empty == []

        asked = 3 * 5
        [(labels, finished)] = await prometheus.query(
            'splitwise_router_requests_total{outcome="finished", model="emulated"}'
        )
        assert labels["job"] == "splitwise"
        assert finished == asked
        machines = await prometheus.query(
            "splitwise_machine_kv_capacity_blocks * on (instance) group_left (machine, home)"
            " splitwise_machine_info"
        )
        assert {labels["machine"] for labels, _ in machines} == set(measured.machines)

        await prometheus.until("count(ALERTS) or vector(1)")  # rules were evaluated
        groups = (await prometheus.get("rules"))["groups"]
        loaded = {rule["name"]: rule for group in groups for rule in group["rules"]}
        assert loaded.keys() == {rule["alert"] for rule in alerts()}
        assert {name: rule["lastError"] for name, rule in loaded.items() if rule.get("lastError")} == {}
        assert [name for name, rule in loaded.items() if rule["state"] == "firing"] == []

        await measured.signal_machine(measured.machines[1])
        await prometheus.until('ALERTS{alertname="SplitwiseMachinesLost", alertstate="firing"}')
