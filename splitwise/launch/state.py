"""The state file of a running `splitwise up`: how other commands find the cluster.

It lies in ``$XDG_RUNTIME_DIR/splitwise``, or in ``/tmp/splitwise-UID`` where there is no such
variable; the folder belongs to its user alone.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from splitwise.config import Address
from splitwise.errors import ConfigError, NotRunningError

if TYPE_CHECKING:
    from collections.abc import Mapping

ROUTER_VARIABLE = "SPLITWISE_ROUTER"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """What `up` writes: where its router is, and which process it is itself.

    `started` is the process's start in seconds since boot or epoch, as psutil says it, so
    that a process id that was used again is not taken for it.
    """

    router: str
    pid: int
    started: float
    http: str | None = None

    @property
    def alive(self) -> bool:
        """True while the `up` that wrote it runs."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < 1.0
        except psutil.NoSuchProcess:
            return False


def runtime_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the folder for sockets and state, made where it is missing (mode 0700).

    Raises `ConfigError` when it is another user's or open to others.
    """
    base = environment.get("XDG_RUNTIME_DIR")
    folder = Path(base) / "splitwise" if base else Path(f"/tmp/splitwise-{os.getuid()}")  # noqa: S108 - checked below
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = folder.lstat()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder of yours") from None
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
        raise ConfigError(
            f"{folder}: must be a folder of yours with mode 0700; remove it or set XDG_RUNTIME_DIR"
        )
    return folder


def write_state(router: Address, http: Address | None = None) -> Path:
    """Say that this process runs a cluster; returns the file, to be removed at the end."""
    path = runtime_folder() / "cluster.json"
    me = psutil.Process()
    state = ClusterState(str(router), me.pid, me.create_time(), None if http is None else str(http))
    scratch = path.with_suffix(f".{me.pid}")
    scratch.write_text(json.dumps(asdict(state)) + "\n")
    scratch.replace(path)
    return path


def read_state() -> ClusterState | None:
    """Return the running cluster's state; None when there is none."""
    try:
        state = ClusterState(**json.loads((runtime_folder() / "cluster.json").read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None
    return state if state.alive else None


def find_router(address: Address | str | None = None) -> Address:
    """Return the router to talk to: the given one, ``$SPLITWISE_ROUTER``, or the running `up`'s.

    Raises `NotRunningError` when none is known, `ConfigError` when the text is no address.
    """
    if isinstance(address, Address):
        return address
    origin, text = "address", address
    if text is None:
        origin, text = f"environment {ROUTER_VARIABLE}", os.environ.get(ROUTER_VARIABLE)
    if text is None:
        state = read_state()
        if state is None:
            raise NotRunningError(
                "no running cluster found: start one with `splitwise up`, or give the router's address"
                f" (--router or {ROUTER_VARIABLE})"
            )
        text = state.router
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {error}") from None
