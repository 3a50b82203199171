"""The page of known faults names tests; each of them must be there, and each row must name one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "faults.md").read_text()
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "what must happen" not in line]


@pytest.mark.parametrize(("file", "name"), NAMED, ids=lambda part: part.rpartition("/")[2])
def test_it_exists(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text())
    functions = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert not name or name in functions


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[2:40])
def test_every_row_names_a_test(row: str) -> None:
    assert "`tests/" in row.split("|")[3]


def test_the_page_has_rows() -> None:
    assert len(ROWS) > 25
