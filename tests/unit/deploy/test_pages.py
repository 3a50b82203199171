"""What the pages for operators say of settings, metrics, units and commands is so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import typer

from splitwise.cli.main import app
from splitwise.config import Settings, load_settings

if TYPE_CHECKING:
    from pydantic import BaseModel

ROOT = Path(__file__).parents[3]
PAGES = {
    name: (ROOT / "docs" / f"{name}.md").read_text()
    for name in ("install", "operations", "hardware", "first-hour")
}
CODE = re.compile(r"`([^`\n]+)`")


def has_setting(name: str) -> bool:
    model: type[BaseModel] = Settings
    *sections, last = name.split(".")
    for section in sections:
        field = model.model_fields.get(section)
        if field is None or not isinstance(field.annotation, type):
            return False
        model = field.annotation
    return last in model.model_fields


@pytest.mark.parametrize("page", PAGES)
def test_settings_exist(page: str) -> None:
    named = {
        word
        for text in CODE.findall(PAGES[page])
        for word in re.findall(
            r"(?<![\w/.-])(?:router|machine|kvd|power|telemetry|tls)\.[a-z_.]+[a-z](?![\w.])", text
        )
    }
    assert named or page == "first-hour"
    # event names of the log look alike
    events = {"kvd.memlock_limited"}
    assert not [name for name in named - events if not has_setting(name)]


def test_metrics_exist() -> None:
    known = (ROOT / "docs" / "telemetry.md").read_text()
    named = set(re.findall(r"splitwise_\w+", PAGES["operations"]))
    assert named
    assert not [name for name in named if f"`{name}`" not in known]


@pytest.mark.parametrize("page", PAGES)
def test_units_exist(page: str) -> None:
    units = {path.name for path in (ROOT / "deploy" / "systemd").iterdir()}
    for name, _instance in re.findall(
        r"\b(splitwise-(?:kvd|prompt|token|router|power))(@[\w%*-]*)?", PAGES[page]
    ):
        assert f"{name}.service" in units or f"{name}@.service" in units, name


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    root: Any = typer.main.get_command(app)
    lines = [line.split("#")[0] for line in PAGES[page].splitlines()] + CODE.findall(PAGES[page])
    for line in lines:
        for words in re.findall(r"(?:^|[\s/`(;&$])splitwise ([a-z-][^|;&`)]*)", line):
            first, *rest = words.split()
            command = root if first.startswith("--") else root.commands.get(first)
            assert command is not None, f"{page}: splitwise {words}"
            if hasattr(command, "commands") and rest and not first.startswith("--"):
                command = command.commands[rest[0]]
            known = {option for p in command.params for option in (*p.opts, *p.secondary_opts)} | {"--help"}
            for option in re.findall(r"(?<!\S)--[a-z][\w-]*", words):
                assert option in known, f"{page}: splitwise {words}: no {option}"


def test_a_daemon_for_each_group_is_configured_as_the_page_says() -> None:
    block = re.search(r"```ini\n(.*?)```", PAGES["install"], re.DOTALL)
    assert block is not None
    files: dict[str, dict[str, str]] = {}
    for line in block[1].splitlines():
        if line.startswith("# /etc/splitwise/"):
            files[Path(line[2:]).name] = variables = {}
        else:
            name, _, value = line.partition("=")
            variables[name] = value
    units = ROOT / "deploy" / "systemd"

    def settings(unit: str, file: str) -> Settings:
        instance = file.removesuffix(".env").partition("-")[2]
        text = (units / unit).read_text()
        words = re.findall(r"^Environment=(.+)$", text, re.MULTILINE)
        own = dict(word.split("=", 1) for line in words for word in line.split())
        own = {k: v.replace("%i", instance).replace("%H", "HOSTNAME") for k, v in own.items()}
        return load_settings(environment={**own, **files[file]}).settings

    kvd = settings("splitwise-kvd@.service", "kvd-gpus4-7.env").kvd
    machine = settings("splitwise-prompt@.service", "prompt-1.env").machine
    assert (machine.kvd_socket, machine.kvd_address, machine.node) == (kvd.socket, kvd.listen, kvd.node)
