"""Read measured phase times from files: our own, the authors' simulator's, vLLM's benchmarks.

Three formats end in the same `ProfilePoint`s:

* ``.csv``: the profile of github.com/Mutinifni/splitwise-sim as published (milliseconds);
* ``.json`` of ``splitwise profile`` (`FORMAT`), see `write_profile`;
* ``.json`` of ``vllm bench latency`` or ``vllm bench throughput``. Those files do not say
  what was run, so their names must: ``in512-out128-batch8.json``. Each (input, batch)
  needs one run with ``out1`` (the prompt phase alone) and one with more tokens.

Every reader refuses what it cannot use with the file, the line or point, and the field.
"""

from __future__ import annotations

import csv
import json
import re
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import TYPE_CHECKING, Any

from splitwise.perf.model import PerformanceModelError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

FORMAT = "splitwise-profile/1"
_VLLM_NAME = re.compile(r"in(?P<input>\d+)[-_]out(?P<output>\d+)[-_]batch(?P<batch>\d+)")


@dataclass(frozen=True, slots=True)
class ProfilePoint:
    """One measured run of a batch of equal requests. Times in seconds, sizes in tokens."""

    model: str
    hardware: str
    tensor_parallel: int
    prompt_tokens: int  # of each sequence
    batch: int  # sequences
    output_tokens: float  # made by each sequence; what the run really made, not what it asked for
    prompt_seconds: float  # arrival to first token, whole batch
    token_seconds: float  # mean time of a token iteration; 0: not measured
    peak_power: float = 0.0  # of GPU TDP, 0: not measured
    mean_power: float = 0.0

    @property
    def key(self) -> tuple[str, str, int]:
        """What one performance model is fitted for."""
        return self.model, self.hardware, self.tensor_parallel

    @property
    def total_prompt(self) -> int:
        """Prompt tokens of the batch."""
        return self.prompt_tokens * self.batch

    @property
    def mean_context(self) -> float:
        """Tokens of context in the batch, averaged over the run's token iterations."""
        return self.batch * (self.prompt_tokens + max(self.output_tokens, 1.0) / 2.0)


def read_profile(
    paths: Sequence[Path], *, model: str = "", hardware: str = "", tensor_parallel: int = 1
) -> list[ProfilePoint]:
    """Read any mix of profile files; the names are only needed for vLLM's benchmark files."""
    points: list[ProfilePoint] = []
    vllm: dict[Path, Mapping[str, Any]] = {}
    for path in paths:
        if path.suffix == ".csv":
            points += read_csv(path)
            continue
        data = _load_json(path)
        if data.get("format") == FORMAT:
            points += _own_points(path, data)
        elif "avg_latency" in data or "elapsed_time" in data:
            vllm[path] = data
        else:
            raise PerformanceModelError(
                f"{path}: neither a splitwise profile ({FORMAT}) nor the output of "
                "vllm bench latency or throughput"
            )
    if vllm:
        points += _vllm_points(vllm, model, hardware, tensor_parallel)
    if not points:
        raise PerformanceModelError(f"no profile points in {', '.join(map(str, paths)) or 'no files at all'}")
    return points


def read_csv(path: Path, *, repeated_rows: bool = False) -> list[ProfilePoint]:
    """Read the authors' simulator's profile.

    The published file holds some measurements three times; each is kept once unless
    `repeated_rows` asks for the file as it is.

    Generated tokens are taken from the end-to-end time where they fell short of
    ``token_size``: the published runs ended early at large sizes.
    """
    needed = {"model", "hardware", "tensor_parallel", "prompt_size", "batch_size", "token_size"}
    needed |= {"prompt_time", "token_time", "e2e_time"}
    reader = csv.DictReader(_lines(path))
    missing = needed - set(reader.fieldnames or ())
    if missing:
        raise PerformanceModelError(f"{path}: lacks the columns {', '.join(sorted(missing))}")
    points = [_csv_point(row, f"{path}:{number}") for number, row in enumerate(reader, start=2)]
    if repeated_rows:
        return points
    unique = {(p.key, p.prompt_tokens, p.batch, p.prompt_seconds, p.token_seconds): p for p in points}
    return list(unique.values())


def _csv_point(row: Mapping[str, str], where: str) -> ProfilePoint:
    prompt_ms, token_ms = _number(row, "prompt_time", where), _number(row, "token_time", where)
    made = min((_number(row, "e2e_time", where) - prompt_ms) / token_ms, _number(row, "token_size", where))
    point = ProfilePoint(
        model=row["model"],
        hardware=row["hardware"],
        tensor_parallel=int(_number(row, "tensor_parallel", where)),
        prompt_tokens=int(_number(row, "prompt_size", where)),
        batch=int(_number(row, "batch_size", where)),
        output_tokens=made,
        prompt_seconds=prompt_ms / 1e3,
        token_seconds=token_ms / 1e3,
        peak_power=_number(row, "peak_power", where, low=0.0, default="0"),
        mean_power=_number(row, "average_power", where, low=0.0, default="0"),
    )
    check_point(point, where)
    return point


