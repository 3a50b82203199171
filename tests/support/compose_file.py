"""A compose file and its Dockerfile, read as far as the stack's own files use the formats."""

from __future__ import annotations

import importlib.util
import re
import shlex
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from dockerfile_parse import DockerfileParser

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose"
FILE, TLS_FILE = COMPOSE / "compose.yaml", COMPOSE / "compose.tls.yaml"
DOCKERFILE = COMPOSE / "Dockerfile"
VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def requirements_tool() -> Any:
    """Return deploy/compose/requirements.py as a module."""
    spec = importlib.util.spec_from_file_location("requirements_tool", COMPOSE / "requirements.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load(*files: Path, variables: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Read compose files; later ones add to services, as ``-f`` twice does."""
    merged: dict[str, Any] = {}
    for file in files:
        text = VARIABLE.sub(lambda m: (variables or {}).get(m[1], m[2] or ""), file.read_text())
        content = yaml.safe_load(text)
        for name, service in content["services"].items():
            known = merged.setdefault("services", {}).setdefault(name, {})
            environment = {**known.get("environment", {}), **service.get("environment", {})}
            volumes = [*known.get("volumes", []), *service.get("volumes", [])]
            known.update({**service, "environment": environment, "volumes": volumes})
        merged.setdefault("volumes", {}).update(content.get("volumes") or {})
    return merged


def ours(stack: Mapping[str, Any], profile: str) -> dict[str, Any]:
    """Return the services of a profile that run Splitwise."""
    return {
        name: service
        for name, service in stack["services"].items()
        if profile in service.get("profiles", [profile]) and "build" in service
    }


def seconds(duration: str) -> float:
    """Read a duration such as ``60s`` or ``5m``."""
    return float(duration[:-1]) * {"s": 1, "m": 60}[duration[-1]]


class Dockerfile:
    """Stages in order: name to (base, instructions)."""

    def __init__(self, path: Path = DOCKERFILE) -> None:
        with tempfile.TemporaryDirectory() as scratch:  # the parser writes beside what it is given
            copy = Path(scratch) / "Dockerfile"
            copy.write_text(path.read_text())
            structure = DockerfileParser(str(copy)).structure
        self.stages: dict[str, tuple[str, list[tuple[str, str]]]] = {}
        steps: list[tuple[str, str]] = []
        for part in structure:
            if part["instruction"] == "FROM":
                base, _, name = part["value"].partition(" AS ")
                steps = []
                self.stages[name.strip()] = (base.strip(), steps)
            elif part["instruction"] != "COMMENT":
                steps.append((part["instruction"], part["value"]))

    def steps(self, stage: str) -> list[tuple[str, str]]:
        """Return all instructions that made `stage`, those of its bases first."""
        base, own = self.stages[stage]
        return [*(self.steps(base) if base in self.stages else []), *own]

    def environment(self, stage: str) -> dict[str, str]:
        """Return what ENV sets in `stage`."""
        words = [word for kind, value in self.steps(stage) if kind == "ENV" for word in shlex.split(value)]
        return dict(word.split("=", 1) for word in words)

    def last(self, stage: str, kind: str) -> str:
        """Return the value of the last `kind` (USER, CMD) of `stage`."""
        return [value for name, value in self.steps(stage) if name == kind][-1]
