"""The simulator's machine and the emulated engine's form the same batches of the same requests.

Both serve a trace alone, prompt and token phase on the one machine, with iterations as long as
the same performance model says. Each is watched from outside, iteration by iteration.
"""

from __future__ import annotations

import numpy as np

from services.engine.emulated.machine import EmulatedMachine
from services.engine.emulated.settings import EmulatedSettings
from services.engine.interface import PromptWork, TokenWork, Transfer, WorkKey
from splitwise.perf.kernels import mixed_seconds
from splitwise.perf.model import stack
from splitwise.rpc.v1.common_pb2 import TRANSFER_MODE_LAYERWISE, SamplingParams
from splitwise.scheduling.arrays import POOL_PROMPT
from splitwise.scheduling.batching import TAKEN
from splitwise.scheduling.machine import Stage
from splitwise.scheduling.settings import SchedulerSettings
from splitwise.sim.batches import ITERATION
from splitwise.sim.faithful import handle
from splitwise.sim.front import arrive
from splitwise.sim.job import PHASES, PROMPTS, QUEUE, ROUNDS, VERSION, new_sim
from splitwise.sim.setup import Cluster, Machine
from splitwise.sim.world import TIMES_PREEMPTED, pop, waiting_events
from splitwise.workload import Trace
from tests.property.sim.test_faithful_against_naive import models
from tests.support.loopback_daemon import Client, Daemon

Batch = list[tuple[int, int]]  # (request, tokens computed) each


class NotAlikeError(Exception):
    """A request had to wait for memory before it came to the machine: the cluster scheduler's affair."""


def random_case(seed: int) -> tuple[Cluster, Trace]:
    rng = np.random.default_rng(seed)
    cluster = Cluster(
        (Machine("m", POOL_PROMPT, int(rng.integers(120, 260))),),
        stack(models(rng, 1)),
        token_bytes=1000,
        block_tokens=4,
        max_batch_tokens=int(rng.integers(17, 60)),
        max_running=16,
        max_preemptions=int(rng.integers(1, 6)),
        assumed_max_tokens=1,
    )
    count = int(rng.integers(2, 16))
    trace = Trace.of(
        np.sort(rng.uniform(0, 8, count)), rng.integers(1, 80, count), rng.integers(1, 150, count)
    )
    return cluster, trace


def simulated(cluster: Cluster, trace: Trace) -> tuple[list[Batch], int]:
    """Return each iteration's batch, and how often token phases were preempted."""
    scheduler = SchedulerSettings(queue_tokens=10**6, last_resort_tokens=10**6, reserve_output_tokens=1)
    sim = new_sim(trace.prompt_tokens, trace.output_tokens, cluster, scheduler, 1024)
    world, arrived, batches = sim.world, 0, []
    while arrived < len(trace) or waiting_events(world):
        first = not waiting_events(world) or trace.arrival[arrived : arrived + 1] <= world.heap_times[0]
        if arrived < len(trace) and first:
            arrive(sim, arrived, trace.arrival[arrived])
            if world.sizes[QUEUE, 0]:
                raise NotAlikeError
            arrived += 1
            continue
        now, kind, subject, version = pop(world)
        if kind == ITERATION and version == world.whole[VERSION, 0]:
            rows = [
                row for which in (PROMPTS, PHASES) for row in world.items[which, 0, : world.sizes[which, 0]]
            ]
            batch = [(int(row), int(world.jobs[row, TAKEN])) for row in rows if world.jobs[row, TAKEN]]
            batches += [batch] * int(world.whole[ROUNDS, 0])
        handle(sim, now, kind, subject, version, arrived)
    return batches, int(world.places[:, TIMES_PREEMPTED].sum())


