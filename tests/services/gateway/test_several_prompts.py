"""Several prompts in one completion: one choice each, whole or streamed, all or none."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from splitwise import errors

if TYPE_CHECKING:
    import openai

    from tests.services.gateway.scripted import ScriptedBackend

PROMPTS = ["one", "three", "fifteen letters"]
BODY: dict[str, Any] = {"model": "tiny", "prompt": PROMPTS, "max_tokens": 4}


async def test_choices_are_in_the_order_of_the_prompts(client: openai.AsyncOpenAI) -> None:
    for prompt in (PROMPTS, [list(text.encode()) for text in PROMPTS]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=4, echo=True)
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert [choice.text for choice in answer.choices] == [f"{text}Hell" for text in PROMPTS]
        assert {choice.finish_reason for choice in answer.choices} == {"length"}
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
        assert answer.usage.completion_tokens == 12


async def test_a_list_of_one_is_one_prompt(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["x"], max_tokens=4)
    assert [choice.text for choice in answer.choices] == ["Hell"]


@pytest.mark.parametrize("continuous", [False, True])
async def test_chunks_name_their_choice(client: openai.AsyncOpenAI, continuous: bool) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": continuous}
    stream = await client.completions.create(**BODY, stream=True, logprobs=1, stream_options=options)
    texts, ended, tokens = [""] * 3, [], [0] * 3
    *chunks, last = [chunk async for chunk in stream]
    for chunk in chunks:
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        assert choice.logprobs is not None
        tokens[choice.index] += len(choice.logprobs.tokens or ())
        if choice.finish_reason:
            ended.append(choice.index)
        if continuous:  # of this choice alone
            assert chunk.usage is not None
            assert chunk.usage.prompt_tokens == len(PROMPTS[choice.index])
            assert chunk.usage.completion_tokens == tokens[choice.index]
    assert texts == ["Hell"] * 3
    assert tokens == [4] * 3
    assert sorted(ended) == [0, 1, 2]
    assert last.choices == []
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (sum(map(len, PROMPTS)), 12)


async def test_every_request_id_is_told(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", json=BODY) as response:
        assert response.headers["x-request-id"] == "r1, r2, r3"
        assert (await response.json())["id"] == "cmpl-r1"


async def test_nothing_starts_when_one_prompt_is_at_fault(
    http: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    started = []
    backend.run = lambda *given: started.append(given)  # type: ignore[method-assign, assignment, func-returns-value]
    for prompt, param in (
        (["good", "x" * 600], "prompt[1]"),
        ([[1, 2], [3, 300]], "prompt[1][1]"),
    ):
        async with http.post("/v1/completions", json=BODY | {"prompt": prompt, "stream": True}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, param)
    assert started == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_before_the_first_token_is_a_status(
    http: aiohttp.ClientSession, backend: ScriptedBackend, stream: bool
) -> None:
    backend.failures = {0: errors.OverloadedError("full", retry_after=0.5)}
    async with http.post("/v1/completions", json=BODY | {"stream": stream}) as response:
        assert (response.status, response.headers["retry-after-ms"]) == (429, "500")
    assert backend.running == 0


async def test_a_later_failure_of_one_ends_all(http: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.endless = True
    backend.failures = {3: errors.UnavailableError("the machine is lost")}
    seen = b""
    async with http.post("/v1/completions", json=BODY | {"stream": True, "max_tokens": 99}) as response:
        while b"error" not in seen:
            seen += await response.content.readline()
        with pytest.raises(aiohttp.ClientPayloadError):  # the body is cut
            await response.content.read()
    *_, last = [json.loads(line[6:]) for line in seen.split(b"\n\n") if line]
    assert last["error"]["code"] == "unavailable"
    assert b"[DONE]" not in seen
    assert backend.running == 0


async def test_who_leaves_ends_all(http: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
    backend.endless = True
    backend.context = 100_000
    async with http.post("/v1/completions", json=BODY | {"stream": True, "max_tokens": 90_000}) as response:
        await response.content.readline()
        assert backend.running == 3
        response.close()
    async with asyncio.timeout(30):
        while backend.running:  # noqa: ASYNC110 - it counts
            await asyncio.sleep(0.01)
