"""Which machine probably has which prompt prefix cached: a bounded guess.

A request names its full KV blocks by chained hashes (each covers all blocks before it).
The index remembers, per machine, the hashes of the prompts it was given, least recently
used first out. Engines evict by their own rules, so a hit is an estimate, weighed
against the queue by `policies.choose_prompt`, never a promise.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

MOST_HOLDERS = 8
"""Machines considered per request, most recent first, so that a popular prefix stays cheap."""


STRIDE = 4
"""Blocks per remembered hash: prefixes are known to within `STRIDE` blocks."""


class PrefixIndex:
    """Prefix hashes per machine slot, at most `per_machine` each."""

    def __init__(self, per_machine: int, stride: int = STRIDE) -> None:
        self._per_machine = per_machine
        self._stride = stride
        self._of_machine: dict[int, dict[int, None]] = {}  # slot to hashes, oldest first
        self._holders: dict[int, dict[int, None]] = {}  # hash to slots, oldest first

    def __len__(self) -> int:
        return sum(map(len, self._of_machine.values()))

    def remember(self, slot: int, hashes: Sequence[int]) -> None:
        """Note that a machine computes (or already holds) these blocks."""
        mine = self._of_machine.setdefault(slot, {})
        marks = hashes[self._stride - 1 :: self._stride][: self._per_machine]
        for name in reversed(marks):  # the first block is the last to go
            mine.pop(name, None)
            mine[name] = None
            holders = self._holders.setdefault(name, {})
            holders.pop(slot, None)
            holders[slot] = None
        while len(mine) > self._per_machine:
            self._drop(slot, next(iter(mine)))

    def capture(self) -> dict[str, Any]:
        """Return the index as plain JSON values."""
        return {
            "per_machine": self._per_machine,
            "of_machine": [[slot, list(names)] for slot, names in self._of_machine.items()],
            "holders": [[name, list(slots)] for name, slots in self._holders.items()],
        }

    def restore(self, plain: dict[str, Any]) -> None:
        """Become what was captured."""
        self._per_machine = plain["per_machine"]
        self._of_machine = {slot: dict.fromkeys(names) for slot, names in plain["of_machine"]}
        self._holders = {name: dict.fromkeys(slots) for name, slots in plain["holders"]}

    def forget_machine(self, slot: int) -> None:
        """Drop all that a machine held."""
        for name in list(self._of_machine.get(slot, ())):
            self._drop(slot, name)
        self._of_machine.pop(slot, None)

    def find(self, hashes: Sequence[int]) -> list[tuple[int, int]]:
        """Return up to `MOST_HOLDERS` pairs (slot, leading blocks held), longest prefix first."""
        found: dict[int, int] = {}
        marks = hashes[self._stride - 1 :: self._stride]
        low, high = 0, len(marks)
        while low < high:  # the longest prefix that anybody holds; chained hashes are monotone
            middle = (low + high + 1) // 2
            if marks[middle - 1] in self._holders:
                low = middle
            else:
                high = middle - 1
        step = low
        while step > 0 and len(found) < MOST_HOLDERS:
            for slot in reversed(self._holders.get(marks[step - 1], {})):
                found.setdefault(slot, step * self._stride)
                if len(found) == MOST_HOLDERS:
                    break
            step //= 2
        return list(found.items())

    def _drop(self, slot: int, name: int) -> None:
        self._of_machine[slot].pop(name, None)
        holders = self._holders[name]
        del holders[slot]
        if not holders:
            del self._holders[name]
