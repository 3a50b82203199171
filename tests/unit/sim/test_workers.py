"""Workers: equal results in order, wherever they run; lost and missing ones are named."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ConfigError
from splitwise.provision.plan import question
from splitwise.provision.solve import solve
from splitwise.sim.config import load_config
from splitwise.sim.experiment import run_experiment
from splitwise.sim.workers import LocalWorkers, RayWorkers, WorkersError, open_workers

if TYPE_CHECKING:
    from collections.abc import Iterator


def plus(shared: int, item: int) -> int:
    if item < 0:
        raise ConfigError(f"{item} is negative")
    return shared + item


def die(shared: int, item: int) -> int:
    if item == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return item


@pytest.mark.parametrize("processes", [1, 2])
def test_results_are_in_order_and_each_end_is_told(processes: int) -> None:
    ends: list[int] = []
    with LocalWorkers(100, processes) as workers:
        assert workers.size == processes
        assert workers.run(plus, range(7), lambda: ends.append(1)) == [100 + n for n in range(7)]
        assert len(ends) == 7
        with pytest.raises(ConfigError, match="-1 is negative"):
            workers.run(plus, [1, -1, 2])
        assert workers.run(plus, [5]) == [105]  # goes on after an error


def test_a_killed_worker_is_named() -> None:
    with LocalWorkers(0, 2) as workers, pytest.raises(WorkersError, match="killed"):
        workers.run(die, range(8))


def test_without_ray_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'splitwise\[ray\]'"):
        open_workers(0, 1, "auto")


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'splitwise[ray]'")
    from ray.cluster_utils import Cluster

    arguments = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    yield cluster.address
    cluster.shutdown()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ray_gives_the_answers_of_this_machine(ray_address: str, config_file: Path) -> None:
    asked = question(
        {
            "workload": "azure-code",
            "rate": 6,
            "duration_s": 10,
            "designs": ["Splitwise-HH", "Baseline-H100"],
            "search": {"prompt": [1, 4], "token": [1, 3]},
        },
        Path("options"),
    )
    with open_workers(asked.problem, 1, ray_address) as workers:
        assert workers.size == 2
        found = solve(asked, workers)
    assert found == solve(asked)

    text = config_file.read_text().replace("{file: trace.csv}", "{file: trace.csv, rate: 15, duration_s: 9}")
    config_file.write_text(text + "seeds: [0, 1, 2]\n")
    config = load_config(config_file)
    here = run_experiment(config).summary()
    there = run_experiment(config, ray=ray_address).summary()
    here.pop("requests_per_cpu_second")
    there.pop("requests_per_cpu_second")
    assert there == here


@pytest.mark.slow
def test_a_cluster_with_another_version_is_refused(ray_address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitwise.sim.workers.version", lambda name: "99.0")
    with pytest.raises(ConfigError, match=r"nodes have splitwise .*; install splitwise 99\.0"):
        RayWorkers(0, ray_address)
