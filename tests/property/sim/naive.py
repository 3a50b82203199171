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
    given_way: int = 0  # on its present token machine
    pending: int = 0
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
    phases: list[Job] = field(default_factory=list)
    taken: dict[Job, int] = field(default_factory=dict)  # the running batch's tokens
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
        self.note_borrowed()

    def note_borrowed(self) -> None:
        """Let the scheduler look at the clock when borrowed machines may go home."""
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
        request = self.scheduler.request(decision.request_id)
        assert request is not None
        pair = (int(decision.prompt_machine), int(decision.token_machine))
        job = self.jobs[int(decision.request_id)]
        self.begin(job, decision.attempt, pair, token_phase=request.token is not None)

    def begin(self, job: Job, attempt: int, pair: tuple[int, int], *, token_phase: bool) -> None:
        job.attempt, job.pair = attempt, pair
        job.prompt_stage, job.token_stage = "waiting", ""
        job.prompt_blocks, job.token_blocks, job.given_way = 0, 0, 0
        prompt, token = self.boxes[pair[0]], self.boxes[pair[1]]
        if token_phase:
            job.token_stage, job.token_blocks = "reserved", self.blocks(job.context)
            token.used += job.token_blocks
        prompt.wait.append(job)
        self.wake(prompt)

    def cancel(self, job: Job, phase: ev.Phase) -> None:
        if phase is ev.Phase.PROMPT and job.prompt_stage:
            box = self.boxes[job.pair[0]]
            held = job.prompt_blocks if job not in box.wait else 0
            for group in (box.wait, box.prompts, box.taken):
                if job in group:
                    group.remove(job) if isinstance(group, list) else group.pop(job)
            job.prompt_stage = ""
            self.give_back(box, held)
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

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.cluster.block_tokens)

    def start(self, box: Box) -> None:
        self.make_room(box)
        self.admit(box)
        self.form(box)
        if not box.taken:
            box.state = "idle"
            return
        seconds = self.iteration_seconds(box)
        box.state, box.version = "busy", box.version + 1
        heapq.heappush(self.heap, (self.now + seconds, ITERATION, box.index, box.version))
        self.push_layers(box, seconds)

    def make_room(self, box: Box) -> None:
        def missing() -> int:
            return sum(max(0, self.blocks(job.context) - job.token_blocks) for job in box.phases)

        while missing() > box.capacity - box.used:
            able = [job for job in box.phases if job.given_way < self.cluster.max_preemptions]
            if not able:
                break
            job = min(reversed(able), key=lambda job: job.given_way)
            box.phases.remove(job)
            box.used -= job.token_blocks
            job.token_blocks, job.token_stage = 0, "evicted"
            job.given_way += 1
            job.preempted += 1
            box.wait.insert(0, job)
        for job in box.phases:
            more = max(0, self.blocks(job.context) - job.token_blocks)
            job.token_blocks += more
            box.used += more

    def admit(self, box: Box) -> None:
        passed = []
        while box.wait:
            job = box.wait[0]
            kept = job.token_stage == "evicted" and job.given_way == self.cluster.max_preemptions
            wanted = self.blocks(job.prompt + job.limit if kept else job.context)
            if wanted > box.capacity - box.used:
                if job.token_stage != "evicted":
                    break
                passed.append(box.wait.pop(0))
                continue
            box.wait.pop(0)
            box.used += wanted
            job.pending = job.context
            if job.token_stage == "evicted":
                job.token_stage, job.token_blocks = "recomputing", wanted
            else:
                job.prompt_stage, job.prompt_blocks = "computing", wanted
            box.prompts.append(job)
        box.wait = passed + box.wait

    def form(self, box: Box) -> None:
        box.taken = {}
        must = [job for job in box.phases if job.given_way >= max(0, self.cluster.max_preemptions - 1)]
        room = self.cluster.max_batch_tokens - len(must)
        for job in box.prompts:
            if box.taken and job.pending > room:
                break
            box.taken[job] = max(1, min(job.pending, room))
            room -= box.taken[job]
            if math.isnan(job.start):
                job.start = self.now
        # A stable sort: those that came first go first.
        rest = sorted((job for job in box.phases if job not in must), key=lambda job: -job.given_way)
        active = must + (rest[: max(0, room)] if box.prompts else rest)
        for job in box.phases:
            if job in active:
                box.taken[job] = 1
            else:
                job.given_way += 1
                job.preempted += 1

    def iteration_seconds(self, box: Box) -> float:
        row = self.cluster.rows[self.cluster.machines[box.index].model_row]
        active = [job for job in box.taken if job in box.phases]
        read = float(sum(job.context for job in active))
        prompts = [job for job in box.taken if job in box.prompts]
        if not prompts:
            return token_seconds(row, float(len(active)), read)
        tokens = float(sum(box.taken[job] for job in prompts))
        return mixed_seconds(row, tokens, float(len(prompts)), float(len(active)), read)

    def push_layers(self, box: Box, seconds: float) -> None:
        for job in (job for job in box.prompts if job in box.taken):
            away = (
                job.prompt_stage == "computing" and job.token_stage == "reserved" and job.pair[1] != box.index
            )
            if away and job.context >= self.cluster.serialized_below_tokens:
                size = box.taken[job] * self.cluster.token_bytes
                end, speed = self.occupy(job, size, self.now + seconds / self.cluster.layers)
                end = max(end, self.now + seconds + size / self.cluster.layers / speed)
                visible = self.cluster.machines[box.index].visible_seconds
                job.receipt = end + visible + self.cluster.hand_over_seconds

    def occupy(self, job: Job, size: int, ready: float) -> tuple[float, float]:
        source, target = (self.boxes[index] for index in job.pair)
        speed = min(self.cluster.machines[index].link_bytes for index in job.pair)
        end = max(ready, source.sends_from, target.receives_from) + size / speed
        source.sends_from = target.receives_from = end
        return end, speed

    def end_iteration(self, box: Box) -> None:
        box.state = "between"
        taken, box.taken = box.taken, {}
        phases = [job for job in box.phases if job in taken]
        for job in [job for job in box.prompts if job in taken]:
            job.pending -= taken[job]
            if job.pending == 0:
                self.prompt_made(box, job)
                box.prompts.remove(job)
        for job in phases:
            job.made += 1
            job.tokens_at.append(self.now)
            self.tell(box, ev.TokensMade(self.now, job.name, job.attempt, 1))
            if job.made == job.output:
                self.over(box, job, ev.AttemptFinished(self.now, job.name, job.attempt))
        box.phases = [job for job in box.phases if not job.ended]
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
            self.tell(box, ev.TokensMade(self.now, job.name, job.attempt, 1))
            if job.made == job.output:
                self.over(box, job, ev.AttemptFinished(self.now, job.name, job.attempt))
            else:
                job.token_stage = "resident"
                box.phases.append(job)
            return
        job.prompt_stage = "computed"
        if job.made == job.output:
            self.over(box, job, ev.FirstTokenMade(self.now, job.name, job.attempt, finishes=True))
            return
        self.tell(box, ev.FirstTokenMade(self.now, job.name, job.attempt))
        if job.pair[1] == box.index:
            self.received(job)
            return
        if context < self.cluster.serialized_below_tokens:
            size = context * self.cluster.token_bytes
            job.receipt = self.occupy(job, size, self.now)[0] + self.cluster.hand_over_seconds
        heapq.heappush(self.heap, (max(job.receipt, self.now), RECEIPT, job.number, job.attempt))

    def received(self, job: Job) -> None:
        source, target = (self.boxes[index] for index in job.pair)
        job.prompt_stage, job.token_stage = "", "resident"
        target.phases.append(job)
        self.give_back(source, job.prompt_blocks)
        self.tell(target, ev.KvReceived(self.now, job.name, job.attempt))
        self.wake(target)

    # ---- failures

    def lose(self, box: Box) -> None:
        for other in self.boxes:
            self.deliver(other)
        if not box.alive:
            return
        for job in [*box.wait, *box.prompts, *box.phases]:
            job.token_stage = "" if job.pair[1] == box.index else job.token_stage
        for job in self.jobs:
            if job.prompt_stage and job.pair[0] == box.index:
                job.prompt_stage = ""
            if job.token_stage and job.pair[1] == box.index:
                job.token_stage = ""
        box.wait, box.prompts, box.phases, box.outbox, box.taken = [], [], [], [], {}
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
