"""Profile files: all three formats, and every way they can be bad."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from splitwise.perf.fitting import fit
from splitwise.perf.model import PerformanceModelError
from splitwise.perf.profiles import ProfilePoint, read_csv, read_profile, write_profile

if TYPE_CHECKING:
    from pathlib import Path

COLUMNS = (
    "model,hardware,prompt_size,batch_size,token_size,"
    "peak_power,average_power,prompt_time,token_time,e2e_time,tensor_parallel"
)
GOOD = "m,h,512,2,128,0.9,0.5,100,20,2640,8"


def csv_file(path: Path, *rows: str, columns: str = COLUMNS) -> Path:
    file = path / "profile.csv"
    file.write_text("\n".join([columns, *rows]) + "\n")
    return file


def test_the_authors_csv(tmp_path: Path) -> None:
    (point,) = read_csv(csv_file(tmp_path, GOOD, GOOD))
    assert point == ProfilePoint("m", "h", 8, 512, 2, 127.0, 0.1, 0.02, 0.9, 0.5)
    assert len(read_csv(csv_file(tmp_path, GOOD, GOOD), repeated_rows=True)) == 2


def test_tokens_that_were_asked_for_and_not_made_do_not_count(tmp_path: Path) -> None:
    (point,) = read_csv(csv_file(tmp_path, "m,h,512,1,8192,0,0,100,20,3100,8"))
    assert point.output_tokens == pytest.approx(150.0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("m,h,512,2,128,0,0,nan,20,2640,8", "profile.csv:3: prompt_time is 'nan'"),
        ("m,h,512,2,128,0,0,,20,2640,8", "profile.csv:3: prompt_time is ''"),
        ("m,h,512,2,128,0,0,100,-3,2640,8", "profile.csv:3: token_time is '-3'"),
        ("m,h,512,0,128,0,0,100,20,2640,8", "profile.csv:3: batch_size is '0'"),
        ("m,h,512,2", "profile.csv:3: "),
        ("m,h,512,2,128,nan,0,100,20,2640,8", "profile.csv:3: peak_power is 'nan'"),
        ("m,h,512,2,128,watts,0,100,20,2640,8", "profile.csv:3: peak_power is 'watts'"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    with pytest.raises(PerformanceModelError, match=message):
        read_csv(csv_file(tmp_path, GOOD, row))


def test_bad_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(PerformanceModelError, match="lacks the columns batch_size, e2e_time"):
        read_csv(
            csv_file(
                tmp_path,
                columns="model,hardware,prompt_size,token_size,prompt_time,token_time,tensor_parallel",
            )
        )
    with pytest.raises(PerformanceModelError, match="no profile points"):
        read_profile([csv_file(tmp_path)])
    with pytest.raises(PerformanceModelError, match=r"gone.csv: cannot be read"):
        read_profile([tmp_path / "gone.csv"])
    with pytest.raises(PerformanceModelError, match="no files at all"):
        read_profile([])
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PerformanceModelError, match="cannot be read"):
        read_profile([tmp_path / "binary.csv"])


def test_our_own_format_survives_a_round_trip(tmp_path: Path) -> None:
    points = [ProfilePoint("m", "h", 4, 512, b, 64.0, 0.1 * b, 0.02) for b in (1, 2)]
    file = tmp_path / "own.json"
    write_profile(file, points, {"engine": "emulated"})
    assert read_profile([file]) == points


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt_seconds": 0}, r"points\[0\]: prompt_seconds=0 cannot be"),
        ({"batch": -1}, r"points\[0\]: batch=-1 cannot be"),
        ({"token_seconds": "fast"}, r"points\[0\]"),
        ({"colour": 1}, r"points\[0\]: must be an object with only"),
    ],
)
def test_bad_points_of_our_own_format(tmp_path: Path, change: dict[str, object], message: str) -> None:
    file = tmp_path / "own.json"
    write_profile(file, [ProfilePoint("m", "h", 4, 512, 1, 64.0, 0.1, 0.02)], {})
    data = json.loads(file.read_text())
    data["points"][0].update(change)
    file.write_text(json.dumps(data))
    with pytest.raises(PerformanceModelError, match=message):
        read_profile([file])


def test_json_that_is_no_profile(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text, message in [
        ("{", "is not JSON"),
        ("[]", "one JSON object"),
        ("{}", "neither a splitwise profile"),
    ]:
        file.write_text(text)
        with pytest.raises(PerformanceModelError, match=message):
            read_profile([file])
    file.write_text('{"format": "splitwise-profile/1"}')
    with pytest.raises(PerformanceModelError, match="lacks its list of points"):
        read_profile([file])


def vllm_file(folder: Path, name: str, *seconds: float) -> Path:
    """Write what ``vllm bench latency --output-json`` writes."""
    file = folder / f"{name}.json"
    data = {"avg_latency": sum(seconds) / len(seconds), "latencies": list(seconds), "percentiles": {}}
    file.write_text(json.dumps(data))
    return file


def throughput_file(folder: Path, name: str, requests: int, seconds: float) -> Path:
    """Write what ``vllm bench throughput --output-json`` writes."""
    file = folder / f"{name}.json"
    data = {"model_id": "x", "elapsed_time": seconds, "num_requests": requests, "total_num_tokens": 1}
    file.write_text(json.dumps(data))
    return file


def test_vllm_runs_with_and_without_a_token_phase(tmp_path: Path) -> None:
    files = []
    for tokens in (128, 512, 2048):
        prompt = 0.01 + tokens * 1e-4
        files.append(vllm_file(tmp_path, f"in{tokens}-out1-batch1", prompt, prompt, prompt * 1.01))
        files.append(vllm_file(tmp_path, f"in{tokens}-out101-batch1", prompt + 100 * 0.02))
    files.append(throughput_file(tmp_path, "run-in512-out1-batch8", 8, 0.3))
    files.append(throughput_file(tmp_path, "run-in512-out11-batch8", 8, 0.3 + 10 * 0.03))
    points = read_profile(files, model="m", hardware="h", tensor_parallel=2)
    assert {(p.prompt_tokens, p.batch) for p in points} == {(128, 1), (512, 1), (2048, 1), (512, 8)}
    model = fit(points)
    assert model.name == "m|h|tp2"
    assert model.prompt_seconds(512) == pytest.approx(0.0612)
    assert model.prompt_seconds(4096, 8) == pytest.approx(0.3)
    assert model.token_seconds(8, 8 * 517) == pytest.approx(0.03, rel=0.02)


def test_vllm_files_that_do_not_say_enough(tmp_path: Path) -> None:
    nameless = vllm_file(tmp_path, "latency", 1.0)
    with pytest.raises(PerformanceModelError, match=r"name it like in512-out128-batch8\.json"):
        read_profile([nameless], model="m", hardware="h")
    longer = vllm_file(tmp_path, "in8-out5-batch1", 1.0)
    with pytest.raises(PerformanceModelError, match="in8 batch1 has no run with out1"):
        read_profile([longer], model="m", hardware="h")
    with pytest.raises(PerformanceModelError, match="name neither model nor hardware"):
        read_profile([longer])
    prompt = vllm_file(tmp_path, "in8-out1-batch1", 2.0)
    with pytest.raises(PerformanceModelError, match=r"token_seconds=-0\.25 cannot be"):
        read_profile([prompt, longer], model="m", hardware="h")
    other = throughput_file(tmp_path, "in8-out1-batch4", 3, 1.0)
    with pytest.raises(PerformanceModelError, match="num_requests is 3, the name says batch4"):
        read_profile([other], model="m", hardware="h")
    for bad in (0.0, float("nan")):
        broken = vllm_file(tmp_path, "in9-out1-batch1", bad)
        with pytest.raises(PerformanceModelError, match="no positive number"):
            read_profile([broken], model="m", hardware="h")


def test_points_know_their_context() -> None:
    point = ProfilePoint("m", "h", 1, 100, 4, 10.0, 0.1, 0.02)
    assert (point.total_prompt, point.mean_context) == (400, 420.0)
    assert replace(point, output_tokens=0.0).mean_context == 402.0
