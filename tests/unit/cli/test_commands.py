"""What holds for every command: it can print JSON, has help, and says what went wrong in one line."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import typer
from typer.testing import CliRunner

from splitwise.cli.main import app

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RUNNER = CliRunner()
TRACE = "arrival_s,prompt_tokens,output_tokens\n0.0,100,10\n1.0,200,20\n2.0,300,30\n"


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


ALL = list(commands(typer.main.get_command(app)))


def test_there_are_commands() -> None:
    assert {("up",), ("health",), ("trace", "describe"), ("config", "check")} <= {path for path, _ in ALL}


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_every_command_can_print_json_and_is_explained(path: tuple[str, ...], command: Any) -> None:
    flag = [p for p in command.params if "--json" in getattr(p, "opts", ())]
    assert len(flag) == 1, f"{' '.join(path)} has no --json"
    assert flag[0].is_flag
    assert command.help
    assert all(getattr(p, "help", None) for p in command.params)


def run_json(*words: str) -> Any:
    done = RUNNER.invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_json_of_commands_that_need_no_cluster(tmp_path: Path) -> None:
    source, made = tmp_path / "a.csv", tmp_path / "b.csv"
    source.write_text(TRACE)
    assert run_json("trace", "import", str(source), str(made)) == {"requests": 3, "file": str(made)}
    synthesized = run_json("trace", "synthesize", str(source), str(made), "--rate", "2", "--duration", "50")
    assert synthesized["requests"] == len(made.read_text().splitlines()) - 1
    assert run_json("trace", "describe", str(source))["requests"] == 3
    settings = tmp_path / "settings.yaml"
    settings.write_text("router: {queue_limit: 7}\n")
    assert run_json("config", "check", str(settings)) == {"valid": True, "given": 1}


def test_a_conversation_cannot_be_json() -> None:
    done = RUNNER.invoke(app, ["chat", "--json"])
    assert done.exit_code == 2
    assert "needs a MESSAGE" in done.stderr


def test_health_of_nobody() -> None:
    done = RUNNER.invoke(app, ["health", "127.0.0.1:1", "--json"])
    assert done.exit_code == 69
    assert json.loads(done.stdout)["status"] == "UNREACHABLE"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["health", "nowhere"], "'nowhere' is not an address"),
        (["health", "127.0.0.1:1", "--role", "boss"], "must be router, machine or kvd"),
    ],
)
def test_health_refuses_what_it_cannot_ask(words: list[str], says: str) -> None:
    done = RUNNER.invoke(app, words)
    assert done.exit_code == 78
    assert says in done.stderr


def test_health_with_tls_needs_a_role(tmp_path: Path) -> None:
    settings = tmp_path / "tls.yaml"
    settings.write_text("tls: {ca: /a, certificate: /b, key: /c}\n")
    done = RUNNER.invoke(app, ["health", "127.0.0.1:1", "--config", str(settings)])
    assert done.exit_code == 78
    assert "--role: needed with TLS" in done.stderr
