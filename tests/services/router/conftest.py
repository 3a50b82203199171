"""One cluster for all tests of a file: starting one takes longer than most tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.services.router.cluster import RouterCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    """Two nodes with a pair of machines each, and a node whose pair serves another model."""
    folder = tmp_path_factory.mktemp("router")
    cluster = RouterCluster(folder)
    pair = ["1xH100:prompt", "1xH100:token"]
    try:
        settings = ("--queue-limit", "200", "--serialized-below-tokens", "100")
        await cluster.start_router(*settings, "--request-log", str(folder / "requests.jsonl"))
        await cluster.start_nodes({"a": pair, "b": pair, "c": pair}, c={"model": "other"})
        yield cluster
    finally:
        await cluster.stop()
