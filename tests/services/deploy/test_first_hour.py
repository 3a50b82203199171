"""The page for the first hour, followed to the letter: every command block is run and must succeed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.services.cli.test_up import PATIENCE_S, READY, Up, up
from tests.support.compose_file import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["up"]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]
PAGE = (ROOT / "docs" / "first-hour.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
ADDRESS = "127.0.0.1:8000"


def test_every_block(up: Callable[..., Up], tmp_path: Path, unused_tcp_port: int) -> None:
    start, *rest = BLOCKS
    words = re.fullmatch(r'splitwise up --emulate "([^"]+)" --http (\S+)\n', start)
    assert words is not None
    assert words[2] == ADDRESS
    here = f"127.0.0.1:{unused_tcp_port}"
    cluster = up("--emulate", words[1], "--http", here)
    cluster.wait_for(READY)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "splitwise").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m splitwise.cli.main "$@"\n')
    (tools / "splitwise").chmod(0o755)
    path = os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]])
    shown = ""
    for block in rest:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.replace(ADDRESS, here)],
            cwd=tmp_path,
            env={**cluster.environment, "PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        shown += done.stdout
    for expected in ("for the prompt phase:", "prompt-0 is draining", "splitwise_router_ttft_seconds_count"):
        assert expected in shown
    assert '"completion_tokens": 3' in shown
    assert "service level objectives" in shown
    cluster.process.send_signal(signal.SIGINT)
    assert cluster.process.wait(PATIENCE_S) == 0
