"""How long a scheduling decision takes, by cluster size and policy.

    python -m bench.router.decisions [--machines 10 100 1000 10000] [--policies jsq ...]

Three columns of time, all in CPU microseconds of this thread, so that other load on the
machine is not counted:

live    one `RequestArrived` through `ClusterScheduler.handle`, requests coming and going
core    one decision inside a compiled loop: choose a pair, book it, give one back
scan    the limit to beat: finding the two least loaded machines by `numpy.argmin` over
        plain arrays from Python, without any of the rules
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling import arrays, policies
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.compiled import compiled
from splitwise.scheduling.settings import SchedulerSettings

if TYPE_CHECKING:
    from splitwise.scheduling.arrays import ClusterState, Int64s

WARM, MEASURED = 500, 5000
CHUNK = 20  # decisions per clock reading inside the compiled loop
PROMPT, OUTPUT, BLOCK = 1024, 211, 16  # Azure 2023 conversation: median prompt, mean output
PREFIXES = 50


def cluster(machines: int, policy: str) -> ClusterScheduler:
    """Return a scheduler with half prompt and half token machines of Llama2-70B on DGX-H100."""
    scheduler = ClusterScheduler(SchedulerSettings(policy=policy))
    for number in range(machines):
        home = ev.Pool.PROMPT if number % 2 else ev.Pool.TOKEN
        spec = ev.MachineSpec(f"m{number}", 1, home, "model", "print", "node", 100_000, BLOCK, 512)
        scheduler.handle(ev.MachineJoined(0.0, spec))
    return scheduler


def live(machines: int, policy: str) -> list[float]:
    """Return the times of `MEASURED` arrivals; a tenth of the machines' worth of requests stays open."""
    scheduler = cluster(machines, policy)
    open_requests = max(20, 4 * machines)
    times = []
    for number in range(WARM + open_requests + MEASURED):
        at = number * 1e-3
        prefix = tuple(range(number % PREFIXES * 1000, number % PREFIXES * 1000 + PROMPT // BLOCK))
        event = ev.RequestArrived(at, f"r{number}", "model", PROMPT, OUTPUT, None, prefix)
        began = time.thread_time_ns()
        scheduler.handle(event)
        times.append((time.thread_time_ns() - began) / 1000)
        scheduler.handle(ev.FirstTokenMade(at, f"r{number}", 1))
        scheduler.handle(ev.KvReceived(at, f"r{number}", 1))
        if number >= open_requests:
            scheduler.handle(ev.AttemptFinished(at, f"r{number - open_requests}", 1))
    return times[-MEASURED:]


@compiled
def decide(state: ClusterState, limits: Int64s, pairs: Int64s, first: int, count: int) -> None:
    """Make `count` decisions; each gives back the request decided `len(pairs)` decisions before."""
    for number in range(first, first + count):
        place = number % pairs.shape[0]
        old_prompt, old_token = pairs[place, 0], pairs[place, 1]
        if old_prompt >= 0:
            arrays.end_prompt(state, old_prompt, 1024)
            arrays.change_kv(state, old_prompt, -64)
            arrays.end_token(state, old_token, 78)
        prompt, token, _, _ = policies.choose_pair(state, limits, 0, 1024, 64, 78, 78, number, pairs[:0])
        pairs[place, 0], pairs[place, 1] = prompt, token
        if prompt >= 0:
            arrays.add_prompt(state, prompt, 1024, 64, 0)
            arrays.add_token(state, token, 78, 0)


def core(machines: int, policy: str) -> list[float]:
    """Return the times per decision of `MEASURED` chunks inside the compiled loop."""
    state = cluster(machines, policy).fleet.state
    limits = policies.new_limits(policy, 8192, 32768, 0)
    pairs = np.full((4 * machines, 2), arrays.NONE, np.int64)
    decide(state, limits, pairs, 0, 8 * machines)
    times = []
    for chunk in range(MEASURED):
        began = time.thread_time_ns()
        decide(state, limits, pairs, chunk * CHUNK, CHUNK)
        times.append((time.thread_time_ns() - began) / 1000 / CHUNK)
    return times


def scan(machines: int) -> list[float]:
    """Return the times of two plain argmins."""
    queues = np.random.default_rng(0).integers(0, 10_000, (2, machines // 2))
    times = []
    for _ in range(MEASURED):
        began = time.thread_time_ns()
        int(queues[0].argmin())
        int(queues[1].argmin())
        times.append((time.thread_time_ns() - began) / 1000)
    return times


def figures(times: list[float]) -> str:
    """Return median and 99th percentile as a table cell."""
    return f"{np.percentile(times, 50):8.2f}{np.percentile(times, 99):9.2f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--machines", type=int, nargs="+", default=[10, 100, 1000, 10_000])
    parser.add_argument("--policies", nargs="+", default=list(policies.POLICIES), choices=policies.POLICIES)
    options = parser.parse_args()
    gc.freeze()
    print(f"{'':8} {'':14}{'live':>17}{'core':>17}{'scan':>17}   CPU microseconds")
    print(f"{'machines':8} {'policy':14}" + f"{'p50':>8}{'p99':>9}" * 3)
    for machines in options.machines:
        for policy in options.policies:
            row = figures(live(machines, policy)) + figures(core(machines, policy)) + figures(scan(machines))
            print(f"{machines:8} {policy:14}{row}", flush=True)


if __name__ == "__main__":
    main()
