"""Trace files: read and write them a chunk at a time, whatever wrote them.

Understood are CSV (also ``.csv.gz``), JSON lines and JSON arrays whose columns are named as
one of these do it, found out from the header:

* the Azure LLM inference traces of 2023 and 2024 (TIMESTAMP, ContextTokens, GeneratedTokens),
* the Mooncake traces (timestamp in milliseconds, input_length, output_length),
* SplitwiseSim's traces (arrival_timestamp, prompt_size, token_size),
* the router's request log (arrived_unix_ns, prompt_tokens, output_tokens),
* this library's own (arrival_s, prompt_tokens, output_tokens).

Absolute times are counted from the file's first row; relative ones are kept.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import numpy as np

from splitwise.workload.trace import Trace, TraceError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

CHUNK_ROWS = 65_536
HEADER = ("arrival_s", "prompt_tokens", "output_tokens")


class Column(Enum):
    """Unit of a time column."""

    SECONDS = "s"
    MILLISECONDS = "ms"
    UNIX_NS = "ns"
    DATE = "date"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Which columns of a file hold what."""

    time: str
    unit: Column
    prompt: str
    output: str

    def names(self) -> tuple[str, str, str]:
        return self.time, self.prompt, self.output


_LAYOUTS = (
    _Layout("TIMESTAMP", Column.DATE, "ContextTokens", "GeneratedTokens"),
    _Layout("timestamp", Column.MILLISECONDS, "input_length", "output_length"),
    _Layout("arrival_timestamp", Column.SECONDS, "prompt_size", "token_size"),
    _Layout("arrived_unix_ns", Column.UNIX_NS, "prompt_tokens", "output_tokens"),
    _Layout("arrival_s", Column.SECONDS, "prompt_tokens", "output_tokens"),
)


def load_trace(path: Path | str, *, sort: bool = False, drop_invalid: bool = False) -> Trace:
    """Read a whole trace into flat arrays (16 bytes per request).

    `sort` puts rows that are out of order in order; `drop_invalid` leaves out rows with no
    prompt or output tokens. Raises TraceError, naming file and row.
    """
    chunks = list(iter_chunks(path, check=not sort, drop_invalid=drop_invalid))
    whole = Trace(
        np.concatenate([chunk.arrival for chunk in chunks]),
        np.concatenate([chunk.prompt_tokens for chunk in chunks]),
        np.concatenate([chunk.output_tokens for chunk in chunks]),
        Path(path).name,
    )
    if sort:
        whole = whole.sorted()
        whole.check()
    return whole


def iter_chunks(
    path: Path | str, *, check: bool = True, drop_invalid: bool = False, rows: int = CHUNK_ROWS
) -> Iterator[Trace]:
    """Read a trace in checked chunks of at most `rows` requests, in bounded memory."""
    path = Path(path)
    first_row, last, base, found = 1, None, None, False
    for layout, columns in _raw_chunks(path, rows):
        times, base = _seconds(columns[0], layout.unit, base, path, first_row)
        chunk = Trace(
            times,
            _counts(columns[1], layout.prompt, path, first_row),
            _counts(columns[2], layout.output, path, first_row),
            path.name,
        )
        number = len(chunk)
        if drop_invalid:
            keep = (chunk.prompt_tokens > 0) & (chunk.output_tokens > 0)
            chunk = Trace(times[keep], chunk.prompt_tokens[keep], chunk.output_tokens[keep], path.name)
        if len(chunk):
            if check:
                chunk.check(first_row=first_row, after=last)
                last = float(chunk.arrival[-1])
            found = True
            yield chunk
        first_row += number
    if not found:
        raise TraceError(f"{path}: no requests in it")


def write_trace(trace: Trace, path: Path | str) -> int:
    """Write one trace as CSV with the columns of `HEADER`; returns the number of requests."""
    return write_chunks([trace], path)


def write_chunks(chunks: Iterable[Trace], path: Path | str) -> int:
    """Write chunks one after another as CSV (gzip when the name ends in .gz); times keep 1 ns."""
    path = Path(path)
    written = 0
    opener: Callable[..., Any] = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt", encoding="utf-8", newline="") as file:
        file.write(",".join(HEADER) + "\n")
        for chunk in chunks:
            rows = zip(
                chunk.arrival.tolist(),
                chunk.prompt_tokens.tolist(),
                chunk.output_tokens.tolist(),
                strict=True,
            )
            file.writelines(f"{arrival:.9f},{prompt},{output}\n" for arrival, prompt, output in rows)
            written += len(chunk)
    return written


def _open(path: Path) -> TextIO:
    try:
        if path.suffix == ".gz":
            return cast("TextIO", gzip.open(path, "rt", encoding="utf-8-sig", newline=""))
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {error.strerror or error}") from None


def _raw_chunks(path: Path, rows: int) -> Iterator[tuple[_Layout, list[Sequence[Any]]]]:
    with _open(path) as file:
        try:
            yield from _parsed(path, file, rows)
        except (OSError, UnicodeDecodeError, EOFError) as error:
            raise TraceError(f"{path}: cannot be read: {error}") from None


def _parsed(path: Path, file: TextIO, rows: int) -> Iterator[tuple[_Layout, list[Sequence[Any]]]]:
    start = file.read(1)
    while start and start.isspace():
        start = file.read(1)
    if not start:
        raise TraceError(f"{path}: the file is empty")
    if start in "{[":
        yield from _json_chunks(path, start, file, rows)
    else:
        yield from _csv_chunks(path, itertools.chain([start + file.readline()], file), rows)


