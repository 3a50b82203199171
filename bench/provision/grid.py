"""Exhaustive and pruned search of one Splitwise-HH grid: same optimum, how much faster.

python -m bench.provision.grid [SIDE] [RATE] [WORKERS]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from splitwise.perf.catalog import shipped
from splitwise.provision.designs import PAPER_DESIGNS, Bounds, Budget, Size, total
from splitwise.provision.probe import Probe, Prober, Problem
from splitwise.provision.search import smallest
from splitwise.provision.throughput import Load
from splitwise.provision.workloads import workload
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, reference_row
from splitwise.sim.workers import LocalWorkers


def main() -> None:
    """Print seconds and probes of both searches."""
    side = int(sys.argv[1]) if len(sys.argv) > 1 else 39
    rate = float(sys.argv[2]) if len(sys.argv) > 2 else 70.0
    workers = int(sys.argv[3]) if len(sys.argv) > 3 else 2
    design, most = PAPER_DESIGNS["Splitwise-HH"], Size(side, side)
    config = SimulationConfig(
        model="llama2-70b",
        machines=[MachinesPart(home="prompt", hardware=design.prompt, count=1)],
        trace=TracePart(file=Path("azure-code")),
    )
    load = Load(workload("azure-code"), 120.0, reference_row(config, shipped()))
    problem = Problem(config, shipped(), load)
    grid = [Size(p, t) for p in range(1, side + 1) for t in range(1, side + 1)]
    with LocalWorkers(problem, workers) as processes:
        prober = Prober(problem, processes)
        prober.ask([Probe(design, Size(1, 1), 1.0)] * workers)  # start the processes
        began = time.perf_counter()
        answer = smallest(prober, design, rate, Budget.COST, Bounds(most), confirm=False)
        pruned = time.perf_counter() - began
        print(f"pruned: {pruned:.2f} s, {answer.probes} clusters, optimum {answer.size}", flush=True)
        prober.answers.clear()
        began = time.perf_counter()
        met = prober.ask([Probe(design, size, rate) for size in grid])
        spent = time.perf_counter() - began
    able = [size for size, found in zip(grid, met, strict=True) if found]
    best = min((total(design, size, shipped(), Budget.COST) for size in able), default=None)
    print(f"exhaustive: {spent:.2f} s, {len(grid)} clusters, {len(able)} able, least cost {best}")
    if answer.size is not None:
        print(f"pruned least cost {total(design, answer.size, shipped(), Budget.COST)}")


if __name__ == "__main__":
    main()
