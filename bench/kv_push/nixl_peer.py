"""NIXL as a peer: the same blocks written by its UCX backend between two processes.

The package is optional: ``pip install --no-deps nixl nixl-cu12`` (no GPU is needed). Two
processes of its own, since two copies of UCX in one process lose messages.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


def nixl_is_installed() -> bool:
    """Whether the peer can run."""
    return importlib.util.find_spec("nixl") is not None


class NixlPush:
    """A writer and a target, each with `memory` bytes registered."""

    def __init__(self, memory: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._writer, its_end = context.Pipe()
        writer_end, target_end = context.Pipe()
        self._processes = [
            context.Process(target=_write, args=(its_end, writer_end, memory), daemon=True),
            context.Process(target=_receive, args=(target_end, memory), daemon=True),
        ]
        for process in self._processes:
            process.start()

    def push(self, block: int, here: list[int], there: list[int]) -> float:
        """Write blocks; seconds from the first post until the target has the notice of the end."""
        self._writer.send((block, here, there))
        return float(self._writer.recv())

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _agent(name: str, memory: int) -> tuple[Any, int]:
    """Return an agent and the address of its registered memory."""
    import numpy as np
    from nixl._api import nixl_agent

    agent, bytes_ = nixl_agent(name), np.frombuffer(bytearray(os.urandom(memory)), dtype=np.uint8)
    agent.kept = (bytes_, agent.register_memory([(bytes_.ctypes.data, memory, 0, "")], "DRAM"))
    return agent, bytes_.ctypes.data


def _receive(writer: Connection, memory: int) -> None:
    agent, base = _agent("target", memory)
    writer.send((agent.get_agent_metadata(), base))
    while True:
        writer.recv()
        while not agent.get_new_notifs():  # NIXL has no call that sleeps
            pass
        writer.send(time.perf_counter())  # one clock for all processes of a host


def _write(orders: Connection, target: Connection, memory: int) -> None:
    agent, base = _agent("writer", memory)
    metadata, far_base = target.recv()
    agent.add_remote_agent(metadata)
    while True:
        block, here, there = orders.recv()
        sources = agent.prep_xfer_dlist("NIXL_INIT_AGENT", _runs(base, block, here), "DRAM")
        targets = agent.prep_xfer_dlist("target", _runs(far_base, block, there), "DRAM")
        every = list(range(len(here)))
        target.send("listen")
        begin = time.perf_counter()
        transfer = agent.make_prepped_xfer("WRITE", sources, every, targets, every, b"done")
        state = agent.transfer(transfer)
        while state != "DONE":
            state = agent.check_xfer_state(transfer)
        orders.send(target.recv() - begin)
        agent.release_xfer_handle(transfer)


def _runs(base: int, block: int, numbers: list[int]) -> list[tuple[int, int, int]]:
    return [(base + number * block, block, 0) for number in numbers]
