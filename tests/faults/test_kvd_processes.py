"""Daemons and engines that die or stop in the middle of transfers, and bad input from either side."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from services.kvd.client import AttachError, Failed, Received
from splitwise.rpc.v1 import kvd_pb2 as pb
from tests.services.kvd.daemon import DaemonProcess
from tests.services.kvd.fake_engine import PATIENCE, FakeEngine, Ref, new_key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from splitwise.kv.identity import TransferKey

    StartPair = Callable[..., "Pair"]

BIG: dict[str, Any] = {"blocks": 64, "block_bytes": 1 << 18}  # 48 MiB: a transfer that lasts


class Pair:
    """Two daemons and an engine at each."""

    def __init__(self, folder: Path, *flags: str, **shape: Any) -> None:
        self.near = DaemonProcess(folder, "near", *flags).start()
        self.far = DaemonProcess(folder, "far", *flags).start()
        self.prompt = FakeEngine(self.near.socket, "p", **shape)
        self.token = FakeEngine(self.far.socket, "t", **shape)

    def begin(self, blocks: range, **reserve: int) -> TransferKey:
        """Open a transfer and write all of its prompt, without the first token."""
        key = new_key()
        self.token.reserve(key, blocks, at=self.near.address, source="p", **reserve)
        self.prompt.expect(key)
        self.prompt.run_pass(key, 0, blocks, final=True)
        return key

    def works(self) -> None:
        """One transfer, as if nothing had happened."""
        key = new_key()
        self.token.reserve(key, [1, 2], at=self.near.address, source="p")
        self.prompt.prompt(key, [3, 4])
        received = self.token.arrived(key)
        self.prompt.cancel(key)  # of no effect when it has arrived
        assert isinstance(received, Received), received
        assert self.token.bytes_of([1, 2]) == self.prompt.bytes_of([3, 4])
        self.prompt.released(key)

    def works_in_the_end(self) -> None:
        """As `works`, once the daemons have found each other again."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self.works()
            except AssertionError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
            else:
                return

    def close(self) -> None:
        self.prompt.close()
        self.token.close()
        self.near.kill()
        self.far.kill()


@pytest.fixture
def start_pair(tmp_path: Path) -> Iterator[StartPair]:
    shared = set(Path("/dev/shm").iterdir())
    pairs: list[Pair] = []

    def start(*flags: str, **shape: Any) -> Pair:
        pairs.append(Pair(tmp_path, *flags, **shape))
        return pairs[-1]

    yield start
    for pair in pairs:
        pair.close()
    left = {name for name in set(Path("/dev/shm").iterdir()) - shared if "splitwise" in name.name}
    assert not left


def attached(engine: FakeEngine, other_than: int | None) -> None:
    deadline = time.monotonic() + PATIENCE
    while engine.client.daemon_incarnation in (None, other_than):
        assert time.monotonic() < deadline, engine.client.failure()
        time.sleep(0.02)


def test_either_daemon_killed_in_the_middle_of_transfers(start_pair: StartPair) -> None:
    pair = start_pair(**BIG)
    pair.works()
    for victim, engine in ((pair.near, pair.prompt), (pair.far, pair.token)):
        incarnation = engine.client.daemon_incarnation
        keys = [pair.begin(range(at, at + 8)) for at in (0, 8, 16)]
        victim.kill()
        for key in keys:
            assert not pair.prompt.released(key).delivered
            failed = pair.token.arrived(key)
            assert isinstance(failed, Failed)
            assert failed.cause == pb.TRANSFER_FAILURE_PEER_LOST, failed
        victim.start()
        attached(engine, incarnation)
        pair.works()  # at once: who attached again says that its daemon serves
        pair.near.until_empty()
        pair.far.until_empty()


def test_late_writes_of_a_stopped_source_harm_nobody(start_pair: StartPair) -> None:
    pair = start_pair(**BIG)
    key = new_key()
    pair.token.reserve(key, range(32), at=pair.near.address, source="p")
    pair.prompt.expect(key)
    pair.near.until(lambda told: told.transfers_open == 1)
    pair.far.until(lambda told: bool(told.counters.grants))
    pair.works()  # the grant has its answer
    pair.near.signal(signal.SIGSTOP)
    try:
        pair.prompt.run_pass(key, 0, range(32), final=True)
        pair.prompt.client.first_token(Ref(key), 3)
        pair.token.cancel(key)
        assert isinstance(pair.token.arrived(key), Failed)  # after the fence: the blocks are ours again
        pair.token.write(0, range(32))
        mine = pair.token.bytes_of(range(32))
    finally:
        pair.near.signal(signal.SIGCONT)
    assert not pair.prompt.released(key).delivered
    assert pair.token.bytes_of(range(32)) == mine
    pair.near.until_empty()
    pair.far.until_empty()
    pair.works_in_the_end()


