"""The way between nodes: UCX with real puts, RDMA devices, RoCE addresses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from splitwise.doctor.finding import Finding, failure, ok, warning

if TYPE_CHECKING:
    from collections.abc import Iterator

PROBE_TIMEOUT_S = 90.0
UCX_REMEDY = "pip install libucx-cu12, or set kvd.ucx.library"
ROCE = "Ethernet"  # the link layer of a port that speaks RoCE
ROCE_V2 = "RoCE v2"


@dataclass(frozen=True, slots=True)
class Port:
    """One port of an RDMA device, as ``/sys/class/infiniband`` tells it. `gids`: index to (type, address)."""

    device: str
    number: str
    state: str
    link_layer: str
    rate: str
    gids: dict[int, tuple[str, str]]

    @property
    def name(self) -> str:
        """The name that UCX_NET_DEVICES takes."""
        return f"{self.device}:{self.number}"


def ucx(config: Path | None) -> list[Finding]:
    """Run the probe in processes of their own: two UCX in one process lose messages."""
    command = [sys.executable, "-m", "services.kvd.probe"]
    command += ["--config", str(config)] if config else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
        return judge_ucx(json.loads(done.stdout.strip().splitlines()[-1]))
    except subprocess.TimeoutExpired:
        return [failure("UCX", f"no answer within {PROBE_TIMEOUT_S:.0f} s", "check kvd.ucx in the settings")]
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [failure("UCX", f"the probe ended with {done.returncode}: {last}", UCX_REMEDY)]


def judge_ucx(told: dict[str, Any]) -> list[Finding]:
    """Judge what the probe told: library, transports, and a line for each way."""
    if "error" in told:
        return [failure("UCX", told["error"], UCX_REMEDY)]
    found = [ok("UCX", f"{told['version']} from {told['library']}")]
    used = ", ".join(told["transports"]) or "unknown"
    if told["rdma"]:
        found.append(ok("UCX transports", f"{used}: RDMA"))
    elif told["transports"] and all(name.startswith("tcp/") for name in told["transports"]):
        remedy = (
            "fine for trying out; on one host shared memory (posix, cma) is faster and between hosts RDMA is "
            "needed: see kvd.ucx.tls, kvd.ucx.net_devices, and the namespaces below"
        )
        found.append(warning("UCX transports", f"{used}: nothing but TCP", remedy))
    else:
        remedy = (
            "fine on one host; between hosts set kvd.ucx.library to a UCX with verbs (HPC-X or the system's)"
        )
        found.append(warning("UCX transports", f"{used}: no RDMA", remedy))
    for way in ("there", "back"):
        one = told["ways"][way]
        text = f"{one['bytes_per_second'] / 1e9:.2f} GB/s over {', '.join(one['transports']) or 'unknown'}"
        if one["arrived"]:
            found.append(ok(f"UCX put {way}", text))
        else:
            found.append(failure(f"UCX put {way}", f"{text}, and the bytes are not there", UCX_REMEDY))
    return found


def rdma(root: Path = Path("/"), *, expected: bool = False) -> list[Finding]:
    """Judge every RDMA port; `expected` when the settings ask UCX for RDMA."""
    ports = list(read_ports(root / "sys/class/infiniband"))
    if not ports:
        if not expected:
            return [ok("RDMA devices", "none: other nodes are reached over TCP")]
        remedy = (
            "load the driver of the network card (ibv_devinfo lists devices), or take rc from kvd.ucx.tls"
        )
        return [failure("RDMA devices", "none, and kvd.ucx.tls asks for them", remedy)]
    found = [_judge_port(port) for port in ports]
    found += [_judge_gids(port) for port in ports if port.link_layer == ROCE and _active(port)]
    verbs = sorted((root / "dev/infiniband").glob("uverbs*"))
    closed = [path.name for path in verbs if not os.access(path, os.R_OK | os.W_OK)]
    if not verbs:
        remedy = "modprobe ib_uverbs; containers need the devices of /dev/infiniband"
        found.append(failure("RDMA verbs", "no /dev/infiniband/uverbs*", remedy))
    elif closed:
        remedy = "allow this user to read and write them (udev rule, or the group of the device)"
        found.append(failure("RDMA verbs", f"not allowed: {', '.join(closed)}", remedy))
    else:
        found.append(ok("RDMA verbs", f"{len(verbs)} devices can be opened"))
    return found


def _active(port: Port) -> bool:
    return port.state.endswith("ACTIVE")


def _judge_port(port: Port) -> Finding:
    kind = "RoCE" if port.link_layer == ROCE else port.link_layer
    text = f"{port.name}: {kind}, {port.rate}, {port.state.partition(': ')[2] or port.state}"
    if _active(port):
        return ok("RDMA device", text)
    remedy = (
        f"connect it and bring its link up (ibstat {port.device}), or leave it out of kvd.ucx.net_devices"
    )
    return warning("RDMA device", text, remedy)


def _judge_gids(port: Port) -> Finding:
    """RoCE v2 needs an address that routers know: an entry made from an IP address of the interface."""
    usable = [i for i, (kind, gid) in port.gids.items() if kind == ROCE_V2 and not gid.startswith("fe80")]
    if usable:
        told = ", ".join(f"{index} ({port.gids[index][1]})" for index in usable[:4])
        return ok("RoCE GIDs", f"{port.name}: RoCE v2 at {told}; UCX_IB_GID_INDEX chooses one")
    remedy = (
        "give the interface an IP address (ip addr), and see `show_gids` or /sys/class/infiniband/"
        f"{port.device}/ports/{port.number}/gid_attrs/types; RoCE v1 and link-local GIDs do not cross routers"
    )
    return warning("RoCE GIDs", f"{port.name}: no RoCE v2 GID with an IP address", remedy)


def read_ports(folder: Path) -> Iterator[Port]:
    """Read every port of every RDMA device below `folder`."""
    for path in sorted(folder.glob("*/ports/*")):
        gids = {}
        for entry in sorted((path / "gids").glob("*"), key=lambda entry: int(entry.name)):
            gid, kind = _text(entry), _text(path / "gid_attrs" / "types" / entry.name)
            if kind and gid.strip("0:"):
                gids[int(entry.name)] = (kind, gid)
        yield Port(
            path.parts[-3],
            path.name,
            _text(path / "state"),
            _text(path / "link_layer"),
            _text(path / "rate"),
            gids,
        )


def _text(path: Path) -> str:
    """Read one value; entries of ``/sys`` that are not set cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
