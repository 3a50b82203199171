"""Logs of a real run at the chattiest level: every line known, no prompt, no output, no key in any."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from tests.services.gateway.live_cluster import ENVIRONMENT
from tests.services.router.cluster import RouterCluster, request
from tests.services.telemetry.conftest import NODES
from tests.support.tables import code, rows

if TYPE_CHECKING:
    from pathlib import Path

    import aiohttp

SECRETS = ("swordfish", "halibut", "sk-mackerel")  # in prompts, in stop strings, an API key


@pytest.mark.slow
async def test_no_line_of_a_real_run_holds_what_a_client_sent_or_got(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http: aiohttp.ClientSession
) -> None:
    monkeypatch.setitem(ENVIRONMENT, "SPLITWISE_TELEMETRY__LOG_LEVEL", "debug")
    keys = tmp_path / "keys"
    keys.write_text("sk-mackerel\n")
    cluster = RouterCluster(tmp_path)
    outputs = []
    try:
        await cluster.start_router("--http_api_keys", str(keys))
        await cluster.start_nodes(NODES, b={"time_scale": 1.0})
        prompt = "swordfish are fast. " * 30

        # What is answered, and what is refused for each of its parts.
        outputs.append((await cluster.ask(request(prompt, max_tokens=40, stop=[b"halibut"]))).text)
        assert (await cluster.ask(request(prompt, stop=[b"halibut" * 60]))).error is not None
        assert (await cluster.ask(request(prompt, model="swordfish"))).error is not None
        assert (await cluster.ask(request(prompt * 2000))).error is not None
        asked = {"model": "emulated", "prompt": prompt, "max_tokens": 20}
        for key, body, status in (
            ("sk-mackerel", json.dumps(asked), 200),
            ("sk-mackerel-too", json.dumps(asked), 401),
            ("sk-mackerel", json.dumps({**asked, "swordfish": "halibut", "max_tokens": "halibut"}), 400),
            ("sk-mackerel", '{"prompt": "swordfish', 400),
            ("sk-mackerel", json.dumps({"messages": [{"role": "halibut", "content": prompt}]}), 404),
        ):
            where = "completions" if "messages" not in body else "chat/swordfish"
            headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
            async with http.post(f"{cluster.http}/v1/{where}", data=body, headers=headers) as answer:
                assert answer.status == status, (body, await answer.text())
                if status == 200:
                    outputs.append((await answer.json())["choices"][0]["text"])

        # A machine dies in the middle: what was said is computed again, by another.
        made = 0
        async for message in cluster.stream(request(prompt, max_tokens=60, ignore_eos=True)):
            outputs.append(message.text)
            if made < 8 <= made + len(message.token_ids):
                await cluster.signal_machine(cluster.machines[1])
            made += len(message.token_ids)
        assert made == 60
    finally:
        await cluster.stop()

    known = {code(row["event"]): row for row in rows("telemetry.md", "event")}
    seen = set()
    lines = [line for log in sorted(tmp_path.glob("*.log")) for line in log.read_text().splitlines()]  # noqa: ASYNC240
    for text in lines:
        assert not any(secret in text for secret in SECRETS), text
        if not text.startswith("{"):
            assert text.startswith("splitwise fleet: "), text  # the fleet's own process has no logger
            continue
        line = json.loads(text)
        seen.add(line["event"])
        assert {"level", "timestamp", "service", "name"} <= line.keys(), line
        assert line["event"] in known, line
    whole = "".join(outputs)
    assert len(whole) > 100
    text = "\n".join(lines)
    assert not [start for start in range(len(whole) - 12) if whole[start : start + 12] in text]
    assert seen >= {
        "service.ready", "machine.joined", "stream.opened", "engine.attached", "transfer.ended",
        "machine.lost", "service.stopped",
    }  # fmt: skip
