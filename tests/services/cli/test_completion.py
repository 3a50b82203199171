"""Completion in real shells, installed as the documentation says."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 60.0
SHELLS = ("bash", "zsh", "fish")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder, and a `splitwise` command on the PATH below it."""
    tools = tmp_path / "bin"
    tools.mkdir()
    launcher = f"#!{sys.executable}\nfrom splitwise.cli.main import main\nmain()\n"  # as pip makes it
    (tools / "splitwise").write_text(launcher)
    (tools / "splitwise").chmod(0o755)
    return tmp_path


def variables(home: Path) -> dict[str, str]:
    return {
        **os.environ,
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
        "TERM": "dumb",
        "INPUTRC": "/dev/null",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "XDG_CONFIG_HOME": str(home / ".config"),
    }


def script(home: Path, shell: str) -> str:
    """Return what `splitwise --show-completion SHELL` prints."""
    done = subprocess.run(
        ["splitwise", "--show-completion", shell],
        env={**variables(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


class Terminal:
    """An interactive bash on a terminal of its own."""

    def __init__(self, home: Path, *files: Path) -> None:
        self.shown = ""
        sources = "; ".join(f"source {file}" for file in files)
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            os.chdir(home)
            os.execvpe("bash", ["bash", "--noprofile", "--norc", "-i"], variables(home))
        self.type(f"{sources}; bind 'set bell-style none'; echo READ''Y\n")
        self.until("READY")

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def until(self, pattern: str) -> str:
        """Read until the terminal shows `pattern`; returns all it has shown since the last call."""
        end = time.monotonic() + PATIENCE_S
        while not re.search(pattern, self.shown):
            assert time.monotonic() < end, f"no {pattern!r} in {self.shown!r}"
            if select.select([self.terminal], [], [], 1.0)[0]:
                self.shown += os.read(self.terminal, 4096).decode(errors="replace")
        shown, self.shown = self.shown, ""
        return shown

    def close(self) -> None:
        os.close(self.terminal)
        os.waitpid(self.pid, 0)


def test_a_person_presses_tab_in_bash(home: Path) -> None:
    file = home / "completion.sh"
    file.write_text(script(home, "bash"))
    terminal = Terminal(home, file)
    try:
        terminal.type("splitwise expl\t")  # one command begins like that: it is completed
        terminal.until("explain ")
        terminal.type("\x15splitwise status --rou\t")
        terminal.until("status --router ")
        terminal.type("\x15splitwise trace d\t")  # a command of a group
        terminal.until("trace describe ")
        terminal.type("\x15splitwise up --engine em\t")  # an option's value
        terminal.until("--engine emulated ")
        terminal.type("\x15splitwise pro\t\t")  # two: both are shown
        assert "provision" in terminal.until("profile +provision|provision +profile")
    finally:
        terminal.close()


@pytest.mark.parametrize("shell", SHELLS)
def test_installing_is_one_command(home: Path, shell: str) -> None:
    """`--install-completion` finds out which shell it was started from."""
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run(
        [path, "-c", "splitwise --install-completion; true"],
        env=variables(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert f"{shell} completion installed" in done.stdout, done.stdout + done.stderr
    written = [path for path in home.rglob("*") if path.is_file() and "splitwise" in path.name]
    assert any("_SPLITWISE_COMPLETE" in path.read_text() for path in written if path.parent.name != "bin")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_the_script_and_get_the_words(home: Path, shell: str) -> None:
    path = shutil.which(shell)
    if path is None:
        pytest.skip(f"{shell} is not installed")
    file = home / f"completion.{shell}"
    file.write_text(script(home, shell))
    check = subprocess.run(
        [path, "-n", str(file)],
        env=variables(home),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert check.returncode == 0, check.stderr
    if shell == "fish":
        words = f"source {file}; complete -C 'splitwise expl'"
        done = subprocess.run(
            [path, "-c", words],
            env=variables(home),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.stdout.startswith("explain"), done.stdout + done.stderr
