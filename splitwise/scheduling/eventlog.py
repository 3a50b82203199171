"""Event logs: what happened and what was decided, as JSON lines, and their replay.

The first line names the format and holds the scheduler's settings, and its state unless it
was new; every further line is one event with the decisions that answered it. Since the
scheduler has no clock, I/O or randomness, replaying the events gives the same decisions, on
any machine, compiled or not: `replay` checks it, and so turns a field log into a regression
test.

Nothing here opens files: a `Recorder` is given a `write` function, `replay` any lines.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import types
import typing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from splitwise.scheduling import decisions as decisions_module
from splitwise.scheduling import events as events_module
from splitwise.scheduling import settings as settings_module
from splitwise.scheduling.checkpoint import capture, restore
from splitwise.scheduling.cluster import ClusterScheduler
from splitwise.scheduling.decisions import Decision
from splitwise.scheduling.events import Event
from splitwise.scheduling.settings import SchedulerSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

FORMAT = 1
_NAMES = {**vars(events_module), **vars(decisions_module), **vars(settings_module)}
Base = typing.TypeVar("Base")
_HINTS = {
    name: typing.get_type_hints(kind, globalns=_NAMES)
    for name, kind in _NAMES.items()
    if dataclasses.is_dataclass(kind)
}
# Fields that are written: those that make two values differ.
_LOGGED = {
    name: tuple(field.name for field in dataclasses.fields(kind) if field.compare)
    for name, kind in _NAMES.items()
    if dataclasses.is_dataclass(kind)
}
_HEADER = "splitwise_event_log"


class EventLogError(ValueError):
    """A line of an event log cannot be read; names the line and what is wrong with it."""


class ReplayError(AssertionError):
    """A replayed event was decided otherwise than recorded; names the line and both decisions."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One event and the decisions that answered it."""

    event: Event
    decisions: list[Decision]


def encode_start(scheduler: ClusterScheduler, *, new: bool) -> str:
    """Return the first line of a log; a scheduler that is not `new` puts its state there."""
    record = {_HEADER: FORMAT, "settings": dataclasses.asdict(scheduler.settings)}
    return _dump(record if new else {**record, "state": capture(scheduler)})


def encode(event: Event, decisions: Iterable[Decision]) -> str:
    """Return one further line, without the line end."""
    return _dump({"event": _plain(event), "decisions": [_plain(decision) for decision in decisions]})


def decode_start(line: str) -> ClusterScheduler:
    """Return the scheduler that a log begins with; raises `EventLogError`."""
    record = _load(line, 1)
    if record.get(_HEADER) != FORMAT:
        message = f"line 1: not an event log of format {FORMAT}: it must begin with {_HEADER!r}: {FORMAT}"
        raise EventLogError(message)
    try:
        settings = SchedulerSettings(**record["settings"])
        return restore(settings, record["state"]) if "state" in record else ClusterScheduler(settings)
    except (KeyError, TypeError, ValueError) as error:
        message = f"line 1: bad settings or state: {type(error).__name__}: {error}"
        raise EventLogError(message) from error


def decode(line: str, number: int) -> Entry:
    """Read line `number` of a log; raises `EventLogError`."""
    record = _load(line, number)
    try:
        event = _build(record["event"], Event)
        return Entry(event, [_build(plain, Decision) for plain in record["decisions"]])
    except (KeyError, TypeError, ValueError) as error:
        message = f"line {number}: {type(error).__name__}: {error}"
        raise EventLogError(message) from error


class Recorder:
    """A `ClusterScheduler` that writes down all it is told and all it decides."""

    def __init__(self, scheduler: ClusterScheduler, write: Callable[[str], object]) -> None:
        """`scheduler` is new: it has handled nothing."""
        self.scheduler = scheduler
        self._write = write
        write(encode_start(scheduler, new=True))

    def handle(self, event: Event) -> list[Decision]:
        """Pass one event on and write its line."""
        decided = self.scheduler.handle(event)
        self._write(encode(event, decided))
        return decided

    def begin_again(self) -> None:
        """Write a first line with the state of now, so that what was written before can go."""
        self._write(encode_start(self.scheduler, new=False))


@dataclass(frozen=True, slots=True)
class Step:
    """One event of a log that is replayed. `decided` is what the scheduler decides here and now."""

    line: int
    event: Event
    recorded: list[Decision]
    decided: list[Decision]

    def check(self) -> None:
        """Raise `ReplayError`, which names the first difference, if there is one."""
        if self.decided == self.recorded:
            return
        pairs = itertools.zip_longest(self.recorded, self.decided)
        number, (recorded, decided) = next((n, p) for n, p in enumerate(pairs, 1) if p[0] != p[1])
        message = (
            f"line {self.line}: {self.event}\n"
            f"  decision {number} recorded: {recorded or 'none'}\n"
            f"  decision {number} replayed: {decided or 'none'}"
        )
        raise ReplayError(message)


def steps(lines: Iterable[str]) -> Iterator[Step]:
    """Run a log through a scheduler, event by event; raises `EventLogError` for a bad line."""
    scheduler: ClusterScheduler | None = None
    for number, line in enumerate(lines, 1):
        if scheduler is None:
            scheduler = decode_start(line)
        else:
            entry = decode(line, number)
            yield Step(number, entry.event, entry.decisions, scheduler.handle(entry.event))
    if scheduler is None:
        message = "line 1: the log is empty"
        raise EventLogError(message)


def replay(lines: Iterable[str]) -> int:
    """Run a log through a scheduler and return the number of events.

    Raises `ReplayError` at the first event whose decisions differ, `EventLogError` for a
    line that cannot be read.
    """
    count = 0
    for step in steps(lines):
        step.check()
        count += 1
    return count


def _dump(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"), ensure_ascii=False)


def _load(line: str, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        message = f"line {number}: not JSON: {error}"
        raise EventLogError(message) from error
    if not isinstance(record, dict):
        message = f"line {number}: a JSON object is expected, not {type(record).__name__}"
        raise EventLogError(message)
    return record


def _plain(value: object) -> Any:
    """Turn a value of an event or decision into what JSON knows."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value):
        name = type(value).__name__
        return {"is": name, **{field: _plain(getattr(value, field)) for field in _LOGGED[name]}}
    return value


def _build(plain: dict[str, Any], base: type[Base]) -> Base:
    """Make an event or decision from its JSON object."""
    kind = _NAMES.get(plain["is"])
    if not (isinstance(kind, type) and issubclass(kind, base)):
        message = f"{plain['is']!r} is no {base.__name__.lower()}"
        raise TypeError(message)
    built: Base = _fill(kind, plain)
    return built


def _fill(kind: type[Any], plain: dict[str, Any]) -> Any:
    hints = _HINTS[kind.__name__]
    values = {name: _typed(value, hints[name]) for name, value in plain.items() if name != "is"}
    return kind(**values)


def _typed(value: Any, hint: Any) -> Any:
    """Give a JSON value the type of the field that it belongs to; raises TypeError."""
    origin = typing.get_origin(hint)
    if origin is tuple:
        return tuple(_typed(item, typing.get_args(hint)[0]) for item in value)
    if origin is types.UnionType:
        return None if value is None else _typed(value, typing.get_args(hint)[0])
    if issubclass(hint, Enum):
        return hint(value)
    if isinstance(value, dict) and hint.__name__ in _HINTS:
        return _fill(hint, value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        message = f"{value!r} is not of type {hint.__name__}"
        raise TypeError(message)
    return value
