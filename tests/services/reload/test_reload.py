"""SIGHUP to real processes: good settings are taken up, bad ones leave the last good in use."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest
import yaml

from splitwise.launch.emulate import FLEET
from tests.services.gateway.live_cluster import ENVIRONMENT, LiveCluster, Process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)
GOOD: dict[str, Any] = {"router": {"policy": "jsq", "queue_limit": 50}, "telemetry": {"log_level": "info"}}


class Reloading(LiveCluster):
    """A cluster whose processes all read one settings file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.file = folder / "splitwise.yaml"
        self.keys = folder / "keys"

    def write(self, settings: dict[str, Any] | str) -> None:
        self.file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))

    async def reload_router(self, settings: dict[str, Any] | str, event: str) -> dict[str, Any]:
        """Write the file and have it read; returns the line about it."""
        heard = sum(line["event"] == event for line in self.router.lines)
        self.write(settings)
        self.router.process.send_signal(signal.SIGHUP)
        return (await self.router.said(event, heard + 1))[-1]

    async def complete(self, key: str | None = None) -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = {"prompt": [1, 2, 3], "max_tokens": 3}
        async with (
            aiohttp.ClientSession(self.http, headers=headers) as session,
            session.post("/v1/completions", json=body) as response,
        ):
            return response.status


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Reloading]:
    cluster = Reloading(tmp_path)
    cluster.write(GOOD)
    try:
        await cluster.start_router("--config", str(cluster.file), "--restart-limit", "4")
        yield cluster
    finally:
        await cluster.stop()


async def test_bad_settings_keep_the_last_good_and_good_ones_then_count(cluster: Reloading) -> None:
    await cluster.start_machines("1xH100:prompt", "1xH100:token", time_scale=0.1)
    for bad, problem in (
        ({"router": {"policy": "fastest"}}, "policy 'fastest' is unknown"),
        ({"router": {"queue_limt": 5}}, "did you mean 'queue_limit'?"),
        ({"router": {"queue_limit": -5}}, "router.queue_limit"),
        ({"router": {"queue_tokens": 9, "last_resort_tokens": 8}}, "last_resort_tokens (8) is below"),
        ({"router": {"http_api_keys": "/nowhere/keys"}}, "/nowhere/keys"),
        ("router: {policy: jsq", "not valid YAML"),
    ):
        refused = await cluster.reload_router(bad, "config.refused")
        assert problem in refused["error"]
        assert await cluster.complete() == 200
    cluster.file.unlink()
    refused = await cluster.reload_router(GOOD | {"router": {"policy": "none"}}, "config.refused")
    assert (await cluster.state())["policy"] == "jsq"

    changed = {"policy": "round-robin", "restart_limit": 1, "slo": {"ttft_ms": 123.0}, "router_id": "other"}
    taken = await cluster.reload_router(GOOD | {"router": changed}, "config.reloaded")
    # queue_limit is back at its default; restart_limit is still the flag's
    assert set(taken["applied"]) == {"router.policy", "router.slo.ttft_ms", "router.queue_limit"}
    (warning,) = await cluster.router.said("config.needs_restart")
    assert warning["keys"] == ["router.router_id"]
    state = await cluster.until(lambda state: state["policy"] == "round-robin")
    assert state["latency"][0]["target_p90_ms"] == 123.0
    answered = len(state["requests"])
    assert await cluster.complete() == 200
    state = await cluster.until(lambda state: len(state["requests"]) > answered)
    request = state["requests"][-1]["request_id"]
    async with (
        aiohttp.ClientSession(cluster.http) as session,
        session.get(f"/dashboard/requests/{request}") as response,
    ):
        assert (await response.json())["decisions"][0]["reason"].startswith("round-robin:")


async def test_limits_and_keys_count_from_the_next_request(cluster: Reloading) -> None:
    await cluster.start_machines("1xH100:prompt", "1xH100:token", time_scale=0.1)
    cluster.keys.write_text("first\n")
    with_keys = {"router": {"http_api_keys": str(cluster.keys), "http_body_bytes": 2048}}
    await cluster.reload_router(with_keys, "config.reloaded")
    assert [await cluster.complete(key) for key in (None, "first", "second")] == [401, 200, 401]
    cluster.keys.write_text("second\n")  # the same settings, other keys
    await cluster.reload_router(with_keys, "config.reloaded")
    assert [await cluster.complete(key) for key in ("first", "second")] == [401, 200]
    headers = {"Authorization": "Bearer second"}
    async with (
        aiohttp.ClientSession(cluster.http, headers=headers) as session,
        session.post("/v1/completions", json={"prompt": "x" * 3000}) as response,
    ):
        assert response.status == 413


