"""The event log on disk: bounded, and each of its files replays by itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.router.eventlog import EventLog
from splitwise.cli.main import app
from splitwise.errors import ConfigError, ExitCode
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH
from splitwise.scheduling.eventlog import replay
from tests.unit.router.test_dispatcher import Cluster


def busy(cluster: Cluster, requests: int) -> None:
    """Requests that end in several ways, and one that stays open."""
    cluster.submit(max_tokens=9)
    for number in range(requests):
        session = cluster.submit(prompt=20 + number, max_tokens=3)
        if number % 5 == 0:
            cluster.dispatcher.leave(session)
            continue
        cluster.first(session, ord("a"))
        cluster.received(session)
        cluster.later(session, b"bc", FINISH_REASON_LENGTH)


def recorded(path: Path, max_bytes: int = 10**9, requests: int = 20) -> Cluster:
    cluster = Cluster("")
    with EventLog(path, max_bytes, cluster.dispatcher.scheduler) as log:
        cluster.dispatcher.handle = log.handle
        for name in ("p1", "p2", "t1", "t2"):
            cluster.add(name)
        busy(cluster, requests)
        cluster.lose(cluster.links["t1"])
        cluster.dispatcher.tick()
    return cluster


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *arguments])
    return result.exit_code, result.output


def test_all_that_happened_replays(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path)
    lines = path.read_text().splitlines()
    assert replay(lines) == len(lines) - 1
    code, said = run(str(path))
    assert code == 0
    assert f"{len(lines) - 1} events, decided as recorded" in said
    assert " Assign" in said
    code, said = run(str(path), "--json")
    assert (code, json.loads(said)["events"], json.loads(said)["difference"]) == (0, len(lines) - 1, None)


def test_a_full_file_gives_way_and_both_replay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path, max_bytes=12_000, requests=80)
    older = tmp_path / "events.jsonl.1"
    assert sorted(tmp_path.iterdir()) == [path, older]
    assert 12_000 <= older.stat().st_size < 40_000
    for file in (path, older):
        lines = file.read_text().splitlines()
        assert "state" in json.loads(lines[0])
        assert replay(lines) == len(lines) - 1


def test_a_first_line_larger_than_the_file_may_be_costs_no_file_per_event(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path, max_bytes=2_000)
    first, *events = (tmp_path / "events.jsonl.1").read_text().splitlines()
    assert len(first) > 2_000
    assert len(events) > 3


def test_a_log_of_an_earlier_run_is_kept_as_the_older_one(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path)
    first = path.read_text()
    recorded(path)
    assert path.with_name("events.jsonl.1").read_text() == first


def test_what_is_decided_otherwise_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path)
    lines = path.read_text().splitlines(keepends=True)
    index = next(number for number, line in enumerate(lines) if '"prompt_machine":"p2"' in line)
    lines[index] = lines[index].replace('"prompt_machine":"p2"', '"prompt_machine":"p1"')
    path.write_text("".join(lines))
    code, said = run(str(path))
    assert code == 1
    assert f"line {index + 1}: RequestArrived" in said
    assert "decision 1 recorded: Assign" in said
    assert "prompt_machine='p2'" in said.split("replayed")[1]
    code, said = run(str(path), "--json")
    assert code == 1
    assert f"line {index + 1}" in json.loads(said)["difference"]


def test_a_line_that_was_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path)
    path.write_text(path.read_text()[:-20])
    assert run(str(path))[0] == 0


def test_a_requests_story_is_told_with_what_was_weighed(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    recorded(path)
    arrived = json.loads(path.read_text().splitlines()[5])["event"]
    code, said = run(str(path), "--request", arrived["request_id"])
    assert code == 0
    assert said.startswith("RequestArrived(")
    assert "* p1  prompt phase, prompt pool, 0 tokens queued, 0/1000 KV blocks" in said


@pytest.mark.parametrize("content", ["", "{}\n", "no json\n", "\xff\n"])
def test_what_is_no_log_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(content.encode("latin-1"))
    code, said = run(str(path))
    assert code == ExitCode.CONFIG
    assert str(path) in said
    assert run(str(tmp_path / "none"))[0] == ExitCode.CONFIG


def test_a_path_that_cannot_be_written_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"router\.event_log: .*events: No such file"):
        EventLog(tmp_path / "no" / "events", 10**6, Cluster("").dispatcher.scheduler)


def test_a_full_disk_ends_the_log_and_no_request() -> None:
    cluster = Cluster("")
    with EventLog(Path("/dev/full"), 10**6, cluster.dispatcher.scheduler) as log:
        cluster.dispatcher.handle = log.handle
        cluster.add("p1")
        log.flush()
        session = cluster.submit(max_tokens=1)
        cluster.first(session, ord("a"))
        log.flush()
    assert cluster.dispatcher.counters.finished == 1
