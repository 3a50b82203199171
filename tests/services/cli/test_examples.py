"""The examples run as they are, against a cluster that `splitwise up` started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.services.cli.test_up import PATIENCE_S, READY, Up, up

__all__ = ["up"]
EXAMPLES = Path(__file__).parents[3] / "examples"


def run(cluster: Up, name: str, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        capture_output=True,
        text=True,
        env={**cluster.environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=PATIENCE_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_all_examples(up) -> None:
    cluster = up()
    cluster.wait_for(READY)
    streamed = run(cluster, "stream.py")
    assert "prompt_machine='prompt-0', token_machine='token-0'" in streamed
    answers = run(cluster, "many_at_once.py", "5").splitlines()
    assert [line.partition(":")[0] for line in answers] == ["0", "1", "2", "3", "4"]
    assert not any("Error" in line for line in answers)


def test_the_openai_example(up) -> None:
    pytest.importorskip("openai")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    cluster = up("--http", address)
    cluster.wait_for(READY)
    assert run(cluster, "openai_client.py", f"http://{address}/v1").strip()
