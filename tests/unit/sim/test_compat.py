"""`compat` mode repeats SplitwiseSim: request by request where its runs are at hand."""

from __future__ import annotations

import gzip
from typing import TYPE_CHECKING

import numpy as np
import pytest

from splitwise.errors import ConfigError
from splitwise.perf.catalog import shipped
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, build_cluster
from splitwise.sim.run import Mode, simulate
from splitwise.workload import Trace, TraceError
from tests.unit.sim.conftest import SHARED

if TYPE_CHECKING:
    from splitwise.sim.results import Result
    from splitwise.sim.setup import Cluster


def cluster(prompts: int, tokens: int, **more: object) -> Cluster:
    machines = [MachinesPart(home="prompt", hardware="h100-80gb", count=prompts)]
    if tokens:
        machines.append(MachinesPart(home="token", hardware="h100-80gb", count=tokens))
    settings = {
        "model": "bloom-176b",
        "machines": machines,
        "trace": TracePart(file="t.csv"),
        "mode": Mode.COMPAT,
    }
    return build_cluster(SimulationConfig.model_validate({**settings, **more}), shipped())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "prompts", "tokens"),
    [("bh40_bloom_conv_70rps_2min", 40, 0), ("hh25p15t_bloom_code_70rps_2min", 25, 15)],
)
def test_every_request_of_the_authors_runs(name: str, prompts: int, tokens: int) -> None:
    path = SHARED / "reference" / "splitwise_sim" / f"{name}.csv.gz"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    with gzip.open(path) as file:
        rows = np.genfromtxt(file, delimiter=",", names=True)
    trace = Trace.of(rows["arrival_s"], rows["prompt_tokens"], rows["output_tokens"])
    result = simulate(trace, cluster(prompts, tokens), mode=Mode.COMPAT)
    assert result.unfinished == 0
    # The files keep nine decimals, and their profile's medians are rounded at the last digit.
    assert result.ttft == pytest.approx(rows["ttft_s"], abs=2e-9)
    assert result.tbt_mean == pytest.approx(rows["tbt_s"], abs=2e-9)
    assert result.e2e == pytest.approx(rows["e2e_s"], abs=2e-9)
    for metric, column in (("ttft", "ttft_s"), ("tbt_mean", "tbt_s"), ("e2e", "e2e_s")):
        for p in (50, 90, 99):
            expected = np.percentile(rows[column], p)
            assert result.percentiles()[metric][f"p{p}"] == pytest.approx(expected, rel=0.01)


def one(prompt: int, output: int, prompts: int, tokens: int) -> Result:
    return simulate(Trace.of([1.0], [prompt], [output]), cluster(prompts, tokens), mode=Mode.COMPAT)


def test_one_request_alone_by_hand() -> None:
    model = shipped().performance("bloom-176b", "h100-80gb")
    together = one(1024, 11, 1, 0)
    first = model.iteration_seconds(1024, 1, 0, 0, compat=True)
    each = model.iteration_seconds(0, 0, 1, 0, compat=True)
    assert together.ttft[0] == pytest.approx(first)
    assert together.e2e[0] == pytest.approx(first + 10 * each)
    split = one(1024, 11, 1, 1)
    transfer = 1024 * 4_014_080 / (200 * 1024**3)
    assert split.e2e[0] == pytest.approx(first + transfer + 10 * each)
    assert split.second_token[0] == pytest.approx(transfer + each)
    assert (split.prompt_machine[0], split.token_machine[0]) == (0, 1)


def test_overload_needs_more_room_and_still_finishes() -> None:
    number = 3000
    trace = Trace.of(np.linspace(0, 1, number), np.full(number, 20), np.full(number, 20))
    result = simulate(trace, cluster(1, 1), mode=Mode.COMPAT)
    assert result.unfinished == 0
    assert result.stats[:, 5].sum() == number * 19  # tokens after the first, none twice


def test_what_the_authors_cannot_run_is_refused() -> None:
    trace = Trace.of([0.0, 1.0], [10, 10], [5, 1])
    with pytest.raises(TraceError, match="row 2: one output token"):
        simulate(trace, cluster(1, 0), mode=Mode.COMPAT)
    with pytest.raises(ConfigError, match="neither failures nor load reports"):
        simulate(trace.slice(0, 0.5), cluster(1, 1, report_s=1.0), mode=Mode.COMPAT)
