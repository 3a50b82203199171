"""The naive simulator's machines behind the live router's dispatcher.

`ThroughDispatcher` steps machines as `Naive` does, but what they say goes as protobuf messages
into a real `Dispatcher` on a clock of the test, and they do what its links are told to start and
to cancel. Only sockets and engines are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.dispatcher import Dispatcher
from services.router.session import Admitted
from splitwise.config import RouterSettings
from splitwise.requests import complete_sampling
from splitwise.rpc.v1 import machine_pb2 as pb
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    MachineDescription,
    MachineIdentity,
    SamplingParams,
)
from splitwise.scheduling import events as ev
from splitwise.text import ByteVocabulary
from tests.property.sim.naive import Box, Naive

if TYPE_CHECKING:
    from splitwise.scheduling.settings import SchedulerSettings
    from splitwise.sim.setup import Cluster

    Command = tuple[int, pb.StartPrompt | pb.StartToken | pb.CancelWork, str]


class Link:
    """A machine's control streams: what the router says is kept in order."""

    def __init__(self, box: Box, commands: list[Command]) -> None:
        name = str(box.index)
        self.description = MachineDescription(
            identity=MachineIdentity(machine_id=name, incarnation=box.incarnation), engine_id=name
        )
        self.load, self.load_at, self.heard_at, self.accepted_serial = None, 0.0, 0.0, 0
        self.index = box.index
        self.commands = commands

    def start_token(self, start: pb.StartToken) -> None:
        self.commands.append((self.index, start, "token"))

    def start_prompt(self, start: pb.StartPrompt) -> None:
        self.commands.append((self.index, start, "prompt"))

    def order_power(self, order: pb.PowerOrder) -> None:
        """Power does not matter here."""

    def cancel(self, phase: ev.Phase, cancel: pb.CancelWork) -> None:
        self.commands.append((self.index, cancel, phase.value))


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


class ThroughDispatcher(Naive):
    """`clock` is the router's."""

    def __init__(self, cluster: Cluster, settings: SchedulerSettings, clock: Clock) -> None:
        self.clock = clock
        self.dispatcher = Dispatcher(RouterSettings(message_gap_ms=0), settings)
        self.links: dict[int, Link] = {}
        self.commands: list[Command] = []
        self.numbers: dict[str, int] = {}  # the router's request id -> ours
        super().__init__(cluster, settings)

    # ---- what machines and clients say

    def handle(self, event: ev.Event) -> None:
        self.scheduler, self.clock.now = self.dispatcher.scheduler, self.now
        if isinstance(event, ev.RequestArrived):
            self.submit(event)
        elif isinstance(event, ev.MachineJoined):
            link = self.links[int(event.machine.machine_id)] = Link(
                self.boxes[int(event.machine.machine_id)], self.commands
            )
            assert self.dispatcher.join(link, event.machine) is None  # type: ignore[arg-type]
        elif isinstance(event, ev.MachineLost):
            self.dispatcher.lose(self.links[int(event.machine_id)], event.reason)  # type: ignore[arg-type]
        elif isinstance(event, ev.Tick):
            self.dispatcher.tick()
        else:
            self.say(event)
        self.obey()
        self.note_borrowed()

    def submit(self, event: ev.RequestArrived) -> None:
        sampling = complete_sampling(
            SamplingParams(max_tokens=event.max_tokens, ignore_eos=True), room=event.max_tokens
        )
        admitted = Admitted(
            "m",
            "",
            [1] * event.prompt_tokens,
            sampling,
            [],
            ByteVocabulary().detokenizer(),
            0,
            None,
            self.now,
        )
        session = self.dispatcher.submit(admitted, self.cluster.block_tokens)
        self.numbers[session.request_id] = int(event.request_id)

    def say(self, event: ev.Event) -> None:
        """Send a machine's message about a request."""
        assert isinstance(event, ev.AttemptEvent)
        job = self.jobs[int(event.request_id)]
        name = next(name for name, number in self.numbers.items() if number == job.number)
        ref = pb.WorkRef(request_id=name, attempt=event.attempt)
        phase = ev.Phase.TOKEN
        if isinstance(event, ev.KvReceived):
            message = pb.MachineEvent(kv_received=pb.KvReceived(work=ref))
        else:
            ended = isinstance(event, ev.AttemptFinished) or (
                isinstance(event, ev.FirstTokenMade) and event.finishes
            )
            tokens = pb.Tokens(
                work=ref,
                ids=[] if isinstance(event, ev.AttemptFinished) else [97],
                finish=FINISH_REASON_STOP if ended else FINISH_REASON_UNSPECIFIED,
            )
            message = pb.MachineEvent(tokens=tokens)
            if isinstance(event, ev.FirstTokenMade):
                phase = ev.Phase.PROMPT
        link = self.links[job.pair[phase is ev.Phase.TOKEN]]
        self.dispatcher.take(link, phase, pb.MachineEvents(events=[message]))  # type: ignore[arg-type]

    # ---- what the router says

    def obey(self) -> None:
        """Do what the links were told, in order; a pair's token machine is told first."""
        commands, self.commands[:] = list(self.commands), []
        tokens: dict[tuple[str, int], int] = {}
        for index, command, phase in commands:
            work = command.work
            job = self.jobs[self.numbers.get(work.request_id, len(self.jobs) - 1)]
            if isinstance(command, pb.CancelWork):
                if job.attempt == work.attempt:
                    self.cancel(job, ev.Phase(phase))
            elif isinstance(command, pb.StartToken):
                tokens[work.request_id, work.attempt] = index
            else:
                assert len(command.token_ids) == job.context
                job.restarts += work.attempt > 1
                token = tokens.get((work.request_id, work.attempt))
                pair = (index, index if token is None else token)
                self.begin(job, work.attempt, pair, token_phase=token is not None)
