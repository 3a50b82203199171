"""Hosts that are not at hand, judged by their facts."""

from __future__ import annotations

import resource
import socket
from typing import TYPE_CHECKING, Any

import pytest

from splitwise.config import Settings, load_settings
from splitwise.doctor import Finding, Verdict, host, network

if TYPE_CHECKING:
    from pathlib import Path

OK, WARNING, FAILURE = Verdict.OK, Verdict.WARNING, Verdict.FAILURE


def verdicts(findings: list[Finding]) -> dict[str, Verdict]:
    return {finding.check: finding.verdict for finding in findings}


def assert_remedies(findings: list[Finding]) -> None:
    """What is not well says what to do; what is well does not."""
    for finding in findings:
        assert bool(finding.remedy) == (finding.verdict is not OK), finding


@pytest.mark.parametrize(
    ("limit", "verdict"), [(resource.RLIM_INFINITY, OK), (8 << 20, WARNING), (64 << 10, WARNING)]
)
def test_memlock(limit: int, verdict: Verdict) -> None:
    finding = host.memlock(limit)
    assert finding.verdict is verdict
    assert_remedies([finding])
    if verdict is WARNING:
        assert "LimitMEMLOCK=infinity" in finding.remedy
        assert f"{limit >> 10} KiB" in finding.found


def test_shared_memory_that_is_missing_or_small(monkeypatch: pytest.MonkeyPatch) -> None:
    assert host.shared_memory("/no/such/folder").verdict is FAILURE
    monkeypatch.setattr(host, "SHM_NEEDED", 1 << 60)
    finding = host.shared_memory()
    assert finding.verdict is FAILURE
    assert "remount" in finding.remedy


def test_namespaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pid").touch()
    first = (tmp_path / "pid").stat().st_ino
    monkeypatch.setattr(host, "FIRST_NAMESPACES", {"pid": first, "ipc": first})
    findings = host.namespaces(tmp_path)
    assert verdicts(findings) == {"PID namespace": OK, "IPC namespace": WARNING}  # it cannot be read
    (tmp_path / "ipc").touch()
    findings = host.namespaces(tmp_path)
    assert findings[1].verdict is WARNING
    assert "ipc: host" in findings[1].remedy
    assert_remedies(findings)


def test_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = ["--listen", f"127.0.0.1:{port}", "--http_listen", f"127.0.0.1:{port}"]
        findings = host.ports(load_settings("router", flags, environment={}).settings)
    by_check = {(f.check, f.verdict): f for f in findings}
    assert "in use" in by_check["router.listen", WARNING].found
    assert "router.listen" in by_check["router.http_listen", FAILURE].found  # the same port twice
    assert not any(check == "machine.listen" for check, _ in by_check)  # port 0 is always free
    assert_remedies(findings)


def test_a_free_ipv6_port_and_one_of_another_host() -> None:
    settings = load_settings(
        "kvd", ["--listen", "[::1]:0", "--router.listen", "192.0.2.1:7400"], environment={}
    ).settings
    findings = verdicts(host.ports(settings))
    assert findings["router.listen"] is WARNING


def test_the_defaults_are_all_tried() -> None:
    assert {"router.listen", "kvd.listen", "power.listen"} <= verdicts(host.ports(Settings())).keys()


# ---- UCX


def told(transports: list[str], rdma: bool = False, there: bool = True) -> dict[str, Any]:
    way = {"bytes_per_second": 2.5e9, "transports": transports, "arrived": True}
    return {
        "version": "1.22.0",
        "library": "/lib/libucp.so.0",
        "transports": transports,
        "rdma": rdma,
        "ways": {"there": {**way, "arrived": there}, "back": way},
    }


@pytest.mark.parametrize(
    ("transports", "rdma", "verdict", "says"),
    [
        (["rc_mlx5/mlx5_0:1"], True, OK, "RDMA"),
        (["cma/memory", "tcp/lo"], False, WARNING, "no RDMA"),
        (["tcp/eth0"], False, WARNING, "nothing but TCP"),
        ([], False, WARNING, "unknown"),
    ],
)
def test_transports(transports: list[str], rdma: bool, verdict: Verdict, says: str) -> None:
    findings = network.judge_ucx(told(transports, rdma))
    (finding,) = [f for f in findings if f.check == "UCX transports"]
    assert finding.verdict is verdict
    assert says in finding.found
    assert "2.50 GB/s" in next(f.found for f in findings if f.check == "UCX put back")
    assert_remedies(findings)


