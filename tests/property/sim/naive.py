"""A deliberately naive simulator: one iteration at a time, ordinary objects, the live scheduler.

It is the oracle for `faithful` mode. Everything about it is slow and plain: machines step
through every iteration, every token is told to a real `ClusterScheduler`, and whatever that
decides is carried out. Only the performance model's formulas are shared.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from splitwise.perf.kernels import mixed_seconds, token_seconds
from splitwise.scheduling import arrays, decisions
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler

if TYPE_CHECKING:
    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.setup import Cluster

NAN = float("nan")
ITERATION, RECEIPT, HOME, REPORT, FAILURE, RETURN = 0, 2, 3, 4, 5, 6


@dataclass(eq=False)
class Job:
    number: int
    prompt: int
    output: int
    limit: int
    arrival: float
    made: int = 0
    attempt: int = 0
    skipped: int = 0
    restarts: int = 0
    preempted: int = 0
    prompt_stage: str = ""
    token_stage: str = ""
    prompt_blocks: int = 0
    token_blocks: int = 0
    pair: tuple[int, int] = (-1, -1)
    receipt: float = NAN
    tokens_at: list[float] = field(default_factory=list)
    start: float = NAN
    ended: bool = False

    @property
    def context(self) -> int:
        return self.prompt + self.made

    @property
    def name(self) -> str:
        return str(self.number)


@dataclass(eq=False)
class Box:
    """A machine."""

    index: int
    capacity: int
    used: int = 0
    wait: list[Job] = field(default_factory=list)
    prompts: list[Job] = field(default_factory=list)
    join: list[Job] = field(default_factory=list)
    batch: list[Job] = field(default_factory=list)
    active: list[Job] = field(default_factory=list)
    outbox: list[ev.Event] = field(default_factory=list)
    state: str = "idle"
    version: int = 0
    incarnation: int = 1
    sends_from: float = 0.0
    receives_from: float = 0.0
    alive: bool = True


class Naive:
    def __init__(self, cluster: Cluster, settings: SchedulerSettings) -> None:
        self.cluster = cluster
        self.scheduler = ClusterScheduler(settings)
        self.boxes = [Box(index, machine.kv_blocks) for index, machine in enumerate(cluster.machines)]
        self.heap: list[tuple[float, int, int, int]] = []
        self.jobs: list[Job] = []
        self.due: set[tuple[int, int]] = set()
        self.now = 0.0
        for box in self.boxes:
            self.handle(self.joined(box))

    def joined(self, box: Box) -> ev.MachineJoined:
        prompt = self.cluster.machines[box.index].home == arrays.POOL_PROMPT
        spec = ev.MachineSpec(
            machine_id=str(box.index),
            incarnation=box.incarnation,
            home=ev.Pool.PROMPT if prompt else ev.Pool.TOKEN,
            model="m",
            kv_fingerprint="f",
            node="n",
            kv_blocks=box.capacity,
            block_tokens=self.cluster.block_tokens,
            max_running=self.cluster.max_running,
        )
        return ev.MachineJoined(self.now, spec)

    # ---- scheduler

    def handle(self, event: ev.Event) -> None:
        for decision in self.scheduler.handle(event):
            if isinstance(decision, decisions.Assign):
                self.assign(decision)
            elif isinstance(decision, decisions.CancelAttempt):
                self.cancel(self.jobs[int(decision.request_id)], decision.phase)
            elif isinstance(decision, decisions.Restart):
                self.jobs[int(decision.request_id)].restarts += 1
        rows = self.scheduler.fleet.state.machines
        for slot in self.scheduler.fleet.borrowed if self.scheduler.settings.borrow_hold else ():
            due = int(rows[arrays.FOREIGN_AT_US, slot]) + round(self.scheduler.settings.borrow_hold * 1e6)
            if (slot, due) not in self.due:
                self.due.add((slot, due))
                heapq.heappush(self.heap, (max(due * 1e-6, self.now) + 1e-6, HOME, slot, 0))

    def tell(self, box: Box, event: ev.Event) -> None:
        if self.cluster.report_seconds > 0:
            box.outbox.append(event)
        else:
            self.handle(event)

    def deliver(self, box: Box) -> None:
        outbox, box.outbox = box.outbox, []
        for event in outbox:
            self.handle(replace(event, at=self.now))

    def assign(self, decision: decisions.Assign) -> None:
        job = self.jobs[int(decision.request_id)]
        request = self.scheduler.request(decision.request_id)
        assert request is not None
        assert request.prompt is not None
        job.attempt = decision.attempt
        job.pair = (int(decision.prompt_machine), int(decision.token_machine))
        job.prompt_stage, job.token_stage = "waiting", ""
        job.prompt_blocks, job.token_blocks = request.prompt.blocks, 0
        prompt, token = self.boxes[job.pair[0]], self.boxes[job.pair[1]]
        prompt.used += job.prompt_blocks
        if request.token is not None:
            job.token_stage, job.token_blocks = "reserved", request.token.blocks
            token.used += job.token_blocks
        prompt.wait.append(job)
        self.wake(prompt)

    def cancel(self, job: Job, phase: ev.Phase) -> None:
        if phase is ev.Phase.PROMPT and job.prompt_stage:
            box = self.boxes[job.pair[0]]
            for group in (box.wait, box.prompts):
                if job in group:
                    group.remove(job)
            job.prompt_stage = ""
            self.give_back(box, job.prompt_blocks)
        elif phase is ev.Phase.TOKEN and job.token_stage:
            job.token_stage = ""
            self.give_back(self.boxes[job.pair[1]], job.token_blocks)

    def give_back(self, box: Box, blocks: int) -> None:
        box.used -= blocks
        if box.wait:
            self.wake(box)

    # ---- machines

    def wake(self, box: Box) -> None:
        if box.state == "idle":
            self.start(box)

    def start(self, box: Box) -> None:
        while box.used > box.capacity and box.batch:
            job = box.batch.pop()
            box.used -= job.token_blocks
            job.token_stage = "evicted"
            job.preempted += 1
            box.wait.insert(0, job)
        while box.join and len(box.batch) < self.cluster.max_running:
            box.batch.append(box.join.pop(0))
        must = [job for job in box.batch if job.skipped >= self.cluster.max_preemptions]
        total = self.take_prompts(box, len(must) if box.wait else 0)
        box.active = list(box.batch)
        if box.prompts:
            # A stable sort: those that came first go first.
            rest = sorted((job for job in box.batch if job not in must), key=lambda job: -job.skipped)
            box.active = must + rest[: max(0, self.cluster.max_batch_tokens - total)]
            for job in box.batch:
                if job not in box.active:
                    job.skipped += 1
                    job.preempted += 1
        if not box.prompts and not box.active:
            box.state = "idle"
            return
        seconds = self.iteration_seconds(box)
        box.state, box.version = "busy", box.version + 1
        heapq.heappush(self.heap, (self.now + seconds, ITERATION, box.index, box.version))
        self.push_layers(box, seconds)

    def take_prompts(self, box: Box, total: int) -> int:
        box.prompts, passed = [], []
        while box.wait:
            job = box.wait[0]
            if box.prompts and total + job.context > self.cluster.max_batch_tokens:
                break
            box.wait.pop(0)
            if job.token_stage == "evicted":
                if job.token_blocks > box.capacity - box.used:
                    passed.append(job)
                    continue
                box.used += job.token_blocks
                job.token_stage = "recomputing"
            else:
                job.prompt_stage = "computing"
                if math.isnan(job.start):
                    job.start = self.now
            box.prompts.append(job)
            total += job.context
        box.wait = passed + box.wait
        return total

    def iteration_seconds(self, box: Box) -> float:
        row = self.cluster.rows[self.cluster.machines[box.index].model_row]
        read = float(sum(job.context for job in box.active))
        if not box.prompts:
            return token_seconds(row, float(len(box.active)), read)
        tokens = float(sum(job.context for job in box.prompts))
        return mixed_seconds(row, tokens, float(len(box.prompts)), float(len(box.active)), read)

    def push_layers(self, box: Box, seconds: float) -> None:
        for job in box.prompts:
            away = (
                job.prompt_stage == "computing" and job.token_stage == "reserved" and job.pair[1] != box.index
            )
            if away and job.context > self.cluster.layerwise_from_tokens:
                size = job.context * self.cluster.token_bytes
                end, speed = self.occupy(job, self.now + seconds / self.cluster.layers)
                end = max(end, self.now + seconds + size / self.cluster.layers / speed)
                visible = self.cluster.machines[box.index].visible_seconds
                job.receipt = end + visible + self.cluster.handoff_seconds

    def occupy(self, job: Job, ready: float) -> tuple[float, float]:
        source, target = (self.boxes[index] for index in job.pair)
        speed = min(self.cluster.machines[index].link_bytes for index in job.pair)
        size = (job.context) * self.cluster.token_bytes
        end = max(ready, source.sends_from, target.receives_from) + size / speed
        source.sends_from = target.receives_from = end
        return end, speed

    def end_iteration(self, box: Box) -> None:
        box.state = "between"
        for job in list(box.prompts):
            self.prompt_made(box, job)
        for job in list(box.active):
            job.made += 1
            job.tokens_at.append(self.now)
            if -(-job.context // self.cluster.block_tokens) > job.token_blocks:
                job.token_blocks += 1
                box.used += 1
            self.tell(box, ev.TokensMade(self.now, job.name, job.attempt, 1))
            if job.made == job.output:
                self.over(box, job, ev.AttemptFinished(self.now, job.name, job.attempt))
        box.batch = [job for job in box.batch if not job.ended]
        self.start(box)

    def over(self, box: Box, job: Job, event: ev.Event) -> None:
        job.ended = True
        if job.prompt_stage:
            job.prompt_stage = ""
            self.give_back(self.boxes[job.pair[0]], job.prompt_blocks)
        if job.token_stage:
            job.token_stage = ""
            self.give_back(self.boxes[job.pair[1]], job.token_blocks)
        self.tell(box, event)

    def prompt_made(self, box: Box, job: Job) -> None:
        context = job.context
        job.made += 1
        job.tokens_at.append(self.now)
        if job.token_stage == "recomputing":
            if -(-job.context // self.cluster.block_tokens) > job.token_blocks:
                job.token_blocks += 1
                box.used += 1
            self.tell(box, ev.TokensMade(self.now, job.name, job.attempt, 1))
            if job.made == job.output:
                self.over(box, job, ev.AttemptFinished(self.now, job.name, job.attempt))
            else:
                job.token_stage = "ready"
                box.join.append(job)
            return
        job.prompt_stage = "computed"
        if job.made == job.output:
            self.over(box, job, ev.FirstTokenMade(self.now, job.name, job.attempt, finishes=True))
            return
        self.tell(box, ev.FirstTokenMade(self.now, job.name, job.attempt))
        if job.pair[1] == box.index:
            self.received(job)
            return
        if context <= self.cluster.layerwise_from_tokens:
            job.made -= 1  # the transfer is of the prompt, as it was before its token
            job.receipt = self.occupy(job, self.now)[0] + self.cluster.handoff_seconds
            job.made += 1
        heapq.heappush(self.heap, (max(job.receipt, self.now), RECEIPT, job.number, job.attempt))

    def received(self, job: Job) -> None:
        source, target = (self.boxes[index] for index in job.pair)
        job.prompt_stage, job.token_stage = "", "ready"
        target.join.append(job)
        self.give_back(source, job.prompt_blocks)
        self.tell(target, ev.KvReceived(self.now, job.name, job.attempt))
        self.wake(target)

    # ---- failures

    def lose(self, box: Box) -> None:
        for other in self.boxes:
            self.deliver(other)
        if not box.alive:
            return
        for job in [*box.wait, *box.prompts, *box.join, *box.batch, *box.active]:
            job.token_stage = "" if job.pair[1] == box.index else job.token_stage
        for job in self.jobs:
            if job.prompt_stage and job.pair[0] == box.index:
                job.prompt_stage = ""
            if job.token_stage and job.pair[1] == box.index:
                job.token_stage = ""
        box.wait, box.prompts, box.join, box.batch, box.active, box.outbox = [], [], [], [], [], []
        box.used, box.state, box.version, box.alive = 0, "lost", box.version + 1, False
        self.handle(ev.MachineLost(self.now, str(box.index), box.incarnation, "scripted"))

    def come_back(self, box: Box) -> None:
        if box.alive:
            return
        box.alive, box.state, box.incarnation = True, "idle", box.incarnation + 1
        self.handle(self.joined(box))

    # ---- loop

    def run(self, arrivals: list[tuple[float, int, int]]) -> list[Job]:
        everything = [
            Job(number, prompt, output, max(output, self.cluster.assumed_max_tokens), at)
            for number, (at, prompt, output) in enumerate(arrivals)
        ]
        for failure in self.cluster.failures:
            heapq.heappush(self.heap, (failure.at, FAILURE, failure.machine, 0))
            if failure.back is not None:
                heapq.heappush(self.heap, (failure.back, RETURN, failure.machine, 0))
        period = self.cluster.report_seconds
        for box in self.boxes if period > 0 else ():
            heapq.heappush(self.heap, (period * (box.index + 1) / len(self.boxes), REPORT, box.index, 0))
        while self.heap or len(self.jobs) < len(everything):
            number = len(self.jobs)
            if number < len(everything) and (not self.heap or everything[number].arrival <= self.heap[0][0]):
                job = everything[number]
                self.jobs.append(job)
                self.now = job.arrival
                self.handle(ev.RequestArrived(self.now, job.name, "m", job.prompt, job.limit))
                continue
            self.now, kind, subject, version = heapq.heappop(self.heap)
            self.step(kind, subject, version, len(everything))
        return everything

    def step(self, kind: int, subject: int, version: int, total: int) -> None:
        if kind == ITERATION:
            if version == self.boxes[subject].version:
                self.end_iteration(self.boxes[subject])
        elif kind == RECEIPT:
            job = self.jobs[subject]
            if job.attempt == version and job.prompt_stage == "computed":
                self.received(job)
        elif kind == HOME:
            self.handle(ev.Tick(self.now))
        elif kind == FAILURE:
            self.lose(self.boxes[subject])
        elif kind == RETURN:
            self.come_back(self.boxes[subject])
        else:
            self.deliver(self.boxes[subject])
            unfinished = total - sum(job.ended for job in self.jobs)
            if (
                len(self.jobs) < total
                or unfinished > self.scheduler.queued
                or any(b.outbox for b in self.boxes)
            ):
                heapq.heappush(self.heap, (self.now + self.cluster.report_seconds, REPORT, subject, 0))