async def test_a_stream_goes_on_through_a_reload(cluster: Reloading) -> None:
    await cluster.start_machines("1xH100:prompt", "1xH100:token")
    body = {"prompt": [1, 2, 3], "max_tokens": 60, "stream": True}
    async with (
        aiohttp.ClientSession(cluster.http) as session,
        session.post("/v1/completions", json=body) as response,
    ):
        await response.content.readline()
        await cluster.reload_router({"router": {"policy": "random", "queue_limit": 0}}, "config.reloaded")
        assert (await response.text()).rstrip().endswith("[DONE]")


async def test_machines_and_daemons_take_up_their_log_level(cluster: Reloading) -> None:
    """One file for all: each process takes up its own section and the log level."""
    await cluster.start_machines("1xH100:prompt", "1xH100:token")
    await cluster.fleet.stop()
    entries = json.loads((cluster.folder / "fleet.json").read_text())
    for entry in entries:
        entry["arguments"] += ["--config", str(cluster.file)]
    file = cluster.folder / "again.json"
    file.write_text(json.dumps(entries))
    fleet = Process(cluster.folder / "again.log")
    cluster._started.append(fleet)
    await fleet.start(*FLEET, str(file))
    pids = {name: int((await fleet.ready(name))["pid"]) for name in ("prompt-0", "token-0")}
    changed = {
        "machine": {"max_waiting": 7, "node": "elsewhere"},
        "kvd": {"max_transfers": 9},
        "telemetry": {"log_level": "debug"},
    }
    cluster.write(changed)
    for name, pid in pids.items():
        os.kill(pid, signal.SIGHUP)
        (taken,) = await fleet.said("config.reloaded", name=name)
        assert set(taken["applied"]) == {"machine.max_waiting", "telemetry.log_level"}
    cluster.write({"telemetry": {"log_level": "loud"}})
    os.kill(pids["token-0"], signal.SIGHUP)
    (refused,) = await fleet.said("config.refused", name="token-0")
    assert "telemetry.log_level" in refused["error"]

    daemon = Process(cluster.folder / "kvd-again.log")
    cluster._started.append(daemon)
    cluster.write({})
    socket_flags = ("--socket", str(cluster.folder / "again.sock"), "--listen", "127.0.0.1:0")
    json_logs = ("--telemetry.log_format", "json")
    await daemon.start("-m", "services.kvd", "--config", str(cluster.file), *socket_flags, *json_logs)
    await daemon.ready()
    cluster.write(changed)
    daemon.process.send_signal(signal.SIGHUP)
    (taken,) = await daemon.said("config.reloaded")
    assert set(taken["applied"]) == {"kvd.max_transfers", "telemetry.log_level"}
    assert await daemon.stop() == 0


async def test_a_quieter_level_quiets(cluster: Reloading) -> None:
    assert await cluster.reload_router(GOOD, "config.reloaded")
    cluster.write({"router": {"policy": "random"}, "telemetry": {"log_level": "error"}})
    cluster.router.process.send_signal(signal.SIGHUP)
    await cluster.until(lambda state: state["policy"] == "random")
    refused = await cluster.reload_router("{", "config.refused")  # an error is still written
    reloaded = [line for line in cluster.router.lines if line["event"] == "config.reloaded"]
    assert len(reloaded) == 1  # the second was below the new level
    assert refused["level"] == "error"


async def test_systemd_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.settimeout(60)
        monkeypatch.setitem(ENVIRONMENT, "NOTIFY_SOCKET", str(tmp_path / "notify"))
        cluster = Reloading(tmp_path)
        cluster.write(GOOD)
        try:
            await cluster.start_router("--config", str(cluster.file))

            async def states(count: int) -> list[str]:
                return [(await asyncio.to_thread(listener.recv, 4096)).decode() for _ in range(count)]

            assert await states(1) == ["READY=1"]
            await cluster.reload_router("{", "config.refused")
            reloading, ready = await states(2)
            assert reloading.startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert ready.startswith("READY=1\nSTATUS=The changed settings are refused")
            await cluster.reload_router(GOOD, "config.reloaded")
            assert (await states(2))[1] == "READY=1\nSTATUS="
        finally:
            await cluster.stop()