def test_a_put_that_does_not_arrive_is_a_failure() -> None:
    findings = verdicts(network.judge_ucx(told(["tcp/eth0"], there=False)))
    assert (findings["UCX put there"], findings["UCX put back"]) == (FAILURE, OK)


def test_ucx_that_does_not_load() -> None:
    (finding,) = network.judge_ucx({"error": "cannot load UCX from /nope"})
    assert finding.verdict is FAILURE
    assert "kvd.ucx.library" in finding.remedy


# ---- RDMA

V2, V1 = "RoCE v2", "IB/RoCE v1"
ADDRESS, LOCAL, EMPTY = (
    "0000:0000:0000:0000:0000:ffff:0a00:0005",
    "fe80:0000:0000:0000:1234:56ff:fe78:9abc",
    "0000:0000:0000:0000:0000:0000:0000:0000",
)


def add_port(
    root: Path, device: str, layer: str, state: str = "4: ACTIVE", gids: tuple[tuple[str, str], ...] = ()
) -> None:
    port = root / "sys/class/infiniband" / device / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs/types").mkdir(parents=True)
    for name, text in (("state", state), ("link_layer", layer), ("rate", "400 Gb/sec (4X NDR)")):
        (port / name).write_text(f"{text}\n")
    for index, (kind, gid) in enumerate(gids):
        (port / "gids" / str(index)).write_text(f"{gid}\n")
        (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
    verbs = root / "dev/infiniband"
    verbs.mkdir(parents=True, exist_ok=True)
    (verbs / "uverbs0").touch()


def test_a_host_without_rdma(tmp_path: Path) -> None:
    assert verdicts(network.rdma(tmp_path)) == {"RDMA devices": OK}
    findings = network.rdma(tmp_path, expected=True)
    assert verdicts(findings) == {"RDMA devices": FAILURE}
    assert_remedies(findings)


def test_infiniband(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", "InfiniBand")
    findings = network.rdma(tmp_path)
    assert verdicts(findings) == {"RDMA device": OK, "RDMA verbs": OK}
    assert "mlx5_0:1: InfiniBand, 400 Gb/sec (4X NDR), ACTIVE" in findings[0].found


def test_roce_with_an_address(tmp_path: Path) -> None:
    add_port(
        tmp_path,
        "mlx5_0",
        "Ethernet",
        gids=((V1, LOCAL), (V2, LOCAL), (V1, ADDRESS), (V2, ADDRESS), (V2, EMPTY)),
    )
    findings = {f.check: f for f in network.rdma(tmp_path)}
    assert findings["RoCE GIDs"].verdict is OK
    assert f"at 3 ({ADDRESS})" in findings["RoCE GIDs"].found


@pytest.mark.parametrize("gids", [(), ((V1, ADDRESS),), ((V1, LOCAL), (V2, LOCAL)), ((V2, EMPTY),)])
def test_roce_without_one(tmp_path: Path, gids: tuple[tuple[str, str], ...]) -> None:
    add_port(tmp_path, "mlx5_0", "Ethernet", gids=gids)
    findings = network.rdma(tmp_path)
    assert verdicts(findings)["RoCE GIDs"] is WARNING
    assert_remedies(findings)


def test_a_port_that_is_down_has_no_gids_to_judge(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", "Ethernet", state="1: DOWN")
    findings = verdicts(network.rdma(tmp_path))
    assert findings["RDMA device"] is WARNING
    assert "RoCE GIDs" not in findings


def test_verbs_that_are_missing(tmp_path: Path) -> None:
    add_port(tmp_path, "mlx5_0", "InfiniBand")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    assert verdicts(network.rdma(tmp_path))["RDMA verbs"] is FAILURE


def test_verbs_that_are_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_port(tmp_path, "mlx5_0", "InfiniBand")
    monkeypatch.setattr(network.os, "access", lambda _path, _mode: False)
    findings = {f.check: f for f in network.rdma(tmp_path)}
    assert findings["RDMA verbs"].verdict is FAILURE
    assert "uverbs0" in findings["RDMA verbs"].found
