"""The engines attached to this daemon: their memory, and how far their layers have come."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from services.kvd.mapping import KvMapping
    from services.kvd.ucx import Registration, Ucx
    from splitwise.kv.geometry import Geometry
    from splitwise.rpc.v1.kvd_pb2 import DaemonMessage, PushEntry, PushPlan

MAX_OPEN_PLANS = 1024


@dataclass(slots=True)
class _Plan:
    base: int
    entries: list[PushEntry]
    layers_seen: int = 0
    begun: bool = False


@dataclass(slots=True)
class LayerProgress:
    """Turns an engine's layer counter into "this layer of this entry is written".

    The counter and the plans come on two descriptors, so either may be seen first; the counter
    is absolute, so the order does not matter. A plan whose pass broke off is superseded by
    the next one, which begins at a later count.
    """

    layers: int
    counted: int = 0
    _plans: deque[_Plan] = field(default_factory=deque)

    def add_plan(self, plan: PushPlan) -> None:
        """Take the plan of a pass that begins; raises `ValueError` when there are too many."""
        if len(self._plans) >= MAX_OPEN_PLANS:
            raise ValueError(f"{MAX_OPEN_PLANS} push plans are open: layers were not announced")
        self._plans.append(_Plan(plan.progress_base, list(plan.entries)))

    def count(self, layers: int) -> None:
        """Take increments of the counter."""
        self.counted += layers

    def events(self) -> Iterator[tuple[int | None, PushEntry]]:
        """Yield (layer, entry) for each layer that became complete, in the order of the passes.

        A pass opens with (None, entry) for each of its entries, after the last layer of the
        pass before it: a restart must not precede what was written before it.
        """
        while self._plans:
            plan = self._plans[0]
            if not plan.begun:
                plan.begun = True
                for entry in plan.entries:
                    yield None, entry
            end = self._plans[1].base if len(self._plans) > 1 else self.counted
            done = min(self.layers, min(end, self.counted) - plan.base)
            while plan.layers_seen < done:
                layer = plan.layers_seen
                plan.layers_seen += 1
                for entry in plan.entries:
                    yield layer, entry
            superseded = len(self._plans) > 1 and self.counted >= end
            if plan.layers_seen < self.layers and not superseded:
                return
            self._plans.popleft()


@dataclass(eq=False, slots=True)
class EngineMemory:
    """The KV memory of one engine, mapped and known to UCX."""

    geometry: Geometry
    mapping: KvMapping
    registration: Registration
    retired: list[Registration] = field(default_factory=list)
    reads_in_flight: int = 0  # puts from this memory that UCX has not finished
    late_writers: bool = False  # a peer may hold old addresses and never confirmed that it stopped

    def fence(self, ucx: Ucx) -> None:
        """Make the addresses and the remote key that peers hold worthless."""
        self.mapping.fence()
        self.late_writers = True
        self.retired.append(self.registration)
        self.registration = ucx.register(self.mapping.address, self.mapping.nbytes, self.mapping.kind)
        self.release_retired()

    def begin_read(self) -> None:
        """A put from this memory is posted."""
        self.reads_in_flight += 1

    def end_read(self) -> None:
        """A put from this memory is over."""
        self.reads_in_flight -= 1
        self.release_retired()

    def release_retired(self) -> None:
        """Deregister what is not used any more, once no put reads from it."""
        if self.reads_in_flight == 0:
            for registration in self.retired:
                registration.close()
            self.retired.clear()

    def close(self) -> None:
        """Let go of the memory now; UCX lets go when its last put has ended."""
        self.retired.append(self.registration)
        self.mapping.close(late_writers=self.late_writers or self.reads_in_flight > 0)
        self.release_retired()


class EngineSession(Protocol):
    """A connection of an engine."""

    def send(self, message: DaemonMessage) -> None:
        """Send now or when the engine reads again."""

    def read(self) -> None:
        """Take what the engine has sent."""

    def close(self, why: str) -> None:
        """End it; idempotent."""


@dataclass(eq=False, slots=True)
class Engine:
    """One attached engine: one session with memory, perhaps others that only send."""

    engine_id: str
    incarnation: int
    memory: EngineMemory
    layers_fd: int
    progress: LayerProgress
    sessions: list[EngineSession] = field(default_factory=list)
    gone: bool = False

    def tell(self, message: DaemonMessage) -> None:
        """Send a notice to every session of the engine."""
        for session in list(self.sessions):
            session.send(message)

    def hang_up(self, why: str) -> None:
        """End every session: each side of the engine then knows that its memory is not touched any more."""
        sessions, self.sessions = self.sessions, []
        for session in sessions:
            session.close(why)

    def read_counter(self) -> None:
        """Take what the engine added to its layer counter."""
        with suppress(BlockingIOError):
            self.progress.count(os.eventfd_read(self.layers_fd))

    def view(self, layer: int, block: int) -> memoryview:
        """Return the bytes of one block of one layer."""
        geometry = self.memory.geometry
        return self.memory.mapping.view(geometry.offset(layer, block), geometry.block_bytes_per_layer)


@dataclass(slots=True)
class Counters:
    """What this daemon has done since it started."""

    delivered: int = 0
    failed: int = 0
    bytes_pushed: int = 0
    puts: int = 0
    grants: int = 0
    revokes: int = 0
    fences: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def reject(self, cause: str) -> None:
        """Count one refusal under its cause."""
        self.rejected[cause] = self.rejected.get(cause, 0) + 1
