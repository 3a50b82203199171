"""A real emulated cluster's request log, replayed: how far the simulation is from what happened.

The cluster runs in real time on whatever else this machine does, so that measured times
hold its noise: medians are compared, and tails only for order. docs/simulator.md has
the differences measured on a quiet machine.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from splitwise.client import AsyncClient
from splitwise.sim.compare import load_log

if TYPE_CHECKING:
    from collections.abc import Iterator

SPLITWISE = [sys.executable, "-m", "splitwise.cli.main"]
PATIENCE_S = 120
REQUESTS, RATE = 100, 4.0
SETTINGS = """\
router:
  request_log: {log}
machine:
  engine:
    kind: emulated
    options: {{max_running: 128, kv_blocks: 4096}}
"""
SIMULATION = """\
model: llama2-70b
machines:
  - {home: prompt, hardware: h100-80gb, count: 2, kv_tokens: 65536}
  - {home: token, hardware: h100-80gb, count: 2, kv_tokens: 65536}
trace: {file: requests.jsonl}
max_running: 128
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: socket paths are short."""
    path = Path(os.environ.get("TMPDIR", "/tmp")) / f"sw-loop-{os.getpid()}"
    path.mkdir(mode=0o700)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def router(folder: Path) -> Iterator[str]:
    """Address of a running cluster of two prompt and two token machines with a request log."""
    (folder / "settings.yaml").write_text(SETTINGS.format(log=folder / "requests.jsonl"))
    log = folder / "up.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*SPLITWISE, "up", "--emulate", "2xH100:prompt 2xH100:token", "--config",
             str(folder / "settings.yaml")],
            stdout=file, stderr=file, env={**os.environ, "XDG_RUNTIME_DIR": str(folder)},
            start_new_session=True,
        )  # fmt: skip
    try:
        end = time.monotonic() + PATIENCE_S
        while not (found := re.search(r"serving after [\d.]+ s at (\S+)", log.read_text())):
            assert time.monotonic() < end, log.read_text()
            assert process.poll() is None, log.read_text()
            time.sleep(0.05)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)


async def send(router: str) -> None:
    """Send requests of many sizes with Poisson arrivals, and wait for all of them."""
    draw = np.random.default_rng(7)
    gaps = draw.exponential(1 / RATE, REQUESTS)
    prompts, outputs = draw.integers(50, 2000, REQUESTS), draw.integers(2, 80, REQUESTS)
    async with AsyncClient(router) as client, asyncio.TaskGroup() as group:
        for gap, prompt, output in zip(gaps, prompts, outputs, strict=True):
            await asyncio.sleep(gap)  # the arrivals are the input
            tokens = [256 + int(token) for token in draw.integers(0, 9000, prompt)]
            group.create_task(client.generate(tokens, max_tokens=int(output), temperature=0.0).result())


@pytest.mark.slow
def test_the_replay_of_a_clusters_log_is_near_what_happened(router: str, folder: Path) -> None:
    asyncio.run(send(router))
    log = folder / "requests.jsonl"
    assert len(load_log(log).trace) == REQUESTS
    (folder / "sim.yaml").write_text(SIMULATION)
    answer = subprocess.run(
        [*SPLITWISE, "simulate", str(folder / "sim.yaml"), "--compare", str(log), "--json"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert answer.returncode == 0, answer.stderr
    found = {
        (row["metric"], row["statistic"]): row["simulated_s"] / row["measured_s"]
        for row in json.loads(answer.stdout)["differences"]
    }
    print("simulated / measured:", {key: round(value, 3) for key, value in found.items()})
    for metric, (low, high) in {
        "ttft": (0.75, 1.1),
        "second_token": (0.6, 1.4),  # a few milliseconds: the hand-over of few real bytes is quick
        "tbt_mean": (0.85, 1.1),
        "e2e": (0.85, 1.1),
    }.items():
        assert low < found[metric, "p50"] < high, (metric, found)
