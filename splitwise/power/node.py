"""One node's power: which limit each of its GPUs has, and why.

A state machine: `NodePower.handle(event)` returns what to do. Whoever carries a `SetLimit`
out reads the GPU's limit back and says so with `LimitRead`, whether or not setting worked;
until then nothing is taken for done. Three rules:

- A cap is lifted at once and set late: a token machine that was borrowed for prompts is
  capped again when it has been back for `recap_after` seconds, so that a machine that comes
  and goes is not slowed down each time. A share of the budget is kept at once, always.
- Where machines share a GPU, the highest of their limits counts.
- A GPU that no machine claims (released, or silent for its lease) gets its previous limit. A
  change that somebody else makes then is the new previous limit; one that is made while a
  machine claims the GPU is undone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from splitwise.power import events as ev
from splitwise.power.budget import Demand, share_out
from splitwise.power.caps import Caps, GpuRange, Role

if TYPE_CHECKING:
    from collections.abc import Iterator

TOLERANCE = 0.5  # watts: drivers round
RETRY_S = 5.0  # how soon a limit that did not take effect is set again
_ROLE_REASONS = {
    Role.PROMPT: ev.PROMPT_CAP,
    Role.TOKEN: ev.TOKEN_CAP,
    Role.MIXED: ev.MIXED_CAP,
    Role.BORROWED: ev.BORROWED,
}


@dataclass(slots=True)
class _Gpu:
    range: GpuRange
    limit: float  # as last read
    reason: str = ev.RETURNED
    asked: float | None = None  # what was decided last
    asked_at: float = -math.inf
    owed: bool = False  # we may have changed it, and have not seen the previous limit again


@dataclass(slots=True)
class _Claim:
    machine_id: str
    incarnation: int
    gpus: tuple[str, ...]
    role: Role
    share: float | None
    expires: float
    held_role: Role | None = None  # its earlier role, which counts until `held_until`
    held_until: float = 0.0


@dataclass(frozen=True, slots=True)
class _Target:
    watts: float
    reason: str


class NodePower:
    """The GPUs of one node and the machines that claim them."""

    def __init__(self, caps: Caps, *, recap_after: float = 2.0) -> None:
        self._caps = caps
        self._recap_after = recap_after
        self._gpus: dict[str, _Gpu] = {}
        self._claims: dict[str, _Claim] = {}
        self._suspended = False
        self._noted: set[tuple[str, str]] = set()

    def use(self, caps: Caps, *, recap_after: float) -> None:
        """Decide by these settings from the next event on."""
        self._caps, self._recap_after = caps, recap_after

    # ---- what is so now

    @property
    def suspended(self) -> bool:
        """Whether an operator has asked for the previous limits."""
        return self._suspended

    @property
    def machines(self) -> dict[str, Role]:
        """The machines that claim GPUs, and what they do."""
        return {name: claim.role for name, claim in self._claims.items()}

    def owes(self, uuid: str) -> bool:
        """Whether the GPU's previous limit has yet to be given back, now or later."""
        return uuid in self._gpus and self._gpus[uuid].owed

    def previous(self, uuid: str) -> float:
        """The limit that a GPU gets back, in watts."""
        return self._gpus[uuid].range.previous

    def limit(self, uuid: str) -> float:
        """The limit that a GPU had when it was last read, in watts; the same again is no news."""
        return self._gpus[uuid].limit

    def requested(self, uuid: str) -> tuple[float, str]:
        """The limit that a GPU shall have, in watts, and why."""
        gpu = self._gpus[uuid]
        return (gpu.range.ceiling if gpu.asked is None else gpu.asked), gpu.reason

    def accepts(self, machine_id: str, incarnation: int) -> bool:
        """Whether a claim of this incarnation is not older than the one that is known."""
        known = self._claims.get(machine_id)
        return known is None or known.incarnation <= incarnation

    def wishes(self, gpus: tuple[str, ...], role: Role) -> float:
        """Return what these GPUs take in a role when there is no budget, in watts together."""
        found = [self._gpus[uuid].range for uuid in gpus if uuid in self._gpus]
        return sum(one.limit(self._caps.of(role)) for one in found)

    def wanted(self, machine_id: str) -> float:
        """Return what a machine would have now without a budget, in watts of all its GPUs."""
        claim = self._claims.get(machine_id)
        return 0.0 if claim is None else self.wishes(claim.gpus, claim.held_role or claim.role)

    def least(self, gpus: tuple[str, ...]) -> float:
        """Return the least that these GPUs can be set to, in watts together."""
        return sum(self._gpus[uuid].range.floor for uuid in gpus if uuid in self._gpus)

    # ---- events

    def handle(self, event: ev.Event) -> list[ev.Decision]:
        """Take one event and return what is to be done, each with its reason."""
        notes: list[ev.Decision] = []
        match event:
            case ev.GpuFound():
                owed = abs(event.limit - event.range.ceiling) >= TOLERANCE
                self._gpus[event.uuid] = _Gpu(event.range, event.limit, owed=owed)
            case ev.GpuLost():
                self._gpus.pop(event.uuid, None)
            case ev.Claimed():
                self._claim(event)
            case ev.Released():
                known = self._claims.get(event.machine_id)
                if known is not None and known.incarnation <= event.incarnation:
                    del self._claims[event.machine_id]
            case ev.LimitRead():
                notes += self._read(event)
            case ev.Suspended():
                self._suspended = True
            case ev.Resumed():
                self._suspended = False
        notes += self._expire(event.now)
        return [*notes, *self._decide(event.now)]

    def _claim(self, event: ev.Claimed) -> None:
        if not self.accepts(event.machine_id, event.incarnation):
            return
        known = self._claims.get(event.machine_id)
        claim = _Claim(
            event.machine_id,
            event.incarnation,
            event.gpus,
            event.role,
            event.share,
            event.now + event.lease,
        )
        if known is not None and known.incarnation == event.incarnation:
            before = known.held_role or known.role
            if self.wishes(claim.gpus, before) > self.wishes(claim.gpus, claim.role):
                claim.held_role = before
                began = known.held_role is None
                claim.held_until = event.now + self._recap_after if began else known.held_until
        self._claims[event.machine_id] = claim

    def _read(self, event: ev.LimitRead) -> list[ev.Decision]:
        gpu = self._gpus.get(event.uuid)
        if gpu is None:
            return []
        before, gpu.limit = gpu.limit, event.limit
        if abs(event.limit - gpu.range.ceiling) < TOLERANCE and gpu.reason == ev.RETURNED:
            gpu.owed = False
        if abs(event.limit - before) < TOLERANCE or gpu.asked is None:
            changed = False
        else:  # it was as asked, and is not any more
            changed = abs(before - gpu.asked) < TOLERANCE <= abs(event.limit - gpu.asked)
        if gpu.reason == ev.RETURNED and not gpu.owed:
            gpu.range = replace(gpu.range, previous=event.limit)
            gpu.asked = None
            return []
        if not changed or gpu.asked is None:
            return []
        text = f"its limit was changed from {before:g} W to {event.limit:g} W by somebody else"
        return [ev.Note(ev.CHANGED, event.uuid, f"{text}; it will be set to {gpu.asked:g} W again")]

    def _expire(self, now: float) -> list[ev.Decision]:
        for claim in self._claims.values():
            if claim.held_role is not None and claim.held_until <= now:
                claim.held_role = None
        over = [claim for claim in self._claims.values() if claim.expires <= now]
        for claim in over:
            del self._claims[claim.machine_id]
        text = "it was silent for its lease: its GPUs get their previous limits"
        return [ev.Note(ev.EXPIRED, claim.machine_id, text) for claim in over]

    # ---- decisions

    def _decide(self, now: float) -> list[ev.Decision]:
        targets: dict[str, _Target] = {}
        current: dict[tuple[str, str], str] = {}
        for claim in self._claims.values():
            for uuid, target in self._targets(claim, current):
                other = targets.get(uuid)
                if other is None:
                    targets[uuid] = target
                elif abs(other.watts - target.watts) >= TOLERANCE:
                    targets[uuid] = _Target(max(other.watts, target.watts), ev.SHARED)
        decisions = self._new_notes(current)
        for uuid, gpu in self._gpus.items():
            target = targets.get(uuid, _Target(gpu.range.ceiling, ev.RETURNED))
            if self._suspended:
                target = _Target(gpu.range.ceiling, ev.SUSPENDED)
            gpu.reason = target.reason
            if abs(target.watts - gpu.limit) < TOLERANCE:
                gpu.asked = target.watts
                gpu.owed = gpu.owed and target.reason not in (ev.RETURNED, ev.SUSPENDED)
                continue
            again = gpu.asked is not None and abs(target.watts - gpu.asked) < TOLERANCE
            if again and now - gpu.asked_at < RETRY_S:
                continue
            gpu.asked, gpu.asked_at, gpu.owed = target.watts, now, True
            decisions.append(ev.SetLimit(uuid, target.watts, target.reason))
        return decisions

    def _targets(self, claim: _Claim, current: dict[tuple[str, str], str]) -> Iterator[tuple[str, _Target]]:
        """Yield each GPU of a claim with its limit; what is to be said goes into `current`."""
        role = claim.held_role or claim.role
        cap = self._caps.of(role)
        demands = []
        for uuid in claim.gpus:
            gpu = self._gpus.get(uuid)
            if gpu is None:
                current[ev.UNKNOWN_GPU, uuid] = f"{claim.machine_id} runs on it, and it does not answer here"
                continue
            asked = gpu.range.asked(cap)
            if not gpu.range.floor <= asked <= gpu.range.highest:
                allowed = f"{gpu.range.floor:g} to {gpu.range.highest:g} W"
                text = f"the {role} cap {cap} is {asked:g} W; the device takes {allowed}"
                current[ev.CLAMPED, uuid] = f"{text}: set to {gpu.range.limit(cap):g} W"
            demands.append(Demand(uuid, gpu.range.floor, gpu.range.limit(cap), first_to_give=True))
        total = sum(demand.wanted for demand in demands)
        shares = share_out(total if claim.share is None else claim.share, demands)
        if shares.missing > 0:
            text = f"its share is {claim.share:g} W; its GPUs cannot be set below"
            current[ev.UNMET, claim.machine_id] = f"{text} {sum(d.floor for d in demands):g} W together"
        for demand in demands:
            watts = shares.watts[demand.name]
            if watts < demand.wanted:
                whole = max(demand.floor, math.floor(watts))
                yield demand.name, _Target(whole, ev.BUDGET)
            else:
                yield demand.name, _Target(watts, self._reason(claim, demand))

    def _reason(self, claim: _Claim, demand: Demand) -> str:
        if claim.held_role is not None:
            return ev.HELD
        if claim.role is Role.BORROWED:
            return ev.BORROWED
        uncapped = demand.wanted >= self._gpus[demand.name].range.ceiling
        return ev.UNCAPPED if uncapped else _ROLE_REASONS[claim.role]

    def _new_notes(self, current: dict[tuple[str, str], str]) -> list[ev.Decision]:
        """Return what was not so before; what is over can be said again later."""
        new = [ev.Note(code, subject, text) for (code, subject), text in current.items()
               if (code, subject) not in self._noted]  # fmt: skip
        self._noted = set(current)
        return list(new)
