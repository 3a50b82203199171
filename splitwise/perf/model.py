"""One performance model: the phase times of one LLM on one kind of machine.

Token time = interp(sequences) + c * total context. Prompt time = two curves over total
tokens, one for a single sequence and one for many, blended by the sequence count
(``kernels.prompt_seconds``). Fitting is in ``fitting``, shipped models in ``catalog``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.errors import SplitwiseError
from splitwise.perf import kernels

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

MIXED_FACTOR = 1.1  # authors' simulator: a mixed iteration over the prompt time of all its tokens


class PerformanceModelError(SplitwiseError, ValueError):
    """A performance model or a profile cannot be used; says what is wrong, where and what to do."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of a piecewise linear function, x growing; at most `kernels.KNOTS` of them."""

    x: tuple[float, ...]
    y: tuple[float, ...]  # seconds

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise PerformanceModelError(f"a curve has {len(self.x)} x and {len(self.y)} y; they must pair up")
        if not 1 <= len(self.x) <= kernels.KNOTS:
            raise PerformanceModelError(
                f"a curve has {len(self.x)} points; it needs 1 to {kernels.KNOTS}: measure fewer sizes"
            )
        if not all(map(isfinite, (*self.x, *self.y))) or min(self.y) <= 0.0:
            raise PerformanceModelError(f"a curve needs finite x and positive y, not x={self.x} y={self.y}")
        if any(b <= a for a, b in pairwise(self.x)):
            raise PerformanceModelError(f"a curve's x must grow from point to point, not {self.x}")

    @classmethod
    def of(cls, x: Sequence[float], y: Sequence[float]) -> Curve:
        """Build from any two sequences."""
        return cls(tuple(map(float, x)), tuple(map(float, y)))


@dataclass(frozen=True, slots=True)
class CompatTable:
    """The authors' simulator's table: x in prompt tokens for both phases."""

    prompt: Curve
    token: Curve  # x equal to the prompt curve's


