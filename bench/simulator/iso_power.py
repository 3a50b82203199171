"""The iso-power table of the Splitwise paper's designs by the authors' rules, beside SplitwiseSim's.

    python -m bench.simulator.iso_power CONV.csv CODE.csv [SEEDS]

The two files are the Azure 2023 traces. Per cell: the largest rate (steps of 1 request/s)
that meets all nine SLOs on a 10-minute Poisson trace, for each seed. The reference is what
SplitwiseSim gave over three seeds; a cell is off by the distance of our mean from that range.
Ends with status 1 when a cell is off by more than 2 requests/s.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

from splitwise.perf.catalog import shipped
from splitwise.provision.designs import PAPER_DESIGNS, Size
from splitwise.provision.throughput import Load, cluster_of, largest_rate
from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, reference_row
from splitwise.sim.run import Mode
from splitwise.workload import load_trace

TOLERANCE = 2.0  # requests per second
DURATION = 600.0
# Workload, design, size, and SplitwiseSim's smallest and largest answer over three seeds.
CELLS = (
    ("conv", "Baseline-A100", Size(70), 55, 55),
    ("conv", "Baseline-H100", Size(40), 116, 118),
    ("conv", "Splitwise-AA", Size(45, 25), 115, 119),
    ("conv", "Splitwise-HH", Size(25, 15), 121, 125),
    ("conv", "Splitwise-HA", Size(25, 26), 137, 141),
    ("conv", "Splitwise-HHcap", Size(25, 21), 140, 145),
    ("code", "Baseline-A100", Size(70), 40, 41),
    ("code", "Baseline-H100", Size(40), 53, 54),
    ("code", "Splitwise-AA", Size(55, 15), 70, 71),
    ("code", "Splitwise-HH", Size(35, 5), 97, 99),
    ("code", "Splitwise-HA", Size(35, 8), 92, 96),
    ("code", "Splitwise-HHcap", Size(35, 7), 101, 102),
)
Cell = tuple[str, str, Size, int, int]


def rate_of(cell: Cell, trace: Path, seed: int) -> float:
    """Return the largest rate of one seed."""
    _, design, size, low, high = cell
    config = SimulationConfig(
        model="bloom-176b",
        machines=[MachinesPart(home="prompt", hardware="h100-80gb", count=1)],
        trace=TracePart(file=trace),
        mode=Mode.COMPAT,
    )
    load = Load(load_trace(trace), DURATION, reference_row(config, shipped()), joint=False, seeds=(seed,))
    cluster = cluster_of(PAPER_DESIGNS[design], size, config, shipped())
    return largest_rate(cluster, config, load, guess=(low + high) / 2).rate


def main() -> int:
    """Print the table; returns the exit status."""
    traces = dict(zip(("conv", "code"), map(Path, sys.argv[1:3]), strict=True))
    seeds = range(int(sys.argv[3]) if len(sys.argv) > 3 else 3)
    wrong = 0
    print(
        f"{'workload':9}{'design':17}{'size':>7}  {'SplitwiseSim':>12}  {'here, per seed':>16}   mean   off"
    )
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        asked = [
            (cell, [pool.submit(rate_of, cell, traces[cell[0]], seed) for seed in seeds]) for cell in CELLS
        ]
        for (workload, design, size, low, high), futures in asked:
            rates = [future.result() for future in futures]
            mean = fmean(rates)
            off = max(low - mean, mean - high, 0.0)
            wrong += off > TOLERANCE
            name = f"{size.prompt}+{size.token}" if size.token else f"{size.prompt}"
            each = " ".join(f"{rate:g}" for rate in rates)
            mark = "  <-- beyond 2" if off > TOLERANCE else ""
            print(
                f"{workload:9}{design:17}{name:>7}  {f'{low}-{high}':>12}  {each:>16}  {mean:5.1f} "
                f"{off:5.1f}{mark}",
                flush=True,
            )
    print(f"{len(CELLS) - wrong} of {len(CELLS)} cells within {TOLERANCE:g} requests/s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
