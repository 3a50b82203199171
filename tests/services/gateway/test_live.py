"""The official client against a real router with emulated machines: HTTP to KV transfer and back."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import aiohttp
import openai
import pytest

from services.engine.emulated import settings_from_options
from services.engine.emulated.expected import expected_tokens
from splitwise.text import ByteVocabulary
from tests.services.gateway.live_cluster import LiveCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.timeout(400)
ENGINE: dict[str, Any] = {"time_scale": 0.1}
SETTINGS = settings_from_options(ENGINE)
PROMPT = list(range(1, 700))
MODEL = "emulated"


def text_of(tokens: list[int]) -> str:
    detokenizer = ByteVocabulary(SETTINGS.vocab_size).detokenizer()
    return detokenizer.push(tokens) + detokenizer.flush()


def expected(count: int, **options: Any) -> str:
    return text_of(expected_tokens(SETTINGS, PROMPT, count, **options))


@pytest.fixture
async def cluster(tmp_path: Any) -> AsyncIterator[LiveCluster]:
    cluster = LiveCluster(tmp_path)
    try:
        await cluster.start_router()
        yield cluster
    finally:
        await cluster.stop()


@pytest.fixture
async def client(cluster: LiveCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    await cluster.start_machines("2xH100:prompt", "2xH100:token", **ENGINE)
    async with openai.AsyncOpenAI(base_url=f"{cluster.http}/v1", api_key="x", max_retries=0) as client:
        yield client


async def stream_text(client: openai.AsyncOpenAI, **options: Any) -> tuple[str, str | None]:
    text, reason = "", None
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, stream=True, temperature=0, **options
    )
    async for chunk in stream:
        text += chunk.choices[0].text
        reason = chunk.choices[0].finish_reason
    return text, reason


async def test_requests_through_both_phases(cluster: LiveCluster, client: openai.AsyncOpenAI) -> None:
    """One cluster for all, since starting one takes longer than the requests."""
    await check_texts(client)
    await check_stops_across_the_hand_over(client)
    await check_limits(client)
    await check_seeds(client)
    await check_logprobs(client)
    await check_refusals(client)
    await check_chat_and_many_at_once(client)
    await cluster.until_idle()
    state = await cluster.state()
    shown = [request for request in state["requests"] if request["outcome"] in ("stop", "length")]
    failed = [request["outcome"] for request in state["requests"] if request not in shown]
    assert failed == ["failed"]  # what the engine itself refused
    moved = [request for request in shown if request["output_tokens"] > 1]
    assert all(request["transfer"]["bytes"] > 0 for request in moved)
    assert all(request["prompt_machine"] and request["token_machine"] for request in moved)
    single = [request for request in shown if request["output_tokens"] == 1]
    assert single
    assert all("transfer" not in request for request in single)
    assert state["latency"][0]["count"] == len(shown)
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{cluster.http}/dashboard/requests/{moved[0]['request_id']}") as response:
            decisions = (await response.json())["decisions"]
        async with http.get(f"{cluster.http}/metrics") as response:
            metrics = await response.text()
    assert [decision["kind"] for decision in decisions] == ["assign", "finish"]
    assert {seen["machine"] for seen in decisions[0]["candidates"] if seen["chosen"]} == {
        moved[0]["prompt_machine"],
        moved[0]["token_machine"],
    }
    assert "splitwise_router_ttft_seconds_count" in metrics
    assert "splitwise_gateway_requests_total" in metrics


async def check_texts(client: openai.AsyncOpenAI) -> None:
    assert await stream_text(client, max_tokens=40) == (expected(40), "length")
    whole = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=40, temperature=0)
    assert whole.choices[0].text == expected(40)
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(PROMPT), 40)


async def check_stops_across_the_hand_over(client: openai.AsyncOpenAI) -> None:
    text = expected(20)
    first = len(expected(1))
    for stop in (text[first - 1 : first + 1], text[first - 2 : first + 8]):  # begins in the first token
        got, reason = await stream_text(client, max_tokens=20, stop=["no such text", stop])
        assert (got, reason) == (text[: text.index(stop)], "stop")


async def check_limits(client: openai.AsyncOpenAI) -> None:
    assert await stream_text(client, max_tokens=1) == (expected(1), "length")
    chat = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "x"}], max_completion_tokens=1
    )
    assert chat.usage is not None
    assert chat.usage.completion_tokens == 1
    got, reason = await stream_text(client, max_tokens=64, extra_body={"ignore_eos": True})
    assert (got, reason) == (expected(64, ignore_eos=True), "length")
    got, _ = await stream_text(client, max_tokens=8, extra_body={"min_tokens": 5})
    assert got == expected(8, min_tokens=5)


async def check_seeds(client: openai.AsyncOpenAI) -> None:
    for temperature in (0, 1):
        texts = set()
        for _ in range(3):
            answer = await client.completions.create(
                model=MODEL, prompt=PROMPT, max_tokens=10, temperature=temperature, seed=7
            )
            texts.add(answer.choices[0].text)
        assert texts == {expected(10, seed=7) if temperature else expected(10)}


async def check_logprobs(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=2, logprobs=3, temperature=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(logprobs.tokens or ()) == answer.choices[0].text
    assert len(logprobs.token_logprobs or ()) == 2
    assert all(3 <= len(top) <= 4 for top in logprobs.top_logprobs or ())


async def check_refusals(client: openai.AsyncOpenAI) -> None:
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({"prompt": [1, SETTINGS.vocab_size]}, "prompt[1]"),
        ({"prompt": [1] * 9000}, "prompt"),
        ({"max_tokens": 9000}, "max_tokens"),
        ({"n": 2}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),  # the engine's own refusal
    ]
    for change, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(**({"model": MODEL, "prompt": PROMPT, "max_tokens": 4} | change))
        assert caught.value.param == param, change
    with pytest.raises(openai.NotFoundError):
        await client.completions.create(model="other", prompt="x")


async def check_chat_and_many_at_once(client: openai.AsyncOpenAI) -> None:
    wanted = {count: expected(count) for count in range(2, 26)}
    answers = await asyncio.gather(*[stream_text(client, max_tokens=count) for count in wanted])
    assert [text for text, _ in answers] == list(wanted.values())
    message = [{"role": "user", "content": "naïve 你好"}]
    once = await client.chat.completions.create(model=MODEL, messages=message, max_tokens=9, temperature=0)  # type: ignore[arg-type]
    again = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": [{"type": "text", "text": "naïve 你好"}]}],
        max_tokens=9,
        temperature=0,
    )
    assert once.choices[0].message.content == again.choices[0].message.content


def is_running(request: dict[str, Any]) -> bool:
    return bool(request["outcome"] == "running")


async def test_a_lost_token_machine_is_not_seen_in_the_stream(
    cluster: LiveCluster, client: openai.AsyncOpenAI
) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=1500, temperature=0, stream=True
    )
    text, killed = "", None
    async for chunk in stream:
        text += chunk.choices[0].text
        if text.count(" t") >= 3 and killed is None:
            state = await cluster.until(lambda state: any(map(is_running, state["requests"])))
            killed = next(filter(is_running, state["requests"]))["token_machine"]
            os.kill(await cluster.pid(killed), signal.SIGKILL)
    assert killed is not None
    assert text == expected(1500)
    state = await cluster.until(lambda state: state["latency"][0]["count"])
    (request,) = state["requests"]
    assert request["restarts"] == 1
    assert request["token_machine"] != killed


async def test_who_leaves_frees_everything(cluster: LiveCluster, client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=5000, stream=True)
    async for _ in stream:
        break
    await cluster.until(lambda state: state["running"] == 1)
    await stream.close()
    await cluster.until_idle()
    assert (await cluster.state())["counters"]["cancelled"] == 1


async def test_before_the_first_machine_and_after_the_last(cluster: LiveCluster) -> None:
    body = {"model": MODEL, "prompt": "x", "max_tokens": 2}
    async with aiohttp.ClientSession(cluster.http) as http:

        async def statuses() -> tuple[int, int, str | None]:
            async with http.get("/health") as health, http.post("/v1/completions", json=body) as answer:
                return health.status, answer.status, answer.headers.get("Retry-After")

        assert await statuses() == (503, 503, "1")
        await cluster.start_machines("1xH100:prompt", "1xH100:token", **ENGINE)
        assert (await statuses())[:2] == (200, 200)
        await cluster.fleet.stop()
        await cluster.until(lambda state: not state["machines"])
        assert (await statuses())[:2] == (503, 503)
        async with http.get("/v1/models") as models:
            assert [(m["id"], m["serving"]) for m in (await models.json())["data"]] == [(MODEL, False)]


async def test_a_drain_ends_what_runs_and_exits_cleanly(
    cluster: LiveCluster, client: openai.AsyncOpenAI
) -> None:
    stream = await client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=300, temperature=0, stream=True
    )
    text = ""
    async for chunk in stream:
        if not text:
            cluster.router.process.send_signal(signal.SIGTERM)
        text += chunk.choices[0].text
    assert text == expected(300)
    assert await asyncio.wait_for(cluster.router.process.wait(), 60) == 0


async def test_a_drain_that_is_cut_takes_no_longer_for_open_streams(tmp_path: Path) -> None:
    """The bound is the one that holds now: it is shortened while the router runs."""
    settings = tmp_path / "splitwise.yaml"
    settings.write_text("router: {drain_s: 600}")
    cluster = LiveCluster(tmp_path)
    try:
        await cluster.start_router("--config", str(settings))
        await cluster.start_machines("1xH100:prompt", "1xH100:token", time_scale=1.0)
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 7000, "stream": True}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{cluster.http}/v1/completions", json=body) as response,
        ):
            assert await response.content.readline()
            settings.write_text("router: {drain_s: 1}")
            cluster.router.process.send_signal(signal.SIGHUP)
            await cluster.router.said("config.reloaded")
            cluster.router.process.send_signal(signal.SIGTERM)
            await cluster.router.said("drain.cut")
            assert await asyncio.wait_for(cluster.router.process.wait(), 60) == 0
    finally:
        await cluster.stop()
