"""Structures that compiled functions receive as one pointer.

A named tuple of arrays is handed over array by array at every call, which made a loop
over twenty arrays twenty times slower and minutes long to compile. A structure made
here is one argument however much it holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from numba import config, types
from numba.experimental import structref

if TYPE_CHECKING:
    from collections.abc import Sequence


class _Passed(types.StructRef):  # type: ignore[misc]
    """Numba's view of a structure; field types come from the values it is made with."""

    def preprocess_fields(self, fields: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
        """Forget literal values, which would make every value a type of its own."""
        return tuple((name, types.unliteral(kind)) for name, kind in fields)


@structref.register
class WorldType(_Passed):
    """Numba's type of `World`."""


@structref.register
class SimType(_Passed):
    """Numba's type of `Sim`."""


class Passed(structref.StructRefProxy):  # type: ignore[misc]
    """Base of the structures as Python sees them; make them with `make`."""

    @classmethod
    def make(cls, *values: Any) -> Self:
        """Return a structure of `values`, in the order of the class's annotations.

        The values stay readable as attributes: reading through numba would cost Python
        one compiled function per field. Where nothing is compiled they are all there is.
        """
        made: Self = object.__new__(cls) if config.DISABLE_JIT else cls(*values)
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(made, name, value)
        return made
