"""Clusters whose processes are killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.services.router.cluster import RouterCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    """Two nodes, each with a daemon, a prompt machine and a token machine."""
    cluster = RouterCluster(tmp_path_factory.mktemp("faults"))
    try:
        await cluster.start_router("--machine-lease-ms", "2000", "--drain-s", "60")
        yield cluster
    finally:
        await cluster.stop()
