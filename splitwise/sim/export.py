"""Write results to files: JSON for sums, CSV or Parquet for one row per request or machine."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from splitwise.errors import ConfigError
from splitwise.sim.results import METRICS, Result

if TYPE_CHECKING:
    from pathlib import Path

    from splitwise.sim.experiment import Experiment

_NO_PYARROW = "{}: Parquet needs pyarrow: pip install 'splitwise[sim]', or write .csv"
ROWS = 50_000  # requests turned into text at a time


def request_columns(result: Result) -> dict[str, Any]:
    """Return one array or list per column of the request table."""
    names = np.array([machine.name for machine in result.cluster.machines] + [""])
    codes, place = np.unique(np.where(result.prompt_machine < 0, -1, result.how), return_inverse=True)
    first = [int(np.flatnonzero(place == index)[0]) for index in range(len(codes))]
    why = np.array([result.reason(request) for request in first])
    return {
        "arrival_s": result.trace.arrival,
        "prompt_tokens": result.trace.prompt_tokens,
        "output_tokens": result.trace.output_tokens,
        **{f"{name}_s": result.metric(name) for name in METRICS},
        "prompt_machine": names[result.prompt_machine],
        "token_machine": names[result.token_machine],
        "reason": why[place],
        "restarts": result.restarts,
        "preemptions": result.preemptions,
    }


def write_requests(result: Result, path: Path) -> None:
    """Write one row per request: Parquet when the name ends in .parquet, else CSV."""
    columns = request_columns(result)
    if path.suffix == ".parquet":
        _write_parquet({"request": np.arange(len(result.trace)), **columns}, path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["request", *columns])
        for start in range(0, len(result.trace), ROWS):
            part = [_texts(column[start : start + ROWS]) for column in columns.values()]
            writer.writerows(zip(range(start, start + ROWS), *part, strict=False))


def _texts(column: np.ndarray[Any, Any]) -> list[Any]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return ["" if np.isnan(value) else f"{value:.9f}" for value in column.tolist()]


def _write_parquet(columns: dict[str, Any], path: Path) -> None:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(_NO_PYARROW.format(path)) from None
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def check_target(path: Path, kinds: tuple[str, ...]) -> None:
    """Raise ConfigError when a file could not be written: unknown ending, or no such folder."""
    if path.suffix not in kinds:
        raise ConfigError(f"{path}: an unknown kind of file: end its name in {', '.join(kinds)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: cannot be written: there is no folder {path.absolute().parent}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ConfigError(_NO_PYARROW.format(path))


def write_rows(rows: list[dict[str, Any]] | dict[str, Any], path: Path) -> None:
    """Write rows with equal keys as .csv or .parquet, by the name's ending; anything else as JSON."""
    if isinstance(rows, dict) or path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    elif path.suffix == ".parquet":
        _write_parquet({key: [row[key] for row in rows] for key in rows[0]}, path)
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def write_machines(result: Result, path: Path) -> None:
    """Write one row per machine; the occupancy distribution is JSON in one column."""
    rows = []
    for load in result.machine_loads():
        occupancy = {str(size): round(share, 6) for size, share in load.occupancy.items()}
        rows.append({**asdict(load), "occupancy": json.dumps(occupancy)})
    write_rows(rows, path)


def write_summary(experiment: Experiment, path: Path) -> None:
    """Write the sums over all seeds as JSON."""
    path.write_text(json.dumps(experiment.summary(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
