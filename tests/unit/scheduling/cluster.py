"""Short words for tests that talk to a cluster scheduler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from splitwise.scheduling import arrays
from splitwise.scheduling import events as ev
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.decisions import Assign
from splitwise.scheduling.events import FailureCause, MachineSpec, Phase, Pool
from splitwise.scheduling.settings import SchedulerSettings

if TYPE_CHECKING:
    from splitwise.scheduling.decisions import Decision

D = TypeVar("D", bound="Decision")


class Talk:
    """A scheduler and a clock; every method sends one event and returns the decisions."""

    def __init__(self, machines: str = "", **settings: Any) -> None:
        """`machines` such as "p1 p2 t1": the letter is the home pool, each with 1,000 KV blocks."""
        self.scheduler = ClusterScheduler(SchedulerSettings(**settings))
        self.now = 0.0
        self.sequence = 0
        for name in machines.split():
            self.join(name)

    def send(self, event: ev.Event) -> list[Decision]:
        return self.scheduler.handle(event)

    def spec(self, name: str, **facts: Any) -> MachineSpec:
        home = {"p": Pool.PROMPT, "t": Pool.TOKEN, "m": Pool.MIXED}[name[0]]
        base = {
            "incarnation": 1, "home": home, "model": "m", "kv_fingerprint": "f", "node": "n",
            "kv_blocks": 1000, "block_tokens": 16, "max_running": 64,
        }  # fmt: skip
        return MachineSpec(name, **{**base, **facts})

    def join(self, name: str, **facts: Any) -> list[Decision]:
        return self.send(ev.MachineJoined(self.now, self.spec(name, **facts)))

    def lose(self, name: str, incarnation: int = 1) -> list[Decision]:
        return self.send(ev.MachineLost(self.now, name, incarnation, "stream broke"))

    def drain(self, name: str, *, undo: bool = False) -> list[Decision]:
        return self.send(ev.MachineDrained(self.now, name, "operator", undo=undo))

    def pause(self, name: str, *, undo: bool = False) -> list[Decision]:
        return self.send(ev.MachinePaused(self.now, name, "its daemon is away", undo=undo))

    def arrive(self, name: str, prompt: int = 100, most: int = 50, **facts: Any) -> list[Decision]:
        return self.send(ev.RequestArrived(self.now, name, facts.pop("model", "m"), prompt, most, **facts))

    def assigned(self, name: str, prompt: int = 100, most: int = 50, **facts: Any) -> Assign:
        return one(self.arrive(name, prompt, most, **facts), Assign)

    def first(self, name: str, attempt: int = 1, *, finishes: bool = False) -> list[Decision]:
        return self.send(ev.FirstTokenMade(self.now, name, attempt, finishes))

    def kv(self, name: str, attempt: int = 1) -> list[Decision]:
        return self.send(ev.KvReceived(self.now, name, attempt))

    def tokens(self, name: str, count: int, attempt: int = 1) -> list[Decision]:
        return self.send(ev.TokensMade(self.now, name, attempt, count))

    def finish(self, name: str, attempt: int = 1) -> list[Decision]:
        return self.send(ev.AttemptFinished(self.now, name, attempt))

    def fail(self, name: str, phase: Phase, cause: FailureCause, attempt: int = 1) -> list[Decision]:
        return self.send(ev.AttemptFailed(self.now, name, attempt, phase, cause, "because"))

    def cancel(self, name: str) -> list[Decision]:
        return self.send(ev.RequestCancelled(self.now, name, "gone"))

    def report(
        self, name: str, prompt: int = 0, requests: int = 0, blocks: int = 0, **facts: Any
    ) -> list[Decision]:
        self.sequence = facts.pop("sequence", self.sequence + 1)
        through = facts.pop("through", 0)
        return self.send(
            ev.LoadReported(
                self.now, name, facts.pop("incarnation", 1), self.sequence, prompt, requests, blocks, through
            )
        )

    def tick(self, seconds: float) -> list[Decision]:
        self.now += seconds
        return self.send(ev.Tick(self.now))

    def row(self, name: str, row: int) -> int:
        return int(self.scheduler.fleet.state.machines[row, self.scheduler.fleet.machines[name].slot])

    def idle(self) -> bool:
        """Whether no machine holds anything."""
        rows = [arrays.PROMPT_TOKENS, arrays.OPEN_PROMPTS, arrays.TOKEN_REQUESTS, arrays.KV_OWN]
        return not self.scheduler.fleet.state.machines[rows].any()


def of(decisions: list[Decision], kind: type[D]) -> list[D]:
    return [decision for decision in decisions if isinstance(decision, kind)]


def one(decisions: list[Decision], kind: type[D]) -> D:
    found = of(decisions, kind)
    assert len(found) == 1, f"expected one {kind.__name__} in {decisions}"
    return found[0]
