"""One cluster with TLS everywhere for the whole folder: every test only asks it something."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest_asyncio

from tests.services.tls.cluster import TlsCluster, make_certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    import pytest


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[TlsCluster]:
    cluster = TlsCluster(tmp_path_factory.mktemp("tls"))
    try:
        await cluster.start()
        yield cluster
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of the same roles by another CA."""
    folder = tmp_path_factory.mktemp("strangers")
    made = make_certificates(folder)
    assert made.returncode == 0, made.stderr
    return folder
