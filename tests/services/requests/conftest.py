"""One cluster for the folder's tables: a model of words with a prefix cache, and one of odd characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import aiohttp
import pytest_asyncio

from tests.services.requests.characters import FACTS, MODEL, write_tokenizer
from tests.services.requests.ways import Grpc, Http
from tests.services.router.cluster import RouterCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import pytest

    from tests.services.requests.ways import Way

KEY = "the-right-key"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RouterCluster]:
    """Node a has one prompt machine, so that a prompt meets its own prefix, and two token machines."""
    folder = tmp_path_factory.mktemp("requests")
    write_tokenizer(folder / "tokenizer")
    (folder / "keys").write_text(f"# clients\n{KEY}\n")
    cluster = RouterCluster(folder)
    settings = ("--http-api-keys", str(folder / "keys"), f"--models.{MODEL}", str(folder / "tokenizer"))
    try:
        await cluster.start_router(*settings)
        await cluster.start_nodes(
            {"a": ["1xH100:prompt", "2xH100:token"], "b": ["1xH100:prompt", "1xH100:token"]},
            a={"prefix_caching": True},
            b=FACTS,
        )
        yield cluster
    finally:
        await cluster.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(cluster: RouterCluster) -> AsyncIterator[aiohttp.ClientSession]:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with aiohttp.ClientSession(cluster.http, headers=headers) as session:
        yield session


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ways(cluster: RouterCluster, http: aiohttp.ClientSession) -> dict[str, Way]:
    return {"grpc": Grpc(cluster), "http": Http(http, stream=False), "sse": Http(http, stream=True)}
