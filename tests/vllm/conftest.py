"""Engines that many tests share: starting one takes half a minute."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

from services.engine.vllm import VllmSettings
from splitwise.errors import ConfigError
from splitwise.models import ModelFolder, prepare_default_model
from tests.vllm.harness import Node, Split
from tests.vllm.reference import PlainEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder with a path short enough for sockets in it."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def model() -> ModelFolder:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed (the extra `cpu` or `gpu`)")
    try:
        return prepare_default_model()
    except ConfigError as error:
        pytest.skip(str(error))


def settings(model: ModelFolder, **changes: object) -> VllmSettings:
    """float32, so that tokens do not depend on what else is in the batch; chunks of 512 tokens."""
    return VllmSettings.model_validate(
        {
            "model": model.path,
            "dtype": "float32",
            "kv_bytes": 512 << 20,
            "max_model_len": 4224,
            "max_batch_tokens": 512,
            **changes,
        }
    )


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def plain(model: ModelFolder) -> AsyncIterator[PlainEngine]:
    engine = PlainEngine(model.path)
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def pair(
    model: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Node, Node]]:
    folder = tmp_path_factory.mktemp("pair")
    nodes = Node(folder, "left", settings(model)), Node(folder, "right", settings(model))
    try:
        for node in nodes:
            await node.start()
        yield nodes
    finally:
        for node in nodes:
            await node.stop()


@pytest_asyncio.fixture(loop_scope="session")
async def split(pair: tuple[Node, Node]) -> AsyncIterator[Split]:
    """The shared pair; every test must leave it without a held block."""
    left, right = pair
    await left.until_able()
    await right.until_able()
    both = Split(left, right)
    yield both
    await both.until_empty()
