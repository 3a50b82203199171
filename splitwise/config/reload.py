"""What a running process takes up of changed settings, and what waits for its next start.

Pure: the running settings and the wanted ones in, those that count from now on out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from splitwise.config.schema import Live, Settings
from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pydantic.fields import FieldInfo

SHARED = ("tls", "telemetry")
"""The sections that every process reads beside its own."""


@dataclass(frozen=True, slots=True)
class Reload:
    """The outcome of one reload; keys are written with dots, such as ``router.slo.ttft_ms``."""

    settings: Settings
    applied: tuple[str, ...]
    needs_restart: tuple[str, ...]


def plan_reload(running: Settings, wanted: Settings, section: str) -> Reload:
    """Put the wanted live values into the running settings; only `section` and the shared ones count.

    Raises `ConfigError` when the two do not go together, such as a new lease that is too short
    for the old heartbeat.
    """
    applied, needs_restart = [], []
    merged = running.model_dump()
    for key, field in leaves(section):
        value = _at(wanted, key)
        if value == _at(running, key):
            continue
        if not is_live(field):
            needs_restart.append(".".join(key))
            continue
        applied.append(".".join(key))
        inner: Any = merged
        for name in key[:-1]:
            inner = inner[name]
        inner[key[-1]] = value
    try:
        settings = Settings.model_validate(merged)
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        kept = f" ({', '.join(needs_restart)} would need a restart)" if needs_restart else ""
        raise ConfigError(f"{', '.join(applied)}: {problems}{kept}") from None
    return Reload(settings, tuple(applied), tuple(needs_restart))


def is_live(field: FieldInfo) -> bool:
    """Whether a running process takes the field up."""
    return any(isinstance(mark, Live) for mark in field.metadata)


def leaves(*sections: str) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    """Yield the key and description of every value; of all sections, or of these and the shared ones."""
    for name, field in Settings.model_fields.items():
        if not sections or name in (*sections, *SHARED):
            yield from _leaves_of((name,), field)


def _leaves_of(key: tuple[str, ...], field: FieldInfo) -> Iterator[tuple[tuple[str, ...], FieldInfo]]:
    kind = field.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        for name, inner in kind.model_fields.items():
            yield from _leaves_of((*key, name), inner)
    else:
        yield key, field


def _at(settings: Settings, key: Sequence[str]) -> Any:
    value: Any = settings
    for name in key:
        value = getattr(value, name)
    return dict(value) if isinstance(value, Mapping) else value
