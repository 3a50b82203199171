"""One `splitwise up` for all tests of this folder."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.vllm.cluster.up import Up

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from splitwise.models import ModelFolder


@pytest_asyncio.fixture(scope="package", loop_scope="session")
async def up(model: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Up]:
    up = Up(tmp_path_factory.mktemp("up"), model)
    try:
        await up.start()
        yield up
        await up.stop()
    finally:
        await up.kill()
