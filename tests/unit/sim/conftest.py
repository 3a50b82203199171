"""What the simulator's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

SHARED = Path(__file__).parents[4] / "shared"


@pytest.fixture
def azure() -> Path:
    """The Azure 2023 conversation trace, beside the repository."""
    path = SHARED / "data" / "AzureLLMInferenceTrace_conv.csv"
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A small simulation of 4 machines over 40 requests."""
    rows = "".join(f"{index * 0.05:.3f},{200 + 37 * (index % 9)},{5 + index % 20}\n" for index in range(40))
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    path = tmp_path / "sim.yaml"
    path.write_text(
        "model: llama2-70b\n"
        "machines:\n"
        "  - {home: prompt, hardware: h100-80gb, count: 2}\n"
        "  - {home: token, hardware: a100-80gb, count: 2}\n"
        "trace: {file: trace.csv}\n"
    )
    return path