def check_point(point: ProfilePoint, where: str) -> None:
    """Raise `PerformanceModelError` when a point has an impossible value."""
    wrong = [
        name
        for name, low in (
            ("prompt_tokens", 1),
            ("batch", 1),
            ("tensor_parallel", 1),
            ("prompt_seconds", 1e-9),
        )
        if not (isfinite(getattr(point, name)) and getattr(point, name) >= low)
    ]
    wrong += [
        name
        for name in ("token_seconds", "output_tokens", "peak_power", "mean_power")
        if not (isfinite(getattr(point, name)) and getattr(point, name) >= 0.0)
    ]
    if wrong:
        values = ", ".join(f"{name}={getattr(point, name)}" for name in wrong)
        raise PerformanceModelError(f"{where}: {values} cannot be; measure that point again or remove it")


def write_profile(path: Path, points: Iterable[ProfilePoint], notes: Mapping[str, Any]) -> None:
    """Write points in our own format; `notes` says how they were measured."""
    data = {"format": FORMAT, "notes": dict(notes), "points": [asdict(point) for point in points]}
    path.write_text(json.dumps(data, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _own_points(path: Path, data: Mapping[str, Any]) -> list[ProfilePoint]:
    points = []
    known = {f.name for f in fields(ProfilePoint)}
    raw_points = data.get("points")
    if not isinstance(raw_points, list):
        raise PerformanceModelError(f"{path}: lacks its list of points")
    for number, raw in enumerate(raw_points):
        where = f"{path}: points[{number}]"
        if not isinstance(raw, dict) or not set(raw) <= known:
            raise PerformanceModelError(f"{where}: must be an object with only {', '.join(sorted(known))}")
        try:
            point = ProfilePoint(**raw)
            check_point(point, where)
        except TypeError as error:
            raise PerformanceModelError(f"{where}: {error}") from error
        points.append(point)
    return points


def _vllm_points(
    files: Mapping[Path, Mapping[str, Any]], model: str, hardware: str, tensor_parallel: int
) -> list[ProfilePoint]:
    if not model or not hardware:
        raise PerformanceModelError(
            "vLLM's benchmark files name neither model nor hardware: give both with the files"
        )
    runs: dict[tuple[int, int], dict[int, list[float]]] = {}
    for path, data in files.items():
        match = _VLLM_NAME.search(path.stem)
        if match is None:
            raise PerformanceModelError(
                f"{path}: vLLM's file does not say what was run; name it like in512-out128-batch8.json"
            )
        size = int(match["input"]), int(match["batch"])
        runs.setdefault(size, {}).setdefault(int(match["output"]), []).extend(
            _vllm_seconds(path, data, size[1])
        )
    points = []
    for (prompt_tokens, batch), outputs in sorted(runs.items()):
        if 1 not in outputs:
            raise PerformanceModelError(
                f"in{prompt_tokens} batch{batch} has no run with out1; without it the prompt phase "
                "cannot be told from the token phase: run vllm bench with --output-len 1"
            )
        prompt = sorted(outputs[1])[len(outputs[1]) // 2]
        longer = [
            (tokens, seconds) for tokens, several in outputs.items() if tokens > 1 for seconds in several
        ]
        for tokens, seconds in longer or [(1, prompt)]:
            token = (seconds - prompt) / (tokens - 1) if tokens > 1 else 0.0
            point = ProfilePoint(
                model, hardware, tensor_parallel, prompt_tokens, batch, float(tokens), prompt, token
            )
            check_point(point, f"vllm runs in{prompt_tokens}-batch{batch}-out{tokens} against out1")
            points.append(point)
    return points


def _vllm_seconds(path: Path, data: Mapping[str, Any], batch: int) -> list[float]:
    """Seconds that one pass over the whole batch took, one per repeat."""
    if "latencies" in data:
        seconds = data["latencies"] or [data.get("avg_latency")]
    else:
        if data.get("num_requests") != batch:
            raise PerformanceModelError(
                f"{path}: num_requests is {data.get('num_requests')}, the name says batch{batch}"
            )
        seconds = [data["elapsed_time"]]
    if not all(isinstance(value, int | float) and isfinite(value) and value > 0 for value in seconds):
        raise PerformanceModelError(f"{path}: has a latency that is no positive number: {seconds}")
    return [float(value) for value in seconds]


def _number(row: Mapping[str, str], name: str, where: str, *, low: float = 1e-12, default: str = "") -> float:
    text = row.get(name) or default
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not isfinite(value) or value < low:
        needed = "a positive number" if low > 0.0 else "0 or a positive number"
        raise PerformanceModelError(f"{where}: {name} is {text!r}; it must be {needed}")
    return value


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PerformanceModelError(f"{path}: cannot be read: {error}") from error


def _load_json(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads("\n".join(_lines(path)))
    except json.JSONDecodeError as error:
        raise PerformanceModelError(f"{path}: is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise PerformanceModelError(f"{path}: must hold one JSON object")
    return data
