"""What the services ask of the kernel is what their units allow."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.compose_file import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (shutil.which("strace") and shutil.which("systemd-analyze")),
        reason="strace or systemd-analyze is not installed (Debian: strace, systemd)",
    ),
]
COMMON = ROOT / "deploy" / "systemd" / "splitwise-.service.d" / "common.conf"


def group(name: str) -> set[str]:
    """Return all calls of one of systemd's groups, such as @system-service."""
    listed = subprocess.run(
        ["systemd-analyze", "syscall-filter", name], capture_output=True, text=True, timeout=60, check=True
    )
    words = [line.strip() for line in listed.stdout.splitlines()[1:]]
    plain = {word for word in words if word and word[0] not in "#@"}
    return plain.union(*(group(word) for word in words if word.startswith("@")))


def allowed() -> set[str]:
    calls: set[str] = set()
    for value in re.findall(r"^SystemCallFilter=(.+)$", COMMON.read_text(), re.MULTILINE):
        names = group(value.lstrip("~"))
        calls = calls - names if value.startswith("~") else calls | names
    return calls


def test_a_demo_with_all_services_stays_within_the_filter(tmp_path: Path) -> None:
    runtime = Path(tempfile.mkdtemp(prefix="sw-strace-"))
    counts = tmp_path / "counts"
    words = [
        "strace",
        "-f",
        "-c",
        "-U",
        "name",
        "-o",
        str(counts),
        sys.executable,
        "-m",
        "splitwise.cli.main",
    ]
    try:
        done = subprocess.run(
            [*words, "demo", "--engine", "emulated", "--json"],
            env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), "NUMBA_DISABLE_JIT": "1"},
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
    finally:
        shutil.rmtree(runtime, ignore_errors=True)
    if "ptrace" in done.stderr and "not permitted" in done.stderr:
        pytest.skip("this user may not trace processes")
    assert done.returncode == 0, done.stderr[-2000:]
    used = {line.strip() for line in counts.read_text().splitlines()} - {"syscall", "total", ""}
    used = {name for name in used if not name.startswith("-")}
    assert {"memfd_create", "epoll_wait", "sendmsg"} & used
    assert used <= allowed()