def test_a_stopped_destination_gives_the_source_its_blocks_back(start_pair: StartPair) -> None:
    pair = start_pair()
    key = new_key()
    pair.token.reserve(key, range(4), at=pair.near.address, source="p")
    pair.prompt.expect(key, lease_ms=1500)
    pair.works()
    pair.far.signal(signal.SIGSTOP)
    try:
        pair.prompt.run_pass(key, 0, range(4), final=True)
        pair.prompt.client.first_token(Ref(key), 3)
        assert not pair.prompt.released(key).delivered
        time.sleep(3)  # what it is told meanwhile must reach it all the same, not after its lease
    finally:
        pair.far.signal(signal.SIGCONT)
    assert "the lease ran out" in pair.token.arrived(key).message
    pair.near.until_empty()
    pair.far.until_empty()
    pair.works_in_the_end()


def test_an_engine_that_dies_frees_the_other_side(start_pair: StartPair) -> None:
    pair = start_pair(**BIG)
    key = pair.begin(range(20))
    pair.prompt.close()
    failed = pair.token.arrived(key)
    assert isinstance(failed, Failed)
    assert "engine p is gone" in failed.message
    pair.prompt = FakeEngine(pair.near.socket, "p", **BIG)
    key = pair.begin(range(20))
    pair.token.close()
    assert not pair.prompt.released(key).delivered
    pair.token = FakeEngine(pair.far.socket, "t", **BIG)
    pair.near.until_empty()
    pair.far.until_empty()
    pair.works()


def test_an_engine_replaced_by_its_next_incarnation_hears_of_it(start_pair: StartPair) -> None:
    pair = start_pair()
    key = new_key()
    pair.token.reserve(key, [1], at=pair.near.address, source="p")
    successor = FakeEngine(pair.far.socket, "t")
    failed = pair.token.arrived(key)
    assert isinstance(failed, Failed)
    assert failed.cause == pb.TRANSFER_FAILURE_PEER_LOST
    pair.token.close()
    pair.token = successor
    pair.works()
    stale = FakeEngine(pair.far.socket, "t", attach=False)
    stale.client.incarnation = stale.client._attach.incarnation = 1
    with pytest.raises(AttachError, match="newer incarnation"):
        stale.client.attach(stale.geometry, stale.memory)
    stale.close()
    assert pair.far.describe().counters.rejected["stale_incarnation"] >= 1


def test_sigterm_waits_for_what_is_open_and_takes_nothing_new(start_pair: StartPair) -> None:
    pair = start_pair("--drain-s", "30")
    key = pair.begin(range(4))
    pair.near.until(lambda told: told.transfers_open == 1)
    pair.near.signal(signal.SIGTERM)
    refused, deadline = new_key(), time.monotonic() + PATIENCE
    while True:
        pair.prompt.expect(refused)
        if pair.prompt.client.wait(0.2):
            break
        pair.prompt.cancel(refused)
        pair.prompt.released(refused)
        refused = new_key()
        assert time.monotonic() < deadline
    pair.prompt.client.first_token(Ref(key), 9)
    assert isinstance(pair.token.arrived(key), Received)
    assert pair.near.process is not None
    assert pair.near.process.wait(PATIENCE) == 0
    assert not Path(pair.near.socket).exists()
    assert pair.far.stop() == 0
    assert not Path(pair.far.socket).exists()


def test_idle_daemons_sleep(start_pair: StartPair) -> None:
    pair = start_pair()
    pair.works()
    assert pair.far.process is not None
    stat = Path(f"/proc/{pair.far.process.pid}/stat")
    ticks = [0, 0]
    for number in range(2):
        ticks[number] = sum(int(part) for part in stat.read_text().rsplit(")", 1)[1].split()[11:13])
        time.sleep(2 * (1 - number))
    # One that spins would use 2 s; the bound is far from both.
    assert (ticks[1] - ticks[0]) / os.sysconf("SC_CLK_TCK") < 0.5


def test_a_flipped_byte_and_swapped_blocks_are_found(start_pair: StartPair) -> None:
    pair = start_pair()
    for harm in ("flip", "swap"):
        key = new_key()
        pair.token.reserve(key, [1, 2], at=pair.near.address, source="p")
        pair.prompt.expect(key)
        pair.prompt.run_pass(key, 0, [3, 4], final=True)
        deadline = time.monotonic() + PATIENCE
        while pair.token.bytes_of([1, 2]) != pair.prompt.bytes_of([3, 4]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        buffer, one, two = pair.token.memory.buffer, pair.token._at(0, 1), pair.token._at(0, 2)
        if harm == "flip":
            buffer[one.start] ^= 1
        else:
            buffer[one], buffer[two] = buffer[two], buffer[one]
        pair.prompt.client.first_token(Ref(key), 9)
        failed = pair.token.arrived(key)
        assert isinstance(failed, Failed)
        assert failed.corrupt, harm
        pair.prompt.released(key)
    assert pair.far.until_empty().counters.rejected["corrupt"] == 2


def test_engines_get_the_client_without_grpc() -> None:
    listed = subprocess.run(
        [sys.executable, "-c", "import services.kvd.client, sys; print('grpc' in sys.modules)"],
        capture_output=True,
        check=True,
        text=True,
    )
    assert listed.stdout.strip() == "False"  # engines import the client: it must not bring gRPC