def _csv_chunks(path: Path, lines: Iterable[str], rows: int) -> Iterator[tuple[_Layout, list[Sequence[Any]]]]:
    reader = csv.reader(lines)
    header = [name.strip() for name in next(reader)]
    layout = _layout(path, header)
    places = [header.index(name) for name in layout.names()]
    row = 1
    while batch := list(itertools.islice(reader, rows)):
        columns: list[Sequence[Any]] = []
        for place, name in zip(places, layout.names(), strict=True):
            try:
                columns.append([line[place] for line in batch if line])
            except IndexError:
                short = next(index for index, line in enumerate(batch) if line and len(line) <= place)
                raise TraceError(f"{path}, row {row + short}: the column {name} is missing") from None
        if columns[0]:
            yield layout, columns
        row += len(batch)


def _json_chunks(
    path: Path, start: str, file: TextIO, rows: int
) -> Iterator[tuple[_Layout, list[Sequence[Any]]]]:
    records = _json_lines(path, start, file) if start == "{" else _json_array(path, file)
    layout: _Layout | None = None
    row = 1
    while batch := list(itertools.islice(records, rows)):
        layout = layout or _layout(path, list(batch[0]))
        columns: list[Sequence[Any]] = []
        for name in layout.names():
            missing = next((index for index, record in enumerate(batch) if name not in record), None)
            if missing is not None:
                raise TraceError(f"{path}, row {row + missing}: the field {name} is missing")
            columns.append([record[name] for record in batch])
        yield layout, columns
        row += len(batch)


def _json_lines(path: Path, start: str, file: TextIO) -> Iterator[dict[str, Any]]:
    for number, line in enumerate(itertools.chain([start + file.readline()], file), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise TraceError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise TraceError(f"{path}, line {number}: not a JSON object")
        yield record


def _json_array(path: Path, file: TextIO, size: int = 1 << 20) -> Iterator[dict[str, Any]]:
    """Objects of one JSON array, decoded one by one so that the file need not fit in memory."""
    decoder = json.JSONDecoder()
    text = file.read(size)
    number = 0
    while True:
        text = text.lstrip().removeprefix(",").lstrip()
        if text.startswith("]"):
            return
        try:
            record, end = decoder.raw_decode(text)
        except ValueError as error:
            more = file.read(size)
            if not more:
                raise TraceError(f"{path}, entry {number + 1}: not JSON: {error}") from None
            text += more
            continue
        number += 1
        if not isinstance(record, dict):
            raise TraceError(f"{path}, entry {number}: not a JSON object")
        yield record
        text = text[end:]


def _layout(path: Path, names: list[str]) -> _Layout:
    for layout in _LAYOUTS:
        if all(name in names for name in layout.names()):
            return layout
    known = "; ".join(", ".join(layout.names()) for layout in _LAYOUTS)
    raise TraceError(f"{path}: columns are {', '.join(names)}; a trace needs one of: {known}")


def _seconds(
    values: Sequence[Any], unit: Column, base: int | None, path: Path, first_row: int
) -> tuple[NDArray[np.float64], int]:
    """Convert to seconds, and give the base in nanoseconds that absolute times are counted from."""
    if unit is Column.DATE:
        stamps = _dates(values, path, first_row)
    elif unit is Column.UNIX_NS:
        stamps = _numbers(values, np.int64, "arrived_unix_ns", path, first_row)
    else:
        scale = 1e-3 if unit is Column.MILLISECONDS else 1.0
        seconds: NDArray[np.float64] = _numbers(values, np.float64, "arrival time", path, first_row)
        return np.multiply(seconds, scale, dtype=np.float64), 0
    if base is None:
        base = int(stamps[0])
    return np.multiply(stamps - base, 1e-9, dtype=np.float64), base


def _dates(values: Sequence[Any], path: Path, first_row: int) -> NDArray[np.int64]:
    """Nanoseconds since 1970 of dates such as ``2024-05-10 00:00:00.009930+00:00`` (UTC)."""
    texts = [str(value).removesuffix("+00:00").removesuffix("Z").strip() for value in values]
    try:
        dates = np.array(texts, dtype="datetime64[ns]")
    except ValueError:
        row = next(index for index, text in enumerate(texts) if not _is_date(text))
        raise TraceError(
            f"{path}, row {first_row + row}: {values[row]!r} is not a UTC date and time"
        ) from None
    missing = np.flatnonzero(np.isnat(dates))
    if len(missing):
        raise TraceError(f"{path}, row {first_row + missing[0]}: the date is missing")
    return dates.astype(np.int64)


def _is_date(text: str) -> bool:
    try:
        np.datetime64(text, "ns")
    except ValueError:
        return False
    return True


def _counts(values: Sequence[Any], name: str, path: Path, first_row: int) -> NDArray[np.int32]:
    wide = _numbers(values, np.int64, name, path, first_row)
    bad = np.flatnonzero(np.abs(wide) > np.iinfo(np.int32).max)
    if len(bad):
        raise TraceError(
            f"{path}, row {first_row + bad[0]}: {name} is {wide[bad[0]]}, which is no token count"
        )
    return wide.astype(np.int32)


def _numbers(values: Sequence[Any], kind: Any, name: str, path: Path, first_row: int) -> NDArray[Any]:
    convert = int if kind is np.int64 else float
    numbers = np.empty(len(values), kind)
    try:
        numbers[:] = [convert(value) for value in values]
    except (TypeError, ValueError, OverflowError):
        row = next(index for index, value in enumerate(values) if not _converts(value, convert))
        raise TraceError(f"{path}, row {first_row + row}: {name} is {values[row]!r}, not a number") from None
    return numbers


def _converts(value: Any, convert: Any) -> bool:
    try:
        np.int64(convert(value)) if convert is int else convert(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True
