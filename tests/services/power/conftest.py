"""A node of emulated GPUs whose file every process of the test is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from splitwise.launch.emulated_gpus import FILE_VARIABLE
from tests.services.gateway import live_cluster
from tests.support.emulated_gpus import GpuNode

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GpuNode:
    made = GpuNode(tmp_path)
    monkeypatch.setitem(live_cluster.ENVIRONMENT, FILE_VARIABLE, str(made.file))
    return made
