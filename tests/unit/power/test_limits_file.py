"""The file with the previous limits."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from services.power.limits_file import LimitsFile
from splitwise.errors import ConfigError, ListenError


def opened(path: Path) -> LimitsFile:
    file = LimitsFile(path)
    file.open()
    return file


def test_what_is_remembered_is_read_by_the_next(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "limits.json"
    first = opened(path)
    first.remember({"a": 700})
    first.remember({"b": 650.5})
    first.remember({"a": 350})  # the first counts: later ones are ours
    first.close()
    second = opened(path)
    assert (second.get("a"), second.get("b"), second.get("c")) == (700, 650.5, None)
    second.forget(["a", "x"])
    assert second.names() == ["b"]
    second.forget(["b"])
    assert len(second) == 0
    second.close()
    assert not path.exists()


def test_the_folder_is_its_owner_s_alone(tmp_path: Path) -> None:
    opened(tmp_path / "state" / "limits.json").close()
    assert (tmp_path / "state").stat().st_mode & 0o077 == 0


def test_two_agents(tmp_path: Path) -> None:
    first = opened(tmp_path / "limits.json")
    with pytest.raises(ListenError, match="another power agent of this node has"):
        opened(tmp_path / "limits.json")
    first.close()
    opened(tmp_path / "limits.json").close()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"power\.state: .*Permission denied"):
        opened(tmp_path / "limits.json")


def test_a_path_through_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"power\.state: .*; previous limits could not be kept there"):
        opened(tmp_path / "file" / "limits.json")


def test_it_is_never_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "limits.json"
    file = opened(path)
    file.remember({"a": 700})

    def die(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os if function == "fsync" else Path, function, die)
            with pytest.raises(OSError, match="Input/output"):
                file.remember({"b": 650})
        assert json.loads(path.read_text())["limits"] == {"a": 700}
        assert file.names() == ["a"]  # what is not on disk is not taken for kept
