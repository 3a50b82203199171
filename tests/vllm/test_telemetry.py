"""Metrics and traces of machines that run the real model: what only its engine core knows is told, too."""

from __future__ import annotations

import asyncio
import json
import time
from typing import TYPE_CHECKING

import aiohttp
import pytest

from tests.services.gateway.live_cluster import ENVIRONMENT, Process
from tests.services.router.cluster import PATIENCE, request
from tests.services.telemetry.conftest import MeasuredCluster
from tests.support.collector import collecting

if TYPE_CHECKING:
    from pathlib import Path

    from splitwise.models import ModelFolder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SPANS = {"request", "queue", "attempt", "prompt phase", "token phase", "KV receive", "KV push", "hand-over"}


class VllmCluster(MeasuredCluster):
    """One prompt and one token machine with the real model, each on a node of its own."""

    async def start_vllm(self, node: str, home: str, model: Path) -> Process:
        process = Process(self.folder / f"{home}.log")
        self._started.append(process)
        options = json.dumps({"kv_bytes": 256 << 20, "max_model_len": 2048, "dtype": "float32"})
        await process.start(
            *("-m", f"services.{home}", "--id", f"{home}-0", "--listen", "127.0.0.1:0", "--node", node),
            *("--routers", json.dumps([self.address]), "--kvd_address", self._addresses[node]),
            *("--kvd_socket", str(self.folder / f"{node}.sock"), "--telemetry.log_format", "json"),
            *("--model", str(model), "--model_name", "real"),
            *("--engine.kind", "vllm", "--engine.options", options),
        )
        return process


async def test_a_real_engines_batches_memory_and_transfers_are_seen(
    model: ModelFolder, short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector, aiohttp.ClientSession() as http:
        monkeypatch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__METRICS_LISTEN", "127.0.0.1:0")
        monkeypatch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__TRACES_ENDPOINT", collector.address)
        cluster = VllmCluster(short)
        try:
            await cluster.start_router()
            await asyncio.gather(cluster.start_daemon("a"), cluster.start_daemon("b"))
            machines = await asyncio.gather(
                cluster.start_vllm("a", "prompt", model.path), cluster.start_vllm("b", "token", model.path)
            )
            await asyncio.gather(*(machine.ready() for machine in machines))
            await cluster.until_serving(2)

            asked = asyncio.create_task(
                cluster.ask(request(list(range(100, 400)), model="real", max_tokens=200, ignore_eos=True))
            )
            end = time.monotonic() + PATIENCE
            while True:
                running = (await cluster.metrics(http))["token-0"]
                if running.value("splitwise_machine_batch_requests"):
                    break
                assert time.monotonic() < end
                assert not asked.done(), asked.result()
            assert running.value("splitwise_machine_batch_tokens") == 1
            assert running.value("splitwise_machine_kv_used_blocks") >= 300 // 32
            answer = await asked
            assert answer.error is None
            assert answer.finished.output_tokens == 200

            await cluster.until_free()
            seen = await cluster.metrics(http)
            assert seen["prompt-0"].value("splitwise_machine_prompt_tokens_total") == 300
            assert seen["token-0"].value("splitwise_machine_tokens_total", phase="token") == 199
            for name in ("prompt-0", "token-0"):
                assert seen[name].value("splitwise_machine_batch_requests") == 0
                assert seen[name].value("splitwise_machine_kv_used_blocks") == 0
                assert seen[name].value("splitwise_machine_leases_open") == 0
            pushed = seen["a"].value("splitwise_kvd_pushed_bytes_total")
            assert pushed == answer.finished.transfer.bytes > 0

            spans = await collector.until(lambda found: {span.name for span in found} >= SPANS)
            assert len({span.trace_id for span in spans}) == 1
            by_name = {span.name: span for span in spans}
            assert by_name["KV receive"].parent_id == by_name["token phase"].span_id
            assert by_name["KV push"].parent_id == by_name["KV receive"].span_id
            assert by_name["KV push"].attributes["splitwise.bytes"] == pushed
        finally:
            await cluster.stop()
