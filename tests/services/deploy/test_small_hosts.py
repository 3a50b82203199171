"""A daemon on a host with too little of something, made by a mount namespace of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ExitCode
from tests.support.compose_file import ROOT

if TYPE_CHECKING:
    from pathlib import Path

APART = ("unshare", "--mount", "bash", "-euc")
# Ends the daemon with SIGTERM as soon as it is ready.
DAEMON = (
    'mount -t tmpfs -o size={size} tmpfs /dev/shm; log="{log}";'
    ' "{python}" -m services.kvd --listen 127.0.0.1:0 --socket "{socket}" {flags} > "$log" 2>&1 & pid=$!;'
    ' until grep -q service.ready "$log"; do kill -0 $pid 2> /dev/null || break; sleep 0.1; done;'
    " kill $pid 2> /dev/null || true; wait $pid"
)


@pytest.fixture(scope="module", autouse=True)
def _may_mount() -> None:
    if shutil.which("unshare") is None:
        pytest.skip("unshare is not installed (Debian: util-linux)")
    mount = subprocess.run([*APART, "mount -t tmpfs tmpfs /dev/shm"], check=False, capture_output=True)
    if mount.returncode:
        pytest.skip("this user may not mount in a namespace of its own")


def run(folder: Path, size: str, flags: str = "") -> tuple[int, str]:
    log = folder / "log"
    script = DAEMON.format(size=size, log=log, python=sys.executable, socket=folder / "s", flags=flags)
    done = subprocess.run([*APART, script], cwd=ROOT, capture_output=True, timeout=120, check=False)
    return done.returncode, log.read_text()


def test_too_little_shared_memory_is_refused_with_the_size_that_it_takes(tmp_path: Path) -> None:
    """With 16 MiB UCX itself ends with a segmentation fault."""
    code, log = run(tmp_path, "16m")
    assert code == ExitCode.CONFIG
    assert "UCX needs 32 MiB" in log
    assert "service.ready" not in log


@pytest.mark.parametrize(
    ("size", "flags"), [("64m", ""), ("16m", "--ucx.tls tcp,cma")], ids=["enough", "unused"]
)
def test_otherwise_it_starts(tmp_path: Path, size: str, flags: str) -> None:
    code, log = run(tmp_path, size, flags)
    assert code == ExitCode.OK, log
    assert "service.stopped" in log
