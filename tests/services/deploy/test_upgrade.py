"""The upgrade of docs/operations.md, done: every process is replaced while requests run, and none fails."""

from __future__ import annotations

import copy
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.client import Client
from splitwise.errors import SplitwiseError
from tests.services.deploy.shim import PATIENCE_S, Stack
from tests.support.compose_file import FILE, load

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
PROMPT = list(range(1, 600))
# Each node has a machine of each phase, so that one node may be away.
NODES = {"prompt-node": ("prompt-0", "token-0"), "token-node": ("prompt-1", "token-1")}
DAEMONS = {"prompt-node": "kvd-prompt", "token-node": "kvd-token"}
MACHINES = ("prompt-0", "prompt-1", "token-0", "token-1")


@pytest.fixture
def stack() -> Iterator[Stack]:
    """The compose stack with a second router, which all machines know, too, and mixed nodes."""
    folder = Path(tempfile.mkdtemp(prefix="sw-upgrade-"))
    content = load(FILE)
    services = content["services"]
    services["router-b"] = copy.deepcopy(services["router"])
    for node, names in NODES.items():
        for name in names:
            service = services[name]
            words = dict(itertools.pairwise(service["command"]))
            changed = {
                words["--routers"]: "router:7400,router-b:7400",
                words["--node"]: node,
                words["--kvd_address"]: f"{DAEMONS[node]}:7500",
            }
            service["command"] = [changed.get(word, word) for word in service["command"]]
            service["volumes"] = [f"{node}:/run/splitwise", *service["volumes"][1:]]
            service["depends_on"] = {DAEMONS[node]: {"condition": "service_healthy"}}
    made = Stack(content, "cpu", folder)
    yield made
    made.close()
    shutil.rmtree(folder)


class Load:
    """Threads that ask one request after the other; `router` may be changed while they do."""

    def __init__(self, router: str, threads: int = 3) -> None:
        self.router = router
        self.answers: list[list[int]] = []
        self.problems: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._over.is_set():
            try:
                with Client(self.router, timeout=60) as client:
                    stream = client.generate(PROMPT, max_tokens=10, temperature=0, ignore_eos=True)
                    self.answers.append(list(stream.result().token_ids))
            except SplitwiseError as error:
                self.problems.append(repr(error))
                return

    def go_on(self, count: int = 6) -> None:
        """Wait until so many more requests have been answered."""
        enough, end = len(self.answers) + count, time.monotonic() + PATIENCE_S
        while len(self.answers) < enough and not self.problems:
            assert time.monotonic() < end, "no request ends any more"
            time.sleep(0.05)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()


def splitwise(router: str, *words: str) -> Any:
    """Run a command as an operator does, and read its JSON."""
    done = subprocess.run(
        [sys.executable, "-m", "splitwise.cli.main", *words, "--router", router, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "NUMBA_DISABLE_JIT": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(router: str, machine: str, condition: Any) -> None:
    end = time.monotonic() + PATIENCE_S
    while True:
        states = {m["machine_id"]: m for m in splitwise(router, "status")["machines"]}
        if machine in states and condition(states[machine]):
            return
        assert time.monotonic() < end, states


def drain(machine: str, *routers: str) -> None:
    """Take work away from a machine, and wait until none is left."""
    for router in routers:
        assert splitwise(router, "drain", machine)["state"] == "draining"
    for router in routers:
        until(router, machine, lambda m: not m["prompt_requests"] and not m["token_requests"])


def test_every_process_is_replaced_and_no_request_fails(stack: Stack):
    stack.start()
    first, second = (f"{stack.addresses[name]}:7400" for name in ("router", "router-b"))
    load_ = Load(first)
    try:
        load_.go_on()
        for name in MACHINES:
            drain(name, first, second)
            assert stack.stop(name) == 0
            stack.launch(name)
            for router in (first, second):
                until(router, name, lambda m: m["state"] == "serving")
            load_.go_on()
        for node, names in NODES.items():
            for name in names:
                drain(name, first, second)
            assert stack.stop(DAEMONS[node]) == 0
            stack.launch(DAEMONS[node])
            stack.wait_healthy(DAEMONS[node])
            for name in names:
                stack.wait_healthy(name)  # its engine has attached to the new daemon
                for router in (first, second):
                    splitwise(router, "drain", name, "--undo")
                    until(router, name, lambda m: m["state"] == "serving")
            load_.go_on()
        load_.router = second  # clients are pointed at the other router first
        load_.go_on()
        assert stack.stop("router") == 0
        stack.launch("router")
        stack.wait_healthy("router")
        load_.go_on()
    finally:
        load_.end()
    assert not load_.problems
    wanted = expected_tokens(settings_from_options({}), PROMPT, 10, ignore_eos=True)
    assert all(tokens == wanted for tokens in load_.answers)
    print(f"{len(load_.answers)} requests answered, none failed")
