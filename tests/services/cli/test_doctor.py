"""`splitwise doctor` on this host, and with something taken away from it."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

PATIENCE_S = 200
COMMAND = [sys.executable, "-m", "splitwise.cli.main", "doctor", "--json"]


def examine(*words: str, before: tuple[str, ...] = (), code: int | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [*before, *COMMAND, *words], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    findings = json.loads(done.stdout)
    failures = [finding for finding in findings if finding["verdict"] == "failure"]
    assert done.returncode == (1 if failures else 0), done.stderr
    if code is not None:
        assert done.returncode == code
    for finding in findings:
        assert finding["verdict"] in ("ok", "warning", "failure")
        assert bool(finding["remedy"]) == (finding["verdict"] != "ok"), finding
    return {finding["check"]: finding for finding in findings}


def test_everything_is_looked_at() -> None:
    found = examine()
    assert {
        "python", "packages", "memory", "/dev/shm", "memlock", "PID namespace", "IPC namespace", "UCX",
        "UCX transports", "UCX put there", "UCX put back", "router.listen", "kvd.listen", "runtime folder",
    } <= found.keys()  # fmt: skip
    assert {"RDMA devices", "RDMA device"} & found.keys()
    assert {"GPUs", "GPU driver"} & found.keys()
    for way in ("there", "back"):
        speed = found[f"UCX put {way}"]
        assert speed["verdict"] == "ok"
        assert float(speed["found"].split(" ")[0]) > 0


@pytest.mark.slow
def test_a_ucx_that_is_told_to_use_tcp_is_warned_of(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("kvd: {ucx: {tls: tcp}}\n")
    found = examine("--config", str(settings))
    assert found["UCX transports"]["verdict"] == "warning"
    assert "nothing but TCP" in found["UCX transports"]["found"]
    assert "tcp/" in found["UCX put back"]["found"]


@pytest.mark.slow
def test_a_missing_library_and_rdma_that_is_not_there_are_failures(tmp_path: Path) -> None:
    settings = tmp_path / "settings.yaml"
    settings.write_text("kvd: {ucx: {library: /no/libucp.so.0, tls: 'rc,tcp'}}\n")
    found = examine("--config", str(settings), code=1)
    assert "/no/libucp.so.0" in found["UCX"]["found"]
    if "RDMA devices" in found:
        assert found["RDMA devices"]["verdict"] == "failure"


@pytest.mark.slow
def test_a_taken_port_and_a_low_limit_are_warned_of(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        settings = tmp_path / "settings.yaml"
        settings.write_text(f"router: {{listen: '127.0.0.1:{port}'}}\n")
        limited = ("bash", "-c", 'ulimit -l 64 && exec "$@"', "bash")
        found = examine("--config", str(settings), before=limited)
    assert found["router.listen"]["verdict"] == "warning"
    assert found["memlock"]["verdict"] == "warning"
    assert found["memlock"]["found"] == "64 KiB"


@pytest.mark.slow
def test_namespaces_of_a_container_are_warned_of() -> None:
    apart = ("unshare", "--pid", "--ipc", "--fork", "--mount-proc")
    if (
        shutil.which("unshare") is None
        or subprocess.run([*apart, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("this user may not make namespaces")
    found = examine(before=apart)
    for kind in ("PID", "IPC"):
        assert found[f"{kind} namespace"]["verdict"] == "warning"
        assert f"{kind.lower()}: host" in found[f"{kind} namespace"]["remedy"]
    assert found["UCX put there"]["verdict"] == "ok"  # within the container it works


@pytest.mark.slow
def test_it_is_readable_too() -> None:
    done = subprocess.run(COMMAND[:-1], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert "UCX put there" in done.stdout
    assert done.stdout.splitlines()[0].startswith("ok")