class Emulated:
    """An emulated machine and a daemon that delivers at once, on a clock of their own."""

    def __init__(self, cluster: Cluster) -> None:
        settings = EmulatedSettings(
            kv_blocks=cluster.machines[0].kv_blocks,
            block_tokens=cluster.block_tokens,
            layers=1,
            token_bytes_per_layer=8,
            max_model_len=240,
            max_running=cluster.max_running,
            max_batch_tokens=cluster.max_batch_tokens,
            max_preemptions=cluster.max_preemptions,
        )
        self.row = cluster.rows[0]
        self.daemon = Daemon()
        self.client = Client(self.daemon, settings.layers)
        self.machine = self.client.machine = EmulatedMachine(settings, self.client)  # type: ignore[arg-type]
        self.iteration = None
        self.ends = np.inf
        self.batches: list[Batch] = []

    def submit(self, request: int, prompt: int, output: int) -> None:
        key, sampling = WorkKey(str(request), 1), SamplingParams(max_tokens=output, temperature=0.0)
        tokens = [300 + request] * prompt
        transfer = Transfer((request + 1).to_bytes(16, "big"), 1) if output > 1 else None
        if transfer is not None:
            work = TokenWork(key, tokens, sampling, transfer, "kvd", "engine", 1000)
            sequence = self.machine.submit_token(work)
            if self.machine.scheduler.stage(sequence) is not Stage.ARRIVING:
                raise NotAlikeError
        self.machine.submit_prompt(PromptWork(key, tokens, sampling, transfer, TRANSFER_MODE_LAYERWISE))

    def begin(self, now: float) -> None:
        self.iteration, self.ends = self.machine.begin(), np.inf
        if self.iteration is not None:
            batch = self.iteration.batch
            self.batches.append([(int(work.key.request_id), count) for work, count in batch.parts])
            self.ends = now + mixed_seconds(
                self.row, batch.prompt_tokens, batch.prompt_sequences, batch.sequences, batch.context
            )

    def finish(self) -> None:
        assert self.iteration is not None
        self.machine.write_layer(self.iteration, 0)
        self.machine.finish(self.iteration)
        for key, push in list(self.daemon.pushes.items()):
            if push.deliverable:
                self.daemon.deliver(key)
        while self.client.notices:
            self.machine.take_notice(self.client.notices.pop(0))

    def run(self, trace: Trace) -> list[Batch]:
        waiting = list(range(len(trace)))
        while waiting or self.iteration is not None:
            if waiting and trace.arrival[waiting[0]] <= self.ends:
                request = waiting.pop(0)
                self.submit(request, int(trace.prompt_tokens[request]), int(trace.output_tokens[request]))
                if self.iteration is None:
                    self.begin(float(trace.arrival[request]))
            else:
                now = self.ends
                self.finish()
                self.begin(now)
        return self.batches


def test_same_batches() -> None:
    compared = preempted = chunks = mixed = 0
    for seed in range(60):
        cluster, trace = random_case(seed)
        engine = Emulated(cluster)
        try:
            expected, given_way = simulated(cluster, trace)
            batches = engine.run(trace)
        except NotAlikeError:
            continue
        finally:
            engine.machine.fail_all("over")
            engine.machine.store.close()
        for number, (batch, other) in enumerate(zip(batches, expected, strict=True)):
            assert batch == other, f"seed {seed}, iteration {number}"
        assert engine.machine.preemptions == given_way, f"seed {seed}"
        assert engine.machine.allocator.used == 0
        compared += 1
        preempted += given_way
        chunks += sum(count == cluster.max_batch_tokens for batch in batches for _, count in batch)
        mixed += sum(len({count > 1 for _, count in batch}) == 2 for batch in batches)
    assert compared > 30
    assert min(preempted, chunks, mixed) > 50, "the cases do not reach what they are for"


def test_a_difference_would_be_seen() -> None:
    """With other limits on one side the batches differ."""
    cluster, trace = random_case(3)
    expected, _ = simulated(cluster, trace)
    engine = Emulated(cluster)
    engine.machine.scheduler.limits = type(engine.machine.scheduler.limits)(4, 17, 16, 1)
    assert engine.run(trace) != expected
    engine.machine.store.close()
