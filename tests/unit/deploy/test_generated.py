"""Pages and files that are made from the sources are current, and their tools notice when they are not."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["protocol_reference", "environment_file"])
def test_current_and_checked(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    module = tool(name)
    monkeypatch.setattr(sys, "argv", [name, "--check"])
    assert module.main() == 0, capsys.readouterr().err
    copy = tmp_path / module.TARGET.name
    copy.write_text(module.TARGET.read_text() + "edited\n")
    monkeypatch.setattr(module, "TARGET", copy)
    assert module.main() == 1
    assert f"tools/{name}.py" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [name])
    assert module.main() == 0
    assert "edited" not in copy.read_text()


def test_the_protocol_page_has_every_message_method_and_value() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    text = "".join(path.read_text() for path in sorted((ROOT / "protos").rglob("*.proto")))
    code = re.sub(r"//.*", "", text)
    for name in re.findall(r"(?:message|enum|service) (\w+)", code):
        assert re.search(rf"^### (Service |\w+\.)*{name}$", page, re.MULTILINE), name
    for name in re.findall(r"rpc (\w+)", code):
        assert f"| `{name}` |" in page
    for name in re.findall(r"^\s+([A-Z][A-Z0-9_]+) = \d+;", code, re.MULTILINE):
        assert f"| `{name}` |" in page
    anchors = {
        re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-")
        for h in re.findall(r"^#+ (.+)$", page, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= anchors
    comments = [line.strip("/ ") for line in text.splitlines() if line.strip().startswith("//")]
    shown = " ".join(page.split())
    missing = [line for line in comments if line and " ".join(line.replace("----", "").split()) not in shown]
    assert not missing
