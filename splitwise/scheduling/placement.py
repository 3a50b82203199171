"""Putting requests on machines and taking them off: the bridge from requests to kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from splitwise.scheduling import arrays, candidates, policies, reasons
from splitwise.scheduling.decisions import Assign, MovePool
from splitwise.scheduling.events import Pool
from splitwise.scheduling.prefix import PrefixIndex
from splitwise.scheduling.requests import Hold, Request
from splitwise.scheduling.states import RequestInput

if TYPE_CHECKING:
    from splitwise.scheduling.arrays import Int64s
    from splitwise.scheduling.decisions import Decision
    from splitwise.scheduling.fleet import Fleet, Machine
    from splitwise.scheduling.settings import SchedulerSettings


def microseconds(seconds: float) -> int:
    """Return a moment or duration as the kernels count it."""
    return round(seconds * 1e6)


class Placement:
    """Chooses pairs, books what they hold in the arrays, and gives it back."""

    def __init__(self, fleet: Fleet, settings: SchedulerSettings) -> None:
        self.serial = 0
        self._fleet = fleet
        self.prefixes = PrefixIndex(settings.prefix_blocks_per_machine)
        self.use(settings)

    def use(self, settings: SchedulerSettings) -> None:
        """Decide by these settings from now on; what runs keeps its place."""
        self._settings = settings
        self._hold_us = microseconds(settings.borrow_hold)
        self._limits = policies.new_limits(
            settings.policy, settings.queue_tokens, settings.last_resort_tokens, settings.seed
        )
        self._notes = candidates.new_notes() if settings.explain else candidates.NO_NOTES
        self._uses_prefixes = settings.policy == "prefix-aware"

    def sizes(self, request: Request) -> tuple[int, int, int]:
        """KV blocks for the prompt, for the token phase at first, and at its longest."""
        per_block = request.group.block_tokens
        context, remaining = request.context, request.remaining
        prompt = -(-context // per_block)
        if remaining <= 1:  # the first token is the last: no token phase
            return prompt, 0, 0
        first = -(-(context + min(remaining, self._settings.reserve_output_tokens)) // per_block)
        return prompt, first, -(-(context + remaining) // per_block)

    def ever_fits(self, request: Request) -> bool:
        """Whether the request would fit if nothing else ran."""
        prompt, _, most = self.sizes(request)
        return request.group.ever_fits(prompt, most)

    def place(self, request: Request, now: float) -> list[Decision] | None:
        """Assign the request to a pair and return the decisions, or None when it must wait."""
        sizes = self.sizes(request)
        choice = self._choose(request, sizes, microseconds(now))
        prompt, token = self._fleet.by_slot[choice[0]], self._fleet.by_slot[choice[1]]
        if choice[0] < 0 or prompt is None or token is None:
            return None
        prompt_blocks, token_blocks, _ = sizes
        weighed = candidates.NOTHING
        if self._settings.explain:
            weighed = candidates.pack(self._notes, self._fleet.names)
        decisions: list[Decision] = []
        self.serial += 1
        request.advance(RequestInput.PLACE)
        request.attempt += 1
        request.serial = self.serial
        request.first_seen = False
        request.avoid.clear()
        request.prompt = Hold(prompt, choice[4], prompt_blocks)
        prompt.open[self.serial] = request
        if prompt.pool is Pool.TOKEN:
            decisions.append(self._borrow(prompt))
        if token_blocks:
            request.token = Hold(token, 0, token_blocks)
            token.open[self.serial] = request
            if token.pool is Pool.PROMPT:
                decisions.append(self._borrow(token))
        if self._uses_prefixes and request.prefix_hashes:
            self.prefixes.remember(prompt.slot, request.prefix_hashes)
        reason = reasons.ASSIGN[self._settings.policy, choice[2], choice[3]]
        names = (prompt.spec.machine_id, token.spec.machine_id)
        decisions.append(Assign(reason, request.request_id, request.attempt, *names, self.serial, weighed))
        return decisions

    def prompt_computed(self, request: Request) -> None:
        """Book the prompt as computed; its KV stays on the prompt machine."""
        hold = request.prompt
        if hold is not None and hold.running:
            hold.running = False
            arrays.end_prompt(self._fleet.state, hold.machine.slot, hold.tokens)

    def release_prompt(self, request: Request) -> None:
        """Give back all that the attempt holds on its prompt machine."""
        self.prompt_computed(request)
        hold, request.prompt = request.prompt, None
        if hold is not None:
            arrays.change_kv(self._fleet.state, hold.machine.slot, -hold.blocks)
            if request.token is None or request.token.machine is not hold.machine:
                del hold.machine.open[request.serial]

    def release_token(self, request: Request) -> None:
        """Give back all that the attempt holds on its token machine."""
        hold, request.token = request.token, None
        if hold is not None:
            arrays.end_token(self._fleet.state, hold.machine.slot, hold.blocks)
            if request.prompt is None or request.prompt.machine is not hold.machine:
                del hold.machine.open[request.serial]

    def grow(self, request: Request) -> None:
        """Promise more KV when the output has outgrown what was promised."""
        hold = request.token
        if hold is None:
            return
        needed = hold.machine.blocks(request.context)
        if needed > hold.blocks:
            arrays.change_kv(self._fleet.state, hold.machine.slot, needed - hold.blocks)
            hold.blocks = needed

    def send_home(self, machine: Machine, now: float) -> MovePool | None:
        """Return a borrowed machine to its home pool if it is time to."""
        if machine.slot not in self._fleet.borrowed or not arrays.wants_home(
            self._fleet.state, machine.slot, self._hold_us, microseconds(now)
        ):
            return None
        source = machine.pool
        self._fleet.move(machine, machine.spec.home)
        return MovePool(reasons.RETURN, machine.spec.machine_id, source, machine.pool)

    def forget(self, machine: Machine) -> None:
        """Forget which prefixes a lost machine held."""
        self.prefixes.forget_machine(machine.slot)

    def _choose(
        self, request: Request, sizes: tuple[int, int, int], now_us: int
    ) -> tuple[int, int, int, int, int]:
        """Ask the kernel, first without the pair that just failed."""
        state = self._fleet.state
        shunned = [slot for slot in request.avoid if state.machines[arrays.POSITION, slot] != arrays.NONE]
        asked = (state, self._limits, request.group.index, request.context, *sizes, self.serial + 1, now_us)
        if shunned:
            for slot in shunned:
                arrays.leave(state, slot)
            choice = policies.place_pair(*asked, policies.NO_HINTS, self._notes)
            for slot in shunned:
                arrays.enter(state, slot)
            if choice[0] != arrays.NONE:
                return choice
        hints = self._hints(request) if self._uses_prefixes and request.prefix_hashes else []
        rows: Int64s = np.array(hints, np.int64) if hints else policies.NO_HINTS
        return policies.place_pair(*asked, rows, self._notes)

    def _hints(self, request: Request) -> list[tuple[int, int]]:
        """Return (slot, cached tokens) for machines that hold the start of the prompt."""
        hints = []
        for slot, blocks in self.prefixes.find(request.prefix_hashes):
            machine = self._fleet.by_slot[slot]
            serving = self._fleet.state.machines[arrays.POSITION, slot] != arrays.NONE
            if serving and machine and machine.group is request.group and machine.pool is not Pool.TOKEN:
                hints.append((slot, min(blocks * request.group.block_tokens, request.context)))
        return hints

    def _borrow(self, machine: Machine) -> MovePool:
        source = machine.pool
        self._fleet.move(machine, Pool.MIXED)
        return MovePool(reasons.BORROW, machine.spec.machine_id, source, Pool.MIXED)
