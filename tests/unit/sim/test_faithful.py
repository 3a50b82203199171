"""`faithful` mode: small clusters whose numbers can be worked out by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from splitwise.errors import ConfigError
from splitwise.perf.catalog import shipped
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, build_cluster
from splitwise.sim.results import ResultError
from splitwise.sim.run import simulate
from splitwise.workload import Trace, TraceError

if TYPE_CHECKING:
    from splitwise.sim.setup import Cluster

MODEL = shipped().performance("llama2-70b", "h100-80gb")
KV = 327_680


def cluster(prompts: int, tokens: int, **more: object) -> Cluster:
    machines = [MachinesPart(home="prompt", hardware="h100-80gb", count=prompts)]
    if tokens:
        machines.append(MachinesPart(home="token", hardware="h100-80gb", count=tokens))
    settings = {"model": "llama2-70b", "machines": machines, "trace": TracePart(file="t.csv")}
    return build_cluster(SimulationConfig.model_validate({**settings, **more}), shipped())


def token_phase(prompt: int, count: int) -> float:
    """Time of `count` token iterations alone, after the first token of a prompt."""
    return sum(MODEL.token_seconds(1, prompt + 1 + made) for made in range(count))


def test_a_short_prompt_is_pushed_after_it() -> None:
    setup = cluster(1, 1)
    result = simulate(Trace.of([2.0], [400], [20]), setup)
    prompt = MODEL.prompt_seconds(400)
    transfer = 400 * KV / 50e9 + setup.hand_over_seconds
    assert result.ttft[0] == pytest.approx(prompt)
    assert result.second_token[0] == pytest.approx(transfer + MODEL.token_seconds(1, 401))
    assert result.e2e[0] == pytest.approx(prompt + transfer + token_phase(400, 19))
    assert result.reason(0) == "jsq:prompt-pool/token-pool"


@pytest.mark.parametrize("tokens", [512, 2000])  # the shortest that the router does not serialize
def test_a_long_prompt_hides_its_transfer_but_for_the_last_layer(tokens: int) -> None:
    setup = cluster(1, 1)
    result = simulate(Trace.of([0.0], [tokens], [3]), setup)
    visible = tokens * KV / 50e9 / 80 + 0.005 + setup.hand_over_seconds
    assert result.second_token[0] == pytest.approx(visible + MODEL.token_seconds(1, tokens + 1))


def test_transfers_wait_for_each_other_on_a_link() -> None:
    slow = cluster(2, 1, machines=[
        {"home": "prompt", "hardware": "h100-80gb", "count": 2, "link_gbit_s": 1.0},
        {"home": "token", "hardware": "h100-80gb", "count": 1, "link_gbit_s": 1.0},
    ])  # fmt: skip
    result = simulate(Trace.of([0.0, 0.0], [400, 400], [2, 2]), slow)
    each = 400 * KV / (1e9 / 8)
    assert sorted(result.prompt_machine) == [0, 1]
    assert abs(result.second[1] - result.second[0]) == pytest.approx(each, rel=0.1)


def test_one_machine_does_both_phases_without_a_transfer() -> None:
    result = simulate(Trace.of([0.0], [400], [20]), cluster(1, 0))
    assert result.e2e[0] == pytest.approx(MODEL.prompt_seconds(400) + token_phase(400, 19))
    assert result.prompt_machine[0] == result.token_machine[0] == 0
    assert result.stats[0, 8] == 0  # bytes sent


def test_one_token_needs_no_token_phase() -> None:
    result = simulate(Trace.of([0.0], [400], [1]), cluster(1, 1))
    assert result.e2e[0] == result.ttft[0] == pytest.approx(MODEL.prompt_seconds(400))
    assert np.isnan(result.tbt_mean[0])
    assert np.isnan(result.second_token[0])


def test_a_lost_machine_restarts_its_requests_and_later_ones_avoid_it() -> None:
    arrivals = np.linspace(0, 20, 100)
    trace = Trace.of(arrivals, np.full(100, 500), np.full(100, 50))
    setup = cluster(2, 2, failures=[{"machine": 3, "at_s": 10.0}])
    result = simulate(trace, setup)
    assert result.unfinished == 0
    assert result.restarts.sum() > 0
    late = trace.arrival > 10.0
    assert not np.any(result.token_machine[late] == 3)
    assert result.machine_load(3).lost_at == pytest.approx(10.0)
    assert result.machine_load(0).lost_at is None


def test_losing_every_machine_fails_what_is_open() -> None:
    setup = cluster(1, 1, failures=[{"machine": 0, "at_s": 0.1}, {"machine": 1, "at_s": 0.2}])
    result = simulate(Trace.of([0.0, 5.0], [4000, 100], [50, 50]), setup)
    assert result.unfinished == 2
    assert result.reason(1) == "queue:full"


def test_time_is_conserved() -> None:
    rng = np.random.default_rng(0)
    number = 2000
    trace = Trace.of(
        np.sort(rng.uniform(0, 60, number)), rng.integers(50, 3000, number), rng.integers(1, 300, number)
    )
    result = simulate(trace, cluster(3, 2))
    assert result.unfinished == 0
    loads = result.machine_loads()
    assert sum(load.tokens for load in loads) == int((trace.output_tokens - 1).sum())
    assert sum(load.prompt_tokens for load in loads) == int(trace.prompt_tokens.sum())
    for load in loads:
        assert load.utilisation <= 1.0
        assert sum(load.occupancy.values()) == pytest.approx(1.0)
        assert 0.0 < load.memory_peak <= 1.0
        assert load.energy_joules > 0
    assert np.all(result.ttft > 0)
    assert np.all(result.e2e >= result.ttft)
    assert np.all(result.queued >= 0)
    several = trace.output_tokens > 1
    assert np.all(result.tbt_max[several] >= result.tbt_mean[several] - 1e-12)
    assert np.all(result.tbt_max[several] >= result.second_token[several] - 1e-12)


def test_stale_reports_make_choices_worse_not_wrong() -> None:
    rng = np.random.default_rng(1)
    number = 3000
    trace = Trace.of(
        np.sort(rng.uniform(0, 60, number)), rng.integers(50, 3000, number), rng.integers(2, 200, number)
    )
    fresh = simulate(trace, cluster(3, 2))
    stale = simulate(trace, cluster(3, 2, report_s=5.0))
    assert stale.unfinished == fresh.unfinished == 0
    assert np.mean(stale.ttft) > np.mean(fresh.ttft)


def test_runs_are_repeatable_and_can_be_cut() -> None:
    trace = Trace.of(np.arange(50) * 0.1, np.full(50, 900), np.full(50, 40))
    first, again = simulate(trace, cluster(1, 1)), simulate(trace, cluster(1, 1))
    assert np.array_equal(first.last, again.last)
    cut = simulate(trace, cluster(1, 1), until=2.5)
    done = first.last <= 2.5
    assert np.array_equal(np.isfinite(cut.last), done)
    assert np.array_equal(cut.last[done], first.last[done])
    assert cut.unfinished == np.count_nonzero(~done)


def test_warmup_is_left_out_and_must_leave_something() -> None:
    trace = Trace.of(np.arange(50) * 0.1, np.full(50, 900), np.full(50, 40))
    result = simulate(trace, cluster(1, 1))
    late = result.ttft[trace.arrival >= 2.0]
    assert result.percentiles(2.0)["ttft"]["max"] == pytest.approx(late.max())
    with pytest.raises(ResultError, match="warm-up of 100 s"):
        result.percentiles(100.0)


def test_a_request_larger_than_any_machine_is_named() -> None:
    with pytest.raises(TraceError, match=r"row 2: 3000000 prompt and 5 output tokens need more KV memory"):
        simulate(Trace.of([0.0, 1.0], [5, 3_000_000], [5, 5]), cluster(1, 1))


def test_prefixes_are_not_in_traces() -> None:
    with pytest.raises(ConfigError, match="prefix-aware"):
        simulate(Trace.of([0.0], [5], [5]), cluster(1, 1), scheduler=SchedulerSettings(policy="prefix-aware"))


def test_a_prompt_longer_than_a_batch_is_computed_and_pushed_in_chunks() -> None:
    setup = cluster(1, 1)
    result = simulate(Trace.of([0.0], [5000], [2]), setup)
    chunks = [MODEL.prompt_seconds(2048), MODEL.prompt_seconds(2048), MODEL.prompt_seconds(904)]
    assert result.ttft[0] == pytest.approx(sum(chunks))
    assert result.machine_load(0).iterations == 3
    assert result.machine_load(0).bytes_sent == 5000 * KV
    visible = 904 * KV / 50e9 / 80 + 0.005 + setup.hand_over_seconds  # the others went meanwhile
    assert result.second_token[0] == pytest.approx(visible + MODEL.token_seconds(1, 5001))


UNCOMPILED = """
import sys, json
from pathlib import Path
from splitwise.perf.catalog import shipped
from splitwise.sim.config import build_cluster, load_config
from splitwise.sim.run import simulate
from splitwise.workload import load_trace
config = load_config(Path(sys.argv[1]))
result = simulate(load_trace(config.trace.file), build_cluster(config, shipped()))
print(json.dumps([result.first.tolist(), result.last.tolist(), result.token_machine.tolist()]))
"""


def test_the_same_without_compiling(config_file: Path) -> None:
    told = [
        subprocess.run(
            [sys.executable, "-c", UNCOMPILED, str(config_file)],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled, "PYTHONPATH": str(Path(__file__).parents[3])},
            check=True, capture_output=True, text=True,
        ).stdout
        for disabled in ("0", "1")
    ]  # fmt: skip
    first, second = (json.loads(text) for text in told)
    assert first[2] == second[2]
    assert np.allclose(first[:2], second[:2], rtol=0, atol=1e-12)
