"""What a cap is, and what it comes to on one GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_TEXT = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>%|W)", re.IGNORECASE)


class Role(StrEnum):
    """What a machine does now, as far as its power is concerned."""

    PROMPT = "prompt"
    TOKEN = "token"  # noqa: S105 - the pool, not a secret
    MIXED = "mixed"  # at home in the prompt pool and borrowed for tokens
    BORROWED = "borrowed"  # at home in the token pool and borrowed for prompts: never capped


@dataclass(frozen=True, slots=True)
class Cap:
    """``none``, a share of the GPU's default limit (``50%``), or watts (``350 W``)."""

    fraction: float | None = None
    watts: float | None = None

    @classmethod
    def parse(cls, text: str) -> Cap:
        """Read a cap; raises `ValueError` that says what to write."""
        if text.strip().lower() == "none":
            return cls()
        found = _TEXT.fullmatch(text.strip())
        number = float(found["number"]) if found else 0.0
        if found is None or number <= 0:
            raise ValueError(f"{text!r} is not a cap: write none, a share such as 50%, or watts such as 350W")
        if found["unit"] == "%":
            if number > 100:
                raise ValueError(f"{text!r}: a share of the default limit is at most 100%")
            return cls(fraction=number / 100)
        return cls(watts=number)

    def __str__(self) -> str:
        if self.fraction is not None:
            return f"{100 * self.fraction:g}%"
        return "none" if self.watts is None else f"{self.watts:g}W"


@dataclass(frozen=True, slots=True)
class Caps:
    """The cap of each role. A borrowed machine has none, whatever is set: it runs prompts."""

    prompt: Cap = Cap()
    token: Cap = Cap(fraction=0.5)  # of GPU power: HHcap, arXiv 2311.18677
    mixed: Cap = Cap()

    def of(self, role: Role) -> Cap:
        """Return the cap of a role."""
        by_role = {Role.PROMPT: self.prompt, Role.TOKEN: self.token, Role.MIXED: self.mixed}
        return by_role.get(role, Cap())


@dataclass(frozen=True, slots=True)
class GpuRange:
    """What may be set on one GPU, in watts.

    `floor` and `highest` are the device's own bounds, `default` is its limit out of the
    factory, `previous` the limit that it had before we changed anything: nothing of ours
    goes above that, and it is what the GPU gets back.
    """

    floor: float
    highest: float
    default: float
    previous: float

    @property
    def ceiling(self) -> float:
        """The highest limit that we set: what the GPU had before, within the device's range."""
        return min(max(self.previous, self.floor), self.highest)

    def clamp(self, watts: float) -> float:
        """Return the nearest limit that may be set."""
        return min(max(watts, self.floor), self.ceiling)

    def asked(self, cap: Cap) -> float:
        """Return what a cap comes to here before it is clamped; without one, the ceiling."""
        if cap.watts is not None:
            return cap.watts
        return self.ceiling if cap.fraction is None else cap.fraction * self.default

    def limit(self, cap: Cap) -> float:
        """Return the limit that a cap comes to here."""
        return self.clamp(self.asked(cap))
