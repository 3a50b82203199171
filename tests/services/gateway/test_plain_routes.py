"""Health, metrics, version, tokenize and detokenize."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from prometheus_client.parser import text_string_to_metric_families

if TYPE_CHECKING:
    import aiohttp

    from tests.services.gateway.scripted import ScriptedBackend


async def test_health_follows_the_router(http: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (200, {"status": "serving"})
    backend.is_serving = False
    async with http.get("/health") as response:
        assert (response.status, await response.json()) == (503, {"status": "not serving"})
    async with http.head("/health") as response:
        assert response.status == 503


async def test_metrics_count_requests_by_route(http: aiohttp.ClientSession) -> None:
    async def count(route: str, status: str) -> float:
        async with http.get("/metrics") as response:
            assert response.status == 200
            families = list(text_string_to_metric_families(await response.text()))
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == "splitwise_gateway_requests_total"
            and sample.labels == {"route": route, "status": status}
        )

    before = await count("/v1/completions", "400"), await count("unknown", "404")
    async with http.post("/v1/completions", json={}) as response:
        assert response.status == 400
    for path in ("/made/up", "/made/up/2"):
        async with http.get(path) as response:
            assert response.status == 404
    assert (await count("/v1/completions", "400"), await count("unknown", "404")) == (
        before[0] + 1,
        before[1] + 2,
    )


async def test_version(http: aiohttp.ClientSession) -> None:
    async with http.get("/version") as response:
        assert (await response.json())["version"].count(".") >= 1


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ({"model": "tiny", "prompt": "hé"}, 3),
        ({"prompt": "hé"}, 3),
        ({"prompt": [1, 2]}, 2),
        ({"messages": [{"role": "user", "content": "x"}]}, len("user: x\nassistant:")),
    ],
)
async def test_tokenize(http: aiohttp.ClientSession, body: dict[str, object], count: int) -> None:
    async with http.post("/tokenize", json=body) as response:
        answer = await response.json()
        assert response.status == 200
        assert (answer["count"], len(answer["tokens"]), answer["max_model_len"]) == (count, count, 512)


async def test_detokenize_is_the_way_back(http: aiohttp.ClientSession) -> None:
    async with http.post("/tokenize", json={"prompt": "naïve 你好"}) as response:
        tokens = (await response.json())["tokens"]
    async with http.post("/detokenize", json={"model": "tiny", "tokens": tokens}) as response:
        assert await response.json() == {"prompt": "naïve 你好"}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"model": "other", "prompt": "x"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": "x"}, 400, "tokens"),
        ("/detokenize", {"tokens": [1, -1]}, 400, "tokens[1]"),
        ("/detokenize", {"tokens": [1, 300]}, 400, "tokens[1]"),
        ("/detokenize", {"model": "other", "tokens": [1]}, 404, "model"),
    ],
)
async def test_bad_bodies(
    http: aiohttp.ClientSession, path: str, body: dict[str, object], status: int, param: str
) -> None:
    async with http.post(path, json=body) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (status, param)
