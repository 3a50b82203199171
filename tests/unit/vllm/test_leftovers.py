"""What killed ranks leave in shared memory is removed by name, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from services.engine.vllm import leftovers

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(leftovers, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(leftovers.tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_only_what_carries_the_name_goes(place: Path) -> None:
    for name in ("vllm_dist_1-tp:0-[0-1]-cpushm_0", "vllm_dist_1-tp:0-[0-1]-cpushm_1", "vllm_dist_1"):
        (place / name).touch()
    for name in ("vllm_dist_12", "vllm_dist_12-tp:0-[0-1]-cpushm_0", "other"):
        (place / name).touch()
    leftovers.remove("vllm_dist_1")
    assert sorted(path.name for path in place.iterdir()) == [
        "other",
        "vllm_dist_12",
        "vllm_dist_12-tp:0-[0-1]-cpushm_0",
    ]
    leftovers.remove("vllm_dist_1")  # again does no harm


@pytest.mark.parametrize("name", ["", "29500"])
def test_a_name_that_is_none_of_vllms_removes_nothing(place: Path, name: str) -> None:
    """Ranks that meet over TCP are named by their port."""
    (place / f"{name}-x").touch()
    (place / "other").touch()
    leftovers.remove(name)
    assert len(list(place.iterdir())) == 2


def test_the_name_is_empty_where_vllm_sets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    assert leftovers.meeting_name() == ""
