"""The request log: what simulations read, and nothing of what was said."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

import pytest

from services.router.requestlog import RequestLog
from splitwise.errors import ConfigError
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH
from splitwise.sim.compare import load_log
from splitwise.workload import load_trace
from tests.unit.router.test_dispatcher import Cluster

if TYPE_CHECKING:
    from pathlib import Path


def test_it_is_a_trace_with_measured_times(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    cluster = Cluster()
    before = time.time_ns()
    with RequestLog(path) as log:
        for count in (1, 2, 4):
            session = cluster.submit(prompt=20 + count, max_tokens=count)
            cluster.first(session, ord("a"))
            if count > 1:
                cluster.received(session)
                cluster.later(session, b"bcd"[: count - 1], FINISH_REASON_LENGTH)
            log.add(session)
        gone = cluster.submit(max_tokens=5)
        cluster.dispatcher.leave(gone)
        log.add(gone)  # it did not finish
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["prompt_tokens"], line["output_tokens"]) for line in lines] == [(21, 1), (22, 2), (24, 4)]
    assert all(before - 10**9 < line["arrived_unix_ns"] <= time.time_ns() for line in lines)
    assert ["second_us" in line for line in lines] == [False, True, True]
    assert ["tbt_mean_us" in line for line in lines] == [False, False, True]
    assert ["transfer" in line for line in lines] == [False, True, True]
    assert lines[1]["transfer"]["bytes"] == 7
    assert {line["finish"] for line in lines} == {"length"}
    assert {line["token_machine"][0] for line in lines[1:]} == {"t"}
    measured = load_log(path)
    assert len(measured.trace) == 3
    assert len(load_trace(path)) == 3


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    for _ in range(2):
        cluster = Cluster()
        session = cluster.submit(max_tokens=1)
        cluster.first(session, ord("a"))
        with RequestLog(path) as log:
            log.add(session)
            assert len(load_log(path).trace) >= 1  # each line is there at once
    assert len(load_log(path).trace) == 2


def test_a_path_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.request_log: .*no/such: No such file"):
        RequestLog(tmp_path / "no" / "such")


def test_a_full_disk_costs_lines_and_no_requests() -> None:
    from pathlib import Path

    session = (cluster := Cluster()).submit(max_tokens=1)
    cluster.first(session, ord("a"))
    with RequestLog(Path("/dev/full")) as log:
        log.add(session)
        log.add(session)
