"""How fast the simulator is: CPU time, start-up and memory for a 10-minute trace on 40 machines.

    python -m bench.simulator.speed TRACE.csv [--rate 70] [--rounds 5]

TRACE gives the request sizes (an Azure trace, for instance). Compile time is paid once per
change of the sources and is told apart from the start-up of later processes. To compare:
on one core SplitwiseSim simulates 109 to 1,818 requests per CPU second, NVIDIA DynoSim 4,700
to 9,600, Vidur about 330 (40 machines, measured by their own programs).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path


def measure(
    path: Path, rate: float, rounds: int, mode_name: str, prompts: int, tokens: int
) -> dict[str, object]:
    """Time one mode on one cluster in this process."""
    began = time.perf_counter()
    from splitwise.perf.catalog import shipped
    from splitwise.sim.config import MachinesPart, SimulationConfig, TracePart, build_cluster
    from splitwise.sim.run import Mode, simulate
    from splitwise.workload import load_trace, synthesize

    machines = [MachinesPart(home="prompt", hardware="h100-80gb", count=prompts)]
    if tokens:
        machines.append(MachinesPart(home="token", hardware="h100-80gb", count=tokens))
    mode = Mode(mode_name)
    config = SimulationConfig(
        model="bloom-176b" if mode is Mode.COMPAT else "llama2-70b",
        machines=machines, trace=TracePart(file=path), mode=mode,
    )  # fmt: skip
    cluster = build_cluster(config, shipped())
    trace = synthesize(load_trace(path), rate=rate, duration=600, seed=0)
    keep = trace.output_tokens > 1  # SplitwiseSim cannot run the others
    trace = replace(
        trace,
        arrival=trace.arrival[keep],
        prompt_tokens=trace.prompt_tokens[keep],
        output_tokens=trace.output_tokens[keep],
    )
    first = simulate(trace, cluster, mode=mode)
    first_wall = time.perf_counter() - began
    spent = []
    for _ in range(rounds):
        cpu = time.process_time()
        simulate(trace, cluster, mode=mode)
        spent.append(time.process_time() - cpu)
    return {
        "mode": mode_name,
        "cluster": f"{prompts} prompt, {tokens} token machines",
        "requests": len(trace),
        "unfinished": first.unfinished,
        "first_run_wall_s": round(first_wall, 3),
        "cpu_s_best": round(min(spent), 4),
        "cpu_s_median": round(sorted(spent)[len(spent) // 2], 4),
        "requests_per_cpu_s": round(len(trace) / sorted(spent)[len(spent) // 2]),
        "peak_memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
    }


def main() -> None:
    """Run every case in a process of its own."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("trace", type=Path)
    parser.add_argument("--rate", type=float, default=70)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=3, metavar=("MODE", "PROMPTS", "TOKENS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        mode, prompts, tokens = options.one
        row = measure(options.trace, options.rate, options.rounds, mode, int(prompts), int(tokens))
        print(json.dumps(row))
        return
    for case in (
        ("faithful", "25", "15"),
        ("faithful", "15", "25"),
        ("compat", "40", "0"),
        ("compat", "25", "15"),
    ):
        command = [sys.executable, __file__, str(options.trace), "--rate", str(options.rate)]
        command += ["--rounds", str(options.rounds), "--one", *case]
        for _ in range(
            2
        ):  # the first process compiles when nothing is kept yet; the second shows the start-up
            told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        print(told, end="", flush=True)


if __name__ == "__main__":
    main()
