"""The machine scheduler (MLS): what one engine computes in its next iteration.

The rules (Splitwise paper, section IV-B), pure and without a clock:

- Prompts run first come first served, together at most `max_batch_tokens` tokens; one
  that is longer than a batch is computed in chunks.
- Token phases batch as much as memory allows. Beside prompts they take the tokens that
  are left, those that were preempted most often first: priority grows with age.
- KV blocks are taken as the output grows, since its length is unknown. When none is free,
  the token phase that was preempted least (the newest among equals) gives its blocks up
  and is computed again later.
- *Preempted* is a token phase on the machine that does not run in an iteration: it sat out
  or was evicted. Nobody is preempted more than `max_preemptions` times. The last one is
  kept for an eviction, after which the request returns with all the memory that it can
  ever need; so whoever may not be preempted any more cannot be short of memory either.
- Memory is given in order of arrival and nobody overtakes, so nothing starves.

`form_batch` and `pick_victim` are kernels over plain arrays; `MachineScheduler` keeps the
books of one machine around them.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling.arrays import NONE
from splitwise.scheduling.compiled import compiled

if TYPE_CHECKING:
    from splitwise.scheduling.arrays import Int64s


@compiled
def form_batch(
    pending: Int64s, preempted: Int64s, max_tokens: int, may_sit_out: int, chunked: bool, take: Int64s
) -> int:
    """Choose how many tokens each sequence computes; returns how many token phases sit out.

    The sequences are in order of arrival. `pending` holds the prompt tokens still to be
    computed, 0 in the token phase; `preempted` how often each was preempted; whoever reached
    `may_sit_out` runs in any case. Written to `take`: tokens to compute, 0 for who sits out.
    `chunked` false: a first prompt longer than a batch is taken whole, as SplitwiseSim does.
    """
    count = pending.shape[0]
    room = max_tokens
    prompts = 0
    for k in range(count):
        take[k] = 0
        if pending[k] == 0 and preempted[k] >= may_sit_out:
            take[k] = 1
            room -= 1
        prompts += pending[k] > 0
    first = True
    for k in range(count):
        if pending[k] == 0:
            continue
        tokens = pending[k]
        if first and (not chunked or tokens > room):
            tokens = max(1, min(tokens, room)) if chunked else tokens
        elif tokens > room:
            break
        take[k] = tokens
        room -= tokens
        first = False
    sat_out = 0
    for level in range(may_sit_out - 1, -1, -1):
        for k in range(count):
            if pending[k] == 0 and preempted[k] == level:
                if prompts == 0 or room > 0:
                    take[k] = 1
                    room -= 1
                else:
                    sat_out += 1
    return sat_out


@compiled
def pick_victim(preempted: Int64s, evictable: Int64s, newer_than: int) -> int:
    """Return which token phase gives up its memory, or NONE.

    Among the `evictable` (1) that came after index `newer_than`: the least preempted, and
    of those the newest.
    """
    victim = NONE
    for k in range(newer_than + 1, preempted.shape[0]):
        if evictable[k] and (victim == NONE or preempted[k] <= preempted[victim]):
            victim = k
    return victim


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """What one machine can do. Defaults are those of the paper and of SplitwiseSim."""

    kv_blocks: int
    block_tokens: int = 16
    max_batch_tokens: int = 2048
    max_running: int = 512
    max_preemptions: int = 4

    def __post_init__(self) -> None:
        """Refuse limits under which something could starve."""
        if min(self.kv_blocks, self.block_tokens, self.max_running) < 1 or self.max_preemptions < 0:
            message = f"{self}: blocks and requests must be 1 or more, preemptions 0 or more"
            raise ValueError(message)
        if self.max_running >= self.max_batch_tokens:
            message = (
                f"max_running is {self.max_running}: it must be below max_batch_tokens"
                f" ({self.max_batch_tokens}), or token phases could leave no room for a prompt"
            )
            raise ValueError(message)


class Stage(Enum):
    """Where work stands on the machine. All but WAITING hold memory."""

    WAITING = "waiting"  # for memory
    ARRIVING = "arriving"  # for its KV cache from the prompt machine
    RUNNING = "running"
    COMPUTED = "computed"  # a prompt whose KV cache is still to be handed over


@dataclass(slots=True)
class Work:
    """One request's work on this machine; `known` tokens, of which `computed` are in the KV.

    The first `prompt` of them are computed as a prompt: all known ones after an eviction.
    """

    key: str
    serial: int
    known: int
    most: int  # tokens at the longest
    stays: bool  # the token phase runs here
    arrives: bool  # its KV comes from a prompt machine
    prompt: int
    computed: int = 0
    stage: Stage = Stage.WAITING
    blocks: int = 0
    preemptions: int = 0

    @property
    def decoding(self) -> bool:
        """Whether its prompt is computed, so that an iteration makes one token."""
        return self.computed >= self.prompt


@dataclass(frozen=True, slots=True)
class Batch:
    """One iteration: (key, tokens to compute) each, and who does not run though it was here."""

    parts: tuple[tuple[str, int], ...]
    sat_out: tuple[str, ...]
    evicted: tuple[str, ...]  # their KV is given up; it is computed again when memory is there


@dataclass(slots=True)
class MachineScheduler:
    """The queues and the memory of one machine."""

    limits: MachineLimits
    free: int = field(init=False)
    _works: dict[str, Work] = field(init=False, default_factory=dict)
    _waiting: list[tuple[int, str]] = field(init=False, default_factory=list)
    _serial: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Start with all memory free."""
        self.free = self.limits.kv_blocks

    def work(self, key: str) -> Work:
        """Return work by its key, for reading; KeyError when there is none."""
        return self._works[key]

    def add_prompt(self, key: str, prompt_tokens: int, max_tokens: int, *, stays: bool = False) -> None:
        """Queue a prompt; `stays` when its token phase runs here as well.

        Raises ValueError when the key is in use or the memory could never hold it.
        """
        self._add(key, prompt_tokens, prompt_tokens + (max_tokens if stays else 1), stays=stays)

    def add_token(self, key: str, context_tokens: int, max_tokens: int) -> None:
        """Queue a token phase whose KV will arrive; raises ValueError as `add_prompt` does."""
        self._add(key, context_tokens, context_tokens + max_tokens, stays=True, arrives=True)

    def admit(self) -> list[str]:
        """Give memory to who waits, in order of arrival; returns who has it now."""
        admitted = []
        places = self.limits.max_running - sum(
            work.stage in (Stage.RUNNING, Stage.ARRIVING) for work in self._works.values()
        )
        while self._waiting and places > 0:
            work = self._works[self._waiting[0][1]]
            blocks = self._blocks(work.most if self._kept(work) else work.known + 1)
            if blocks > self.free:
                break
            self._waiting.pop(0)
            self._take(work, blocks)
            work.stage = Stage.ARRIVING if work.arrives else Stage.RUNNING
            admitted.append(work.key)
            places -= 1
        return admitted

    def ready(self, key: str) -> None:
        """The KV of a token phase is here, and the first token with it."""
        work = self._works[key]
        work.arrives = False
        work.computed = work.known
        work.known += 1
        work.stage = Stage.RUNNING

    def next_batch(self) -> Batch:
        """Admit, make room for every token phase's next token, and choose what runs."""
        self.admit()
        evicted = self._make_room()
        running = self._running()
        pending = np.array([max(0, w.prompt - w.computed) for w in running], np.int64)
        preempted = np.array([w.preemptions for w in running], np.int64)
        take = np.zeros(len(running), np.int64)
        form_batch(pending, preempted, self.limits.max_batch_tokens, self._may_sit_out, True, take)
        sat_out = [w for w, tokens in zip(running, take, strict=True) if w.decoding and not tokens]
        for work in sat_out:
            work.preemptions += 1
        parts = tuple((w.key, int(n)) for w, n in zip(running, take, strict=True) if n)
        return Batch(parts, tuple(w.key for w in sat_out), tuple(evicted))

    def complete(self, batch: Batch) -> list[str]:
        """Book a computed batch; returns whose token was made (a prompt's last chunk makes one)."""
        made = []
        for key, tokens in batch.parts:
            work = self._works.get(key)
            if work is None:  # cancelled meanwhile
                continue
            work.computed += tokens
            if work.computed == work.known:
                made.append(key)
                work.known += 1
                if not work.stays:
                    work.stage = Stage.COMPUTED
        return made

    def finish(self, key: str) -> None:
        """Free all that a request holds: it ended, was cancelled, or its KV is handed over."""
        work = self._works.pop(key)
        if work.stage is Stage.WAITING:
            self._waiting.remove((work.serial, key))
        self.free += work.blocks

    @property
    def _may_sit_out(self) -> int:
        return max(0, self.limits.max_preemptions - 1)

    def _kept(self, work: Work) -> bool:
        """Whether it may not be evicted (any more) and so gets all its memory at once."""
        return work.stays and work.preemptions >= self.limits.max_preemptions

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_tokens)

    def _take(self, work: Work, blocks: int) -> None:
        self.free -= blocks - work.blocks
        work.blocks = blocks

    def _running(self) -> list[Work]:
        return sorted(
            (work for work in self._works.values() if work.stage is Stage.RUNNING), key=lambda w: w.serial
        )

    def _add(self, key: str, known: int, most: int, *, stays: bool, arrives: bool = False) -> None:
        if key in self._works:
            message = f"work {key!r} is already on this machine"
            raise ValueError(message)
        if self._blocks(most) > self.limits.kv_blocks:
            message = (
                f"work {key!r} may grow to {most} tokens, {self._blocks(most)} KV blocks:"
                f" this machine has {self.limits.kv_blocks}"
            )
            raise ValueError(message)
        self._serial += 1
        self._works[key] = Work(key, self._serial, known, most, stays, arrives, known)
        self._waiting.append((self._serial, key))

    def _make_room(self) -> list[str]:
        """Take the blocks that the next tokens need, the oldest first; returns who was evicted for it."""
        evicted: list[str] = []
        running = self._running()
        preempted = np.array([w.preemptions for w in running], np.int64)
        evictable = np.array([w.decoding and not self._kept(w) for w in running], np.int64)
        for place, work in enumerate(running):
            needed = self._blocks(min(work.known + 1, work.most))
            while work.stage is Stage.RUNNING and needed > work.blocks:
                if needed - work.blocks <= self.free:
                    self._take(work, needed)
                    break
                victim = int(pick_victim(preempted, evictable, place))
                victim = place if victim == NONE else victim
                evictable[victim] = 0
                evicted.append(running[victim].key)
                self._evict(running[victim])
        return evicted

    def _evict(self, work: Work) -> None:
        self._take(work, 0)
        work.computed, work.prompt = 0, work.known
        work.preemptions += 1
        work.stage = Stage.WAITING
        insort(self._waiting, (work.serial, work.key))
