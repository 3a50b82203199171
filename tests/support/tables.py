"""Tables of the documentation, to be compared with what the code does."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def rows(page: str, first_column: str) -> list[dict[str, str]]:
    """Return the rows of every table of ``docs/<page>`` whose first column has this title."""
    found: list[dict[str, str]] = []
    titles: list[str] = []
    for line in (ROOT / "docs" / page).read_text().splitlines():
        if not line.startswith("|"):
            titles = []
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if not titles:
            titles = cells
        elif titles[0] == first_column and not set(cells[0]) <= {"-", ":"}:
            found.append(dict(zip(titles, cells, strict=True)))
    return found


def code(cell: str) -> str:
    """Return the word of a cell that is written as code."""
    match = re.fullmatch(r"`([^`]+)`", cell)
    assert match is not None, cell
    return match[1]
