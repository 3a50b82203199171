"""JSON of the commands that need a cluster, and health of each of its processes."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.services.cli.test_up import READY, Up, up

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["up"]


def ask(cluster: Up, *words: str, code: int = 0) -> Any:
    done = cluster.run(*words, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_cluster_in_json(up: Callable[..., Up]) -> None:
    cluster = up("--json")
    cluster.wait_for(READY)
    cluster.wait_for(r'"seconds_to_ready": [\d.]+\n}')
    found = re.search(r'^\{\n  "router".*?^\}', cluster.log.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    told = json.loads(found[0])
    assert told["http"] is None
    router = told["router"]

    answer = ask(cluster, "chat", "hello", "--max-tokens", "4")
    assert answer["output_tokens"] == 4
    decisions = ask(cluster, "explain", answer["request_id"])
    assert decisions[0]["kind"] == "assign"
    assert ask(cluster, "drain", "token-0")["state"] == "draining"
    assert ask(cluster, "health", router, "--role", "router")["status"] in ("SERVING", "NOT_SERVING")
    assert ask(cluster, "drain", "token-0", "--undo")["state"] == "serving"
    assert ask(cluster, "health", router, "--wait", "30")["status"] == "SERVING"

    for machine in ask(cluster, "status")["machines"]:
        assert ask(cluster, "health", machine["address"])["status"] == "SERVING"
        service = "splitwise.v1.TokenService"
        assert ask(cluster, "health", machine["address"], "--service", service)["status"] == "SERVING"
    unknown = ask(cluster, "health", router, "--service", "no.such.Service", code=69)
    assert unknown["status"] == "SERVICE_UNKNOWN"

    kvd = cluster.child("services.kvd")
    ports = {c.laddr.port for c in kvd.net_connections() if c.status == psutil.CONN_LISTEN}
    statuses = {
        json.loads(cluster.run("health", f"127.0.0.1:{port}", "--timeout", "5", "--json").stdout)["status"]
        for port in ports
    }
    assert "SERVING" in statuses  # of its ports one is gRPC's, the others are UCX's
