"""Traces: every known format, every wrong row named, streaming, and made-up traces that look right."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from typing import TYPE_CHECKING

import numpy as np
import pytest

from splitwise.workload import Trace, TraceError, describe, iter_chunks, load_trace, synthesize, write_trace
from splitwise.workload.synthesize import Arrivals, burstiness

if TYPE_CHECKING:
    from pathlib import Path

HEADER = "arrival_s,prompt_tokens,output_tokens\n"


def write(tmp_path: Path, text: str, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_text(text)
    return path


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930{z},2162,5\n"
    "2024-05-10 00:00:02.5{z},2399,6\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 2162, "output_length": 5, "hash_ids": [1]}\n'
    '{"timestamp": 2490.07, "input_length": 2399, "output_length": 6, "hash_ids": []}\n'
)
ROUTER = (
    '{"arrived_unix_ns": 1700000000009930000, "prompt_tokens": 2162, "output_tokens": 5}\n\n'
    '{"arrived_unix_ns": 1700000002500000000, "prompt_tokens": 2399, "output_tokens": 6}\n'
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("azure-2023.csv", AZURE.format(z="")),
        ("azure-2024.csv", AZURE.format(z="+00:00")),
        ("crlf.csv", AZURE.format(z="").replace("\n", "\r\n")),
        (
            "azure.json",
            json.dumps(
                [
                    {
                        "TIMESTAMP": "2024-05-10 00:00:00.009930+00:00",
                        "ContextTokens": 2162,
                        "GeneratedTokens": 5,
                    },
                    {"TIMESTAMP": "2024-05-10T00:00:02.5Z", "ContextTokens": 2399, "GeneratedTokens": 6},
                ]
            ),
        ),
        ("mooncake.jsonl", MOONCAKE),
        ("router.jsonl", ROUTER),
        ("own.csv", HEADER + "0,2162,5\n2.49007,2399,6\n"),
        (
            "splitwise-sim.csv",
            "request_id,arrival_timestamp,prompt_size,token_size\n0,0,2162,5\n1,2.49007,2399,6\n",
        ),
    ],
)
def test_every_format_is_read_alike(tmp_path: Path, name: str, text: str) -> None:
    trace = load_trace(write(tmp_path, text, name))
    assert trace.arrival == pytest.approx([0.0, 2.49007], abs=1e-6)
    assert trace.prompt_tokens.tolist() == [2162, 2399]
    assert trace.output_tokens.tolist() == [5, 6]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ("", "no requests"),
        ("0,5,5\n2,5,5\n1,5,5\n", "row 3: arrival at 1 s after a row at 2 s"),
        ("-1,5,5\n2,5,5\n", "row 1: arrival at -1 s"),
        ("0,5,5\n1,0,5\n", "row 2: 0 prompt tokens"),
        ("0,5,5\n1,5,0\n", "row 2: 0 output tokens"),
        ("0,5,5\n1,-4,5\n", "row 2: -4 prompt tokens"),
        ("0,5,5\nnan,5,5\n", "row 2: the arrival time is not a number"),
        ("0,5,5\n1,x,5\n", "row 2: prompt_tokens is 'x'"),
        ("0,5,5\n1,5\n", "row 2: the column output_tokens is missing"),
        ("0,5,99999999999\n", "row 1: output_tokens is 99999999999"),
        ("soon,5,5\n", "row 1: arrival time is 'soon'"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: str, told: str) -> None:
    with pytest.raises(TraceError, match=r"trace\.csv") as error:
        load_trace(write(tmp_path, HEADER + rows))
    assert told in str(error.value)


def test_rows_are_numbered_across_chunks(tmp_path: Path) -> None:
    rows = "".join(f"{index},5,5\n" for index in range(10)) + "3,5,5\n"
    with pytest.raises(TraceError, match="row 11: arrival at 3 s after a row at 9 s"):
        list(iter_chunks(write(tmp_path, HEADER + rows), rows=4))


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("a.csv", "", "the file is empty"),
        ("a.csv", "time,in,out\n1,2,3\n", "columns are time, in, out"),
        ("a.jsonl", '{"timestamp": 1, "input_length": 2, "output_length": 3}\n{oops\n', "line 2: not JSON"),
        (
            "a.jsonl",
            '{"timestamp": 1, "input_length": 2, "output_length": 3}\n{"timestamp": 1}\n',
            "row 2: the field",
        ),
        ("a.json", '[{"timestamp": 1, "input_length": 2, "output_length": 3}, ', "entry 2: not JSON"),
        (
            "a.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00,1,1\nyesterday,1,1\n",
            "row 2: 'yest",
        ),
        ("a.csv.gz", "not gzip", "cannot be read"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, name: str, text: str, told: str) -> None:
    with pytest.raises(TraceError) as error:
        load_trace(write(tmp_path, text, name))
    assert told in str(error.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(tmp_path / "none.csv")


def test_sorting_and_dropping(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "2,5,1\n1,6,2\n3,0,4\n1,7,3\n")
    trace = load_trace(path, sort=True, drop_invalid=True)
    assert trace.prompt_tokens.tolist() == [6, 7, 5]  # equal times keep their order
    assert trace.arrival.tolist() == [1.0, 1.0, 2.0]


def test_written_traces_are_read_back(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    trace = Trace.of(
        np.sort(rng.uniform(0, 1e5, 1000)), rng.integers(1, 9999, 1000), rng.integers(1, 999, 1000)
    )
    for name in ("t.csv", "t.csv.gz"):
        assert write_trace(trace, tmp_path / name) == 1000
        again = load_trace(tmp_path / name)
        assert again.arrival == pytest.approx(trace.arrival, abs=1e-9)
        assert np.array_equal(again.output_tokens, trace.output_tokens)
    with gzip.open(tmp_path / "t.csv.gz", "rt") as file:
        assert file.readline() == HEADER


def test_a_long_trace_streams_in_bounded_memory(tmp_path: Path) -> None:
    from splitwise.workload import describe_chunks

    path = tmp_path / "long.csv"
    with path.open("w") as file:
        file.write(HEADER)
        for start in range(0, 400_000, 1000):
            file.write("".join(f"{(start + k) * 0.01:.2f},{1 + k % 700},{1 + k % 90}\n" for k in range(1000)))
    tracemalloc.start()
    summary = describe_chunks(iter_chunks(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert summary.requests == 400_000
    assert summary.rate == pytest.approx(100.0)
    assert peak < 60e6  # one chunk of Python rows; 400,000 of them would be some 150 MB


def test_describe_matches_the_known_numbers(azure: Path) -> None:
    summary = describe(load_trace(azure))
    assert summary.requests == 19_366
    assert summary.duration_s == pytest.approx(3502, abs=1)
    assert summary.cv == pytest.approx(1.09, abs=0.01)
    assert (summary.prompt.p50, summary.prompt.p99, summary.prompt.max) == (1020, 4142, 14_050)
    assert (summary.output.p50, summary.output.p90, summary.output.p99, summary.output.max) == (
        129,
        424,
        601,
        1000,
    )


def test_describe_in_chunks_equals_describe_at_once(azure: Path) -> None:
    from splitwise.workload import describe_chunks

    whole, parts = describe(load_trace(azure)), describe_chunks(iter_chunks(azure, rows=777))
    assert parts.prompt == whole.prompt
    assert (parts.peak_rate_1s, parts.requests) == (whole.peak_rate_1s, whole.requests)
    assert parts.cv == pytest.approx(whole.cv)
    assert parts.correlation == pytest.approx(whole.correlation)


def source() -> Trace:
    rng = np.random.default_rng(3)
    gaps = rng.gamma(0.05, 4.0, 5000)  # bursty: CV 4.5
    prompt = rng.integers(1, 2000, 5000)
    return Trace.of(np.cumsum(gaps) - gaps[0], prompt, 1 + prompt // 10)


def test_joint_sampling_keeps_pairs_and_apart_does_not() -> None:
    made = synthesize(source(), rate=50, duration=100)
    assert np.array_equal(made.output_tokens, 1 + made.prompt_tokens // 10)
    apart = synthesize(source(), rate=50, duration=100, joint=False)
    assert describe(made).correlation > 0.99
    assert abs(describe(apart).correlation) < 0.1


@pytest.mark.parametrize("arrivals", list(Arrivals))
def test_rate_and_burstiness(arrivals: Arrivals) -> None:
    made = synthesize(source(), rate=80, duration=2000, arrivals=arrivals, seed=5)
    made.check()
    assert made.arrival[-1] < 2000
    assert made.rate == pytest.approx(80, rel=0.1)
    expected = 1.0 if arrivals is Arrivals.POISSON else burstiness(source())
    assert burstiness(made) == pytest.approx(expected, rel=0.15)


def test_seeds_are_reproducible_and_sizes_do_not_depend_on_the_rate() -> None:
    first, again = (synthesize(source(), rate=20, duration=50, seed=7) for _ in range(2))
    assert np.array_equal(first.arrival, again.arrival)
    faster = synthesize(source(), rate=40, duration=50, seed=7)
    number = min(len(first), len(faster))
    assert np.array_equal(first.prompt_tokens[:number], faster.prompt_tokens[:number])
    assert not np.array_equal(
        first.prompt_tokens[:50], synthesize(source(), rate=20, duration=50).prompt_tokens[:50]
    )


@pytest.mark.parametrize(("rate", "duration"), [(0, 1), (-1, 1), (1, 0), (float("nan"), 1), (1e-9, 1)])
def test_impossible_wishes_are_refused(rate: float, duration: float) -> None:
    with pytest.raises(TraceError):
        synthesize(source(), rate=rate, duration=duration)


def test_slice_shifts_and_refuses_nothing() -> None:
    trace = Trace.of([0.0, 1.0, 2.0, 3.0], [1, 2, 3, 4], [1, 1, 1, 1])
    assert trace.slice(1.0, 3.0).arrival.tolist() == [0.0, 1.0]
    with pytest.raises(TraceError, match="no requests between"):
        trace.slice(10, 20)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_five_million_rows_stream_in_bounded_memory(tmp_path: Path) -> None:
    raw = tmp_path / "raw.csv"
    rows, chunk = 5_000_000, 100_000
    with raw.open("w") as file:
        file.write("arrival_timestamp,prompt_size,token_size\n")
        for start in range(0, rows, chunk):
            numbers = range(start, start + chunk)
            file.writelines(f"{n * 0.001:.3f},{100 + n % 2000},{1 + n % 300}\n" for n in numbers)
    # The interpreter with numpy takes some 100 MB; the rows as Python objects would take 800 MB.
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_DATA, (300 << 20,) * 2);"
        "from splitwise.cli.main import main; main()"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "trace", "describe", str(raw), "--json"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["requests"] == rows
