"""Every log event of the source: where it is written, how severe it is, and its fields."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.tables import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

LEVELS = frozenset({"debug", "info", "warning", "error", "critical", "exception"})


@dataclass(frozen=True)
class LogCall:
    """One call of a logger. `event` is None when its name is not a literal."""

    where: str
    event: str | None
    level: str
    fields: frozenset[str]


def log_calls() -> Iterator[LogCall]:
    """Yield the calls of all services and of the library."""
    for folder in ("services", "splitwise"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from _calls(path)


def _calls(path: Path) -> Iterator[LogCall]:
    text = path.read_text()
    if "get_logger" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr not in LEVELS or not _is_logger(node.func.value):
            continue
        fields = frozenset(keyword.arg for keyword in node.keywords if keyword.arg) - {"exc_info"}
        level = "error" if node.func.attr == "exception" else node.func.attr
        for event in _names(node.args[0] if node.args else None):
            yield LogCall(f"{path.relative_to(ROOT)}:{node.lineno}", event, level, fields)


def _names(value: ast.expr | None) -> list[str | None]:
    """Return the literal, or both of ``"a" if ... else "b"``."""
    if isinstance(value, ast.IfExp):
        return _names(value.body) + _names(value.orelse)
    return [value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None]


def _is_logger(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "get_logger"
    name = value.id if isinstance(value, ast.Name) else value.attr if isinstance(value, ast.Attribute) else ""
    return name.strip("_") == "log"
