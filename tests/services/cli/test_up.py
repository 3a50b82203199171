"""`splitwise up` and its companions, as a user runs them, with emulated engines."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

SPLITWISE = [sys.executable, "-m", "splitwise.cli.main"]
READY = re.compile(r"serving after [\d.]+ s at (\S+)")
PATIENCE_S = 120


class Up:
    """A running `splitwise up` with its log in a file."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.folder = folder
        self.log = folder / "up.log"
        self.environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder)}
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*SPLITWISE, "up", "--engine", "emulated", *arguments],
                stderr=log,
                stdout=log,
                env=self.environment,
                start_new_session=True,
            )

    def wait_for(self, pattern: re.Pattern[str] | str, count: int = 1) -> None:
        end = time.monotonic() + PATIENCE_S
        while len(re.findall(pattern, self.log.read_text())) < count:
            assert time.monotonic() < end, f"no {pattern!r} in: {self.log.read_text()}"
            assert self.process.poll() is None, f"ended: {self.log.read_text()}"
            time.sleep(0.05)

    def family(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*SPLITWISE, *arguments],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=PATIENCE_S,
            check=False,
        )

    def child(self, module: str) -> psutil.Process:
        return next(p for p in self.family() if module in p.cmdline())

    def close(self) -> None:
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(PATIENCE_S)
        psutil.wait_procs(family, timeout=PATIENCE_S)


@pytest.fixture
def up(tmp_path):
    folder = (
        Path(os.environ.get("TMPDIR", "/tmp")) / f"sw-{os.getpid()}-{tmp_path.name[-8:]}"
    )  # socket paths are short
    folder.mkdir(mode=0o700)
    running: list[Up] = []

    def start(*arguments: str) -> Up:
        running.append(Up(folder, *arguments))
        return running[-1]

    yield start
    for each in running:
        each.close()
    subprocess.run(["rm", "-rf", str(folder)], check=True)


def left_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "splitwise" in path.name}


@pytest.fixture
def cluster(up) -> Up:
    started = up()
    started.wait_for(READY)
    return started


def test_one_cluster_from_start_to_end(cluster: Up):
    answer = cluster.run("generate", "hello there", "--max-tokens", "5", "--temperature", "0", "--json")
    assert answer.returncode == 0, answer.stderr
    result = json.loads(answer.stdout)
    assert result["output_tokens"] == 5
    assert (result["placement"]["prompt_machine"], result["placement"]["token_machine"]) == (
        "prompt-0",
        "token-0",
    )
    assert result["transfer"]["bytes"] > 0
    assert result["transfer"]["transport"] == "ucx"

    text = cluster.run("generate", "hello there", "--max-tokens", "5", "--temperature", "0")
    assert text.stdout.strip() == result["text"].strip()
    assert "prompt-0 -> token-0" in text.stderr

    status = json.loads(cluster.run("status", "--json").stdout)
    assert {machine["machine_id"] for machine in status["machines"]} == {"prompt-0", "token-0"}
    assert status["counters"]["finished"] == 2

    explained = cluster.run("explain", result["request_id"])
    assert "prompt-0 -> token-0" in explained.stdout

    assert cluster.run("drain", "prompt-0").returncode == 0
    assert cluster.run("drain", "prompt-0", "--undo").returncode == 0

    bad = cluster.run("generate", "x", "--temperature", "-1")
    assert bad.returncode == 2
    assert "temperature" in bad.stderr

    family = cluster.family()
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(PATIENCE_S) == 0
    _gone, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive
    assert not list((cluster.folder / "splitwise").iterdir())
    assert not left_in_shared_memory()
    nobody = cluster.run("status")
    assert nobody.returncode == 69
    assert "splitwise up" in nobody.stderr


@pytest.mark.parametrize("module", ["services.token", "services.prompt", "services.router", "services.kvd"])
def test_a_killed_process_comes_back_and_requests_are_served(cluster: Up, module: str):
    before = psutil.Process(cluster.child(module).pid)
    before.kill()
    cluster.wait_for(r"ended with exit code -9; again in")
    end = time.monotonic() + PATIENCE_S
    while True:
        answer = cluster.run("generate", "hello", "--max-tokens", "3", "--timeout", "10", "--quiet")
        if answer.returncode == 0:
            break
        assert time.monotonic() < end, f"{answer.stderr}\n{cluster.log.read_text()}"
    assert cluster.child(module).pid != before.pid


def test_nothing_is_left_when_up_itself_is_killed(cluster: Up):
    family = cluster.family()
    assert len(family) >= 5
    cluster.process.kill()
    _gone, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive


def test_refused_settings_end_it_with_their_reason(up):
    started = up("--engine-option", "kv_blcks=5")
    assert started.process.wait(PATIENCE_S) == 78
    log = started.log.read_text()
    assert "kv_blcks" in log
    assert "Traceback" not in log


def test_sigterm_while_starting_takes_everything_down(up):
    started = up()
    started.wait_for("router +starting")
    started.process.terminate()
    assert started.process.wait(PATIENCE_S) == 130


def test_a_fleet(up):
    started = up("--emulate", "2xH100:prompt 2xA100:token")
    started.wait_for(READY)
    status = json.loads(started.run("status", "--json").stdout)
    names = sorted(machine["machine_id"] for machine in status["machines"])
    assert names == ["prompt-0", "prompt-1", "token-0", "token-1"]
    assert started.run("generate", "hello", "--max-tokens", "3").returncode == 0


def test_a_fleet_with_power(up):
    cluster = up("--emulate", "1xH100:prompt 1xH100:token", "--power-budget", "7600")
    cluster.wait_for(READY)
    end = time.monotonic() + PATIENCE_S
    while True:
        state = json.loads(cluster.run("status", "--json").stdout)
        enforced = {
            machine["machine_id"]: (machine["power"] or {}).get("enforced") for machine in state["machines"]
        }
        if enforced == {"prompt-0": 5600, "token-0": 2000}:
            break
        assert time.monotonic() < end, state
        time.sleep(0.1)
    assert (state["power"]["budget"], state["power"]["enforced"], state["power"]["missing"]) == (
        7600,
        7600,
        0,
    )
    assert cluster.run("generate", "hello", "--max-tokens", "3").returncode == 0
    cluster.process.terminate()
    assert cluster.process.wait(PATIENCE_S) == 0


@pytest.mark.slow
def test_settings_with_a_metrics_port_serve_every_process_at_its_own(up, tmp_path):
    first = 19_300
    settings = tmp_path / "settings.yaml"
    settings.write_text(f'telemetry: {{metrics_listen: "127.0.0.1:{first}"}}\n')
    cluster = up("--config", str(settings))
    cluster.wait_for(READY)
    services = []
    for port in range(first, first + 5):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            services.append(
                re.search(r'splitwise_process_info\{.*service="(\w+)"', answer.read().decode())[1]
            )
    assert services == ["router", "kvd", "kvd", "prompt", "token"]
