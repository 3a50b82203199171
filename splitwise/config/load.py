"""Reading settings: flags over environment over file over defaults, with each value's origin.

A flag is ``--key value`` for the process's own section and ``--section.key value`` for any
(``--engine.kind emulated``, ``--telemetry.log_level debug``); dashes and underscores are the
same. The environment says the same with ``SPLITWISE_SECTION__KEY``. Values are read as
YAML, so that lists and maps can be written anywhere. ``--config FILE`` or
``SPLITWISE_CONFIG`` names the file.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import BaseModel, ValidationError

from splitwise.config.nearest import nearest
from splitwise.config.schema import Settings
from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PREFIX = "SPLITWISE_"
Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Loaded:
    """Settings and where each given value came from (``file.yaml``, ``environment X``, ``flag --x``)."""

    settings: Settings
    origins: dict[Key, str]

    def origin(self, key: Key) -> str:
        """Say where the value at `key` was given: itself, what encloses it, or parts of it."""
        return _origin(key, self.origins) or "default"


@dataclass(frozen=True, slots=True)
class _Given:
    key: Key
    value: object
    origin: str


def load_settings(
    section: str | None = None,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Loaded:
    """Read all layers and validate; raises `ConfigError` with origin, key, problem and remedy.

    `section` is the one whose keys `arguments` may name without it; `environment` defaults
    to the process's own.
    """
    environment = os.environ if environment is None else environment
    flags = list(_flags(section, arguments))
    named = [given.value for given in flags if given.key == ("config",)]
    path = named[-1] if named else file or environment.get(f"{PREFIX}CONFIG")
    layers: list[_Given] = []
    if path:
        layers += _file(Path(str(path)))
    layers += _environment(environment)
    layers += [given for given in flags if given.key != ("config",)]
    merged: dict[str, Any] = {}
    origins: dict[Key, str] = {}
    for given in layers:
        _check_known(given)
        _put(merged, given)
        origins[given.key] = given.origin
    try:
        return Loaded(Settings.model_validate(merged), origins)
    except ValidationError as error:
        raise ConfigError(_explain(error, origins)) from None


def _flags(section: str | None, arguments: Sequence[str]) -> Iterator[_Given]:
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"argument {word!r}: flags are written --key value")
        name, equals, text = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"flag --{name}: needs a value")
            text = rest.pop(0)
        key = tuple(name.split("."))
        if key == ("config",):
            yield _Given(key, text, "")
            continue
        if section is not None and key[0] not in Settings.model_fields:
            key = (section, *key)
        key = tuple(_underscored(key[:depth], part) for depth, part in enumerate(key))
        yield _Given(key, _value(key, text), f"flag --{name}")


def _underscored(parent: Key, name: str) -> str:
    """Turn dashes of a field's name into underscores; keys of maps stay as they are."""
    return name.replace("-", "_") if _section_at(parent) is not None else name


def _environment(environment: Mapping[str, str]) -> Iterator[_Given]:
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or "__" not in variable:
            continue
        key = tuple(variable.removeprefix(PREFIX).lower().split("__"))
        yield _Given(key, _value(key, text), f"environment {variable}")


def _file(path: Path) -> Iterator[_Given]:
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; name the configuration with --config") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        hint = "; quote IPv6 addresses" if "[" in str(error) else ""
        raise ConfigError(f"{path}: not valid YAML{hint}: {error}") from None
    if content is None:
        return
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: must be a map of sections ({', '.join(Settings.model_fields)})")
    yield from _leaves((), content, str(path))


def _leaves(prefix: Key, content: Mapping[object, object], origin: str) -> Iterator[_Given]:
    for name, value in content.items():
        key = (*prefix, str(name))
        if _section_at(key) is not None and isinstance(value, dict | None):
            yield from _leaves(key, value or {}, origin)
        else:
            yield _Given(key, value, origin)


def _value(key: Key, text: str) -> object:
    """Read a flag's or variable's text: a list or map as YAML, a field's scalar as it stands.

    Below a map such as ``engine.options`` no type is known, so scalars are YAML there too.
    """
    if text == "null":
        return None
    if text[:1] not in "[{" and _is_field(key):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:  # such as [::1]:9000
        return text
    return value if isinstance(value, bool | int | float | list | dict) else text


def _is_field(key: Key) -> bool:
    parent = _section_at(key[:-1])
    return parent is not None and key[-1] in parent.model_fields


def _section_at(key: Key) -> type[BaseModel] | None:
    """Return the settings class at `key`, or None when a plain value is there."""
    model: type[BaseModel] = Settings
    for name in key:
        field = model.model_fields.get(name)
        if field is None or not (
            isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        ):
            return None
        model = field.annotation
    return model


def _check_known(given: _Given) -> None:
    """Refuse a key that does not exist and name the nearest one that does."""
    model: type[BaseModel] = Settings
    for depth, name in enumerate(given.key):
        if name not in model.model_fields:
            where = ".".join(given.key[:depth])
            inside = f" in {where}" if where else ""
            meant = nearest(name, model.model_fields)
            raise ConfigError(f"{given.origin}: unknown key {name!r}{inside}{meant}")
        inner = _section_at(given.key[: depth + 1])
        if inner is None:
            return
        model = inner
    raise ConfigError(f"{given.origin}: {'.'.join(given.key)} is a section, not a value")


def _put(target: dict[str, Any], given: _Given) -> None:
    """Set one value; keys below a map (``engine.options.block_size``) are merged into it."""
    for name in given.key[:-1]:
        inner = target.get(name)
        target[name] = inner = dict(inner) if isinstance(inner, dict) else {}
        target = inner
    target[given.key[-1]] = given.value


def _explain(error: ValidationError, origins: Mapping[Key, str]) -> str:
    lines = []
    for problem in error.errors(include_url=False):
        key = tuple(str(part) for part in problem["loc"])
        origin = _origin(key, origins) or "settings"
        message = problem["msg"].removeprefix("Value error, ")
        shown = problem.get("input")
        got = (
            f" (got {shown!r})"
            if isinstance(shown, str | int | float | bool) and repr(shown) not in message
            else ""
        )
        lines.append(f"{origin}: {'.'.join(key)}: {message}{got}")
    return "\n".join(lines)


def _origin(key: Key, origins: Mapping[Key, str]) -> str:
    """Say where the value at `key` was given: itself, what encloses it, or parts of it."""
    for length in range(len(key), 0, -1):
        if key[:length] in origins:
            return origins[key[:length]]
    parts = {origin for given, origin in origins.items() if given[: len(key)] == key}
    return ", ".join(sorted(parts))