@dataclass(frozen=True, slots=True)
class PerformanceModel:
    """Phase times of `model` on `hardware` at `tensor_parallel`, in seconds and tokens.

    `measured` names the ranges that the profile covers; anything beyond is extrapolated
    (`extrapolates` says so). Evaluate through the methods, or stack `row()`s for the
    compiled kernels.
    """

    model: str
    hardware: str
    tensor_parallel: int
    prompt_single: Curve  # x: prompt tokens of one sequence
    prompt_many: Curve  # x: total prompt tokens of sequences of `many_unit` tokens
    token: Curve  # x: sequences; y: time without any context
    context_seconds: float  # per token of context in the batch
    many_unit: float = 512.0
    mixed_factor: float = MIXED_FACTOR
    compat: CompatTable | None = None
    source: str = ""
    measured: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    _row: list[NDArray[np.float64]] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isfinite(self.context_seconds) or self.context_seconds < 0.0:
            raise PerformanceModelError(
                f"{self.name}: context_seconds is {self.context_seconds}; it must be >= 0: "
                "check the profile's token times at long contexts"
            )
        if not self.many_unit >= 1.0 or not self.mixed_factor >= 1.0:
            raise PerformanceModelError(f"{self.name}: many_unit and mixed_factor must be >= 1")
        if self.compat is not None and self.compat.prompt.x != self.compat.token.x:
            raise PerformanceModelError(f"{self.name}: the compat table's two curves must share their x")

    @property
    def name(self) -> str:
        """The model's key, such as ``llama2-70b|h100-80gb|tp8``."""
        return f"{self.model}|{self.hardware}|tp{self.tensor_parallel}"

    def row(self) -> NDArray[np.float64]:
        """Return the row that ``kernels`` evaluates: `kernels.ROW` float64, not to be written to."""
        if not self._row:
            self._row.append(self._pack())
        return self._row[0]

    def _pack(self) -> NDArray[np.float64]:
        row = np.zeros(kernels.ROW, dtype=np.float64)
        curves = [
            (
                self.prompt_single,
                kernels.PROMPT_SINGLE_KNOTS,
                kernels.PROMPT_SINGLE_X,
                kernels.PROMPT_SINGLE_Y,
            ),
            (self.prompt_many, kernels.PROMPT_MANY_KNOTS, kernels.PROMPT_MANY_X, kernels.PROMPT_MANY_Y),
            (self.token, kernels.TOKEN_KNOTS, kernels.TOKEN_X, kernels.TOKEN_Y),
        ]
        if self.compat is not None:
            curves += [
                (self.compat.prompt, kernels.COMPAT_KNOTS, kernels.COMPAT_X, kernels.COMPAT_PROMPT_Y),
                (self.compat.token, kernels.COMPAT_KNOTS, kernels.COMPAT_X, kernels.COMPAT_TOKEN_Y),
            ]
        for curve, count, x, y in curves:
            points = len(curve.x)
            row[count] = points
            row[x : x + points] = curve.x
            row[y : y + points] = curve.y
        row[kernels.CONTEXT_SECONDS] = self.context_seconds
        row[kernels.MANY_UNIT] = self.many_unit
        row[kernels.MIXED_FACTOR] = self.mixed_factor
        row.setflags(write=False)
        return row

    def prompt_seconds(self, tokens: float, sequences: float = 1.0) -> float:
        """Time of one iteration that computes `tokens` prompt tokens of `sequences` sequences."""
        return kernels.prompt_seconds(self.row(), float(tokens), float(sequences))

    def token_seconds(self, sequences: float, context: float) -> float:
        """Time of one token iteration; `context` is summed over the batch."""
        return kernels.token_seconds(self.row(), float(sequences), float(context))

    def mixed_seconds(
        self, prompt_tokens: float, prompt_sequences: float, sequences: float, context: float
    ) -> float:
        """Time of one iteration of both phases; either side may be empty."""
        return kernels.mixed_seconds(
            self.row(), float(prompt_tokens), float(prompt_sequences), float(sequences), float(context)
        )

    def iteration_seconds(
        self, prompt_tokens: int, prompt_sequences: int, sequences: int, context: int, *, compat: bool = False
    ) -> float:
        """Time of any iteration, faithful or by the authors' rules."""
        if not compat:
            return self.mixed_seconds(prompt_tokens, prompt_sequences, sequences, context)
        self._require_compat()
        if sequences <= 0:
            return kernels.compat_prompt_seconds(self.row(), float(prompt_tokens))
        if prompt_tokens <= 0:
            return kernels.compat_token_seconds(self.row(), float(sequences))
        return kernels.compat_mixed_seconds(self.row(), float(prompt_tokens), float(sequences))

    def extrapolates(self, **sizes: float) -> list[str]:
        """Name the given sizes (`prompt_tokens`, `sequences`, `context`) that no measurement covers."""
        told = []
        for name, value in sizes.items():
            low, high = self.measured.get(name, (float("-inf"), float("inf")))
            if not low <= value <= high:
                told.append(f"{name}={value:g} lies outside the measured {low:g} to {high:g}")
        return told

    def _require_compat(self) -> None:
        if self.compat is None:
            raise PerformanceModelError(
                f"{self.name} has no compat table; only models fitted from the authors' profile have one"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for YAML or JSON; `from_dict` reads it back."""
        data: dict[str, Any] = {
            "model": self.model,
            "hardware": self.hardware,
            "tensor_parallel": self.tensor_parallel,
            "prompt_single": {"x": list(self.prompt_single.x), "y": list(self.prompt_single.y)},
            "prompt_many": {"x": list(self.prompt_many.x), "y": list(self.prompt_many.y)},
            "token": {"x": list(self.token.x), "y": list(self.token.y)},
            "context_seconds": self.context_seconds,
            "many_unit": self.many_unit,
            "mixed_factor": self.mixed_factor,
            "source": self.source,
            "measured": {name: list(bounds) for name, bounds in self.measured.items()},
        }
        if self.compat is not None:
            data["compat"] = {
                "x": list(self.compat.prompt.x),
                "prompt_y": list(self.compat.prompt.y),
                "token_y": list(self.compat.token.y),
            }
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PerformanceModel:
        """Read what `to_dict` wrote; `PerformanceModelError` names a missing or wrong part."""
        try:
            compat = data.get("compat")
            return cls(
                model=str(data["model"]),
                hardware=str(data["hardware"]),
                tensor_parallel=int(data["tensor_parallel"]),
                prompt_single=Curve.of(data["prompt_single"]["x"], data["prompt_single"]["y"]),
                prompt_many=Curve.of(data["prompt_many"]["x"], data["prompt_many"]["y"]),
                token=Curve.of(data["token"]["x"], data["token"]["y"]),
                context_seconds=float(data["context_seconds"]),
                many_unit=float(data.get("many_unit", 512.0)),
                mixed_factor=float(data.get("mixed_factor", MIXED_FACTOR)),
                compat=None
                if compat is None
                else CompatTable(
                    Curve.of(compat["x"], compat["prompt_y"]), Curve.of(compat["x"], compat["token_y"])
                ),
                source=str(data.get("source", "")),
                measured={
                    str(k): (float(v[0]), float(v[1])) for k, v in dict(data.get("measured", {})).items()
                },
            )
        except KeyError as error:
            raise PerformanceModelError(
                f"a performance model lacks {error}; write it with splitwise profile or add the key"
            ) from error
        except (TypeError, AttributeError) as error:
            raise PerformanceModelError(
                f"a performance model has a value of the wrong kind: {error}"
            ) from error


def stack(models: Sequence[PerformanceModel]) -> NDArray[np.float64]:
    """Stack the models' rows into one (models, `kernels.ROW`) matrix for compiled loops."""
    if not models:
        raise PerformanceModelError("no performance model given")
    return np.ascontiguousarray(np.stack([model.row() for model in models]))
