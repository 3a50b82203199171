"""Say which known name somebody may have meant, for error messages about unknown ones."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any, get_args

from pydantic import BaseModel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydantic import ValidationError


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; did you mean ...?``, or all known names when none is near."""
    names = list(known)
    begins = [other for other in names if len(name) > 2 and other.startswith(name)]
    close = begins or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else f"; known: {', '.join(names)}"


def unknown_keys(data: Iterable[Any], known: Sequence[str]) -> str:
    """Return what is wrong with the first key that is not known; empty when all are."""
    wrong = [str(key) for key in data if key not in known]
    return f"unknown key {wrong[0]!r}{nearest(wrong[0], known)}" if wrong else ""


def explain(error: ValidationError, model: type[BaseModel]) -> str:
    """Return what is wrong with values of `model`, unknown keys with the nearest known one."""
    lines = []
    for problem in error.errors(include_url=False):
        place = problem["loc"]
        where = ".".join(map(str, place))
        if problem["type"] == "extra_forbidden":
            name = str(place[-1])
            inside = f" in {'.'.join(map(str, place[:-1]))}" if len(place) > 1 else ""
            lines.append(f"unknown key {name!r}{inside}{nearest(name, _fields_at(model, place[:-1]))}")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{where}: {message}" if where else message)
    return "; ".join(lines)


def _fields_at(model: type[BaseModel], place: Sequence[int | str]) -> list[str]:
    """Return the names that may stand at a place such as ``("machines", 0)``."""
    for part in place:
        if isinstance(part, str) and part in model.model_fields:
            inner = _model_in(model.model_fields[part].annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the first settings class in an annotation such as ``list[Part] | None``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    found = (_model_in(part) for part in get_args(annotation))
    return next((model for model in found if model is not None), None)
