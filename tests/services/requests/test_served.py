"""Requests that are served, each over gRPC, HTTP and an HTTP stream of one router, with equal outcomes."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from services.engine.emulated import settings_from_options
from tests.services.requests import characters
from tests.services.requests.ways import http_body
from tests.services.router.cluster import ENGINE, MODEL, expected, text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import aiohttp

    from tests.services.requests.ways import Outcome, Way
    from tests.services.router.cluster import RouterCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
WAYS = ("grpc", "http", "sse")
LIMIT = settings_from_options(ENGINE).max_model_len
PROMPT = list(range(1, 301))
GREEDY: dict[str, Any] = {"temperature": 0.0}


def text(count: int, **options: Any) -> str:
    return text_of(expected(count, PROMPT, **options))


def token_texts() -> list[str]:
    ids = expected(20, PROMPT)
    return [text_of([token]) for token in ids]


@dataclass
class Served:
    """`outcome` gives text, finish reason and output tokens that every way must bring."""

    name: str
    sampling: dict[str, Any]
    outcome: Callable[[], tuple[str, str, int]]
    prompt: list[int] = field(default_factory=lambda: PROMPT)
    model: str = MODEL
    logprobs: int = 0


def stopped(first: int, last: int, *, cut: int = 0) -> Callable[[], tuple[str, str, int]]:
    """Return the outcome of a stop string from `cut` characters into token `first` to the end of `last`."""

    def outcome() -> tuple[str, str, int]:
        texts = token_texts()
        return "".join(texts[:first]) + texts[first][:cut], "stop", last + 1

    return outcome


def piece(first: int, last: int, *, cut: int = 0, more: str = "") -> str:
    texts = token_texts()
    return "".join(texts[first : last + 1])[cut:] + more


SERVED = [
    Served(
        "no max_tokens: what the context leaves",
        GREEDY,
        lambda: (text_of(expected(40, [1] * (LIMIT - 40))), "length", 40),
        prompt=[1] * (LIMIT - 40),
    ),
    Served("one token, no token phase", {**GREEDY, "max_tokens": 1}, lambda: (text(1), "length", 1)),
    Served(
        "min_tokens counts the first token, a stop string before it does not",
        {**GREEDY, "max_tokens": 5, "min_tokens": 5, "stop": [piece(0, 0)]},
        lambda: (text(5), "length", 5),
    ),
    Served(
        "logprobs for the first token too",
        {**GREEDY, "max_tokens": 2, "logprobs": 3},
        lambda: (text(2), "length", 2),
        logprobs=2,
    ),
    Served(
        "a stop string that begins within the first token",
        {**GREEDY, "max_tokens": 20, "stop": [piece(0, 1, cut=2)]},
        stopped(0, 1, cut=2),
    ),
    Served(
        "a stop string over three tokens across the hand-over",
        {**GREEDY, "max_tokens": 20, "stop": [piece(0, 2, cut=1)]},
        stopped(0, 2, cut=1),
    ),
    Served(
        "a stop string that is a prefix of another",
        {**GREEDY, "max_tokens": 20, "stop": [piece(1, 3), piece(1, 2)]},
        stopped(1, 2),
    ),
    Served(
        "a longer stop string that never comes, and its prefix",
        {**GREEDY, "max_tokens": 20, "stop": [piece(1, 2, more="\0"), piece(1, 2)]},
        stopped(1, 2),
    ),
    Served(
        "ignore_eos gives exactly max_tokens",
        {**GREEDY, "max_tokens": 64, "ignore_eos": True},
        lambda: (text(64, ignore_eos=True), "length", 64),
    ),
    Served("a seed at temperature 0", {**GREEDY, "seed": 7, "max_tokens": 9}, lambda: (text(9), "length", 9)),
    Served(
        "temperature 1 with a seed",
        {"temperature": 1.0, "seed": 7, "max_tokens": 9},
        lambda: (text(9, seed=7), "length", 9),
    ),
    Served(
        "prompt and output fill the context exactly",
        {**GREEDY, "max_tokens": 3},
        lambda: (text_of(expected(3, [1] * (LIMIT - 3))), "length", 3),
        prompt=[1] * (LIMIT - 3),
    ),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", SERVED, ids=lambda case: case.name)
async def test_it_is_served(ways: dict[str, Way], case: Served, way: str) -> None:
    answer, want = await ways[way].ask(case.prompt, model=case.model, **case.sampling), case.outcome()
    assert answer.error is None, answer.message
    assert (answer.text, answer.finish, answer.output_tokens) == want
    assert (answer.prompt_tokens, answer.logprobs) == (len(case.prompt), case.logprobs)


@pytest.mark.parametrize("way", WAYS)
async def test_a_seed_gives_the_same_text_every_time(ways: dict[str, Way], way: str) -> None:
    texts = [
        (await ways[way].ask("hello", model=MODEL, temperature=1.0, seed=5, max_tokens=12)).text
        for _ in range(3)
    ]
    assert len(set(texts)) == 1
    other = await ways[way].ask("hello", model=MODEL, temperature=1.0, seed=6, max_tokens=12)
    assert other.text != texts[0]


@pytest.mark.parametrize("way", WAYS)
async def test_no_chunk_ends_within_a_character(ways: dict[str, Way], way: str) -> None:
    """Emoji, CJK, a joiner and combining marks, one of them in the tokens on both sides of the hand-over."""
    for prompt in characters.prompts():
        spelled = b"".join(map(characters.bytes_of, characters.answer(prompt)))
        options = {**GREEDY, "max_tokens": characters.COUNT, "ignore_eos": True}
        answer = await ways[way].ask(prompt, model=characters.MODEL, **options)
        assert answer.error is None, answer.message
        assert answer.text == spelled.decode(errors="replace")  # broken bytes are U+FFFD, as anywhere
        if way == "grpc":
            assert answer.pieces[0] == ""  # the first token alone is no character yet


@pytest.mark.parametrize("way", WAYS)
async def test_cached_tokens_are_the_prompts_own_prefix(ways: dict[str, Way], way: str) -> None:
    """Whole blocks that this very prompt, or one that begins like it, left on the prompt machine."""
    block = settings_from_options(ENGINE).block_tokens
    fresh = [1000 + 7 * WAYS.index(way) + token for token in range(5 * block + 3)]
    options = {**GREEDY, "max_tokens": 2, "model": MODEL}
    assert (await ways[way].ask(fresh, **options)).cached == 0
    assert (await ways[way].ask(fresh, **options)).cached == 5 * block
    assert (await ways[way].ask([*fresh[: 2 * block + 1], 9, *fresh], **options)).cached == 2 * block
    assert (await ways[way].ask([9, *fresh], **options)).cached == 0


@pytest.mark.parametrize("way", WAYS)
async def test_every_length_around_a_block_and_the_threshold(ways: dict[str, Way], way: str) -> None:
    """One block of 16 tokens, two, the length from which a push goes layer by layer; one less and more."""
    lengths = [edge + more for edge in (16, 32, 512) for more in (-1, 0, 1)]
    prompts = [[1 + (7 * index + length) % 30_000 for index in range(length)] for length in lengths]
    answers = await asyncio.gather(
        *[ways[way].ask(prompt, model=MODEL, **GREEDY, max_tokens=4) for prompt in prompts]
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.text == text_of(expected(4, prompt)), len(prompt)


async def test_a_chat_is_rendered_alike(ways: dict[str, Way]) -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "naïve 你好"}]
    answers = [await way.ask(messages, model=MODEL, **GREEDY, max_tokens=9) for way in ways.values()]
    assert len({(answer.text, answer.finish, answer.prompt_tokens) for answer in answers}) == 1
    assert answers[0].output_tokens == 9


async def test_both_limits_may_be_given_when_they_agree(ways: dict[str, Way]) -> None:
    both = {"max_tokens": 1, "max_completion_tokens": 1}
    for body in (both, {"max_completion_tokens": 1}):
        answer = await ways["http"].ask(PROMPT, model=MODEL, **GREEDY, **body)
        assert (answer.text, answer.output_tokens) == (text(1), 1)


@pytest.mark.parametrize("continuous", [False, True])
async def test_usage_comes_last_or_in_every_chunk(http: aiohttp.ClientSession, continuous: bool) -> None:
    path, body = http_body(PROMPT, MODEL, **GREEDY, max_tokens=4)
    options = {"include_usage": True, "continuous_usage_stats": continuous}
    async with http.post(path, json={**body, "stream": True, "stream_options": options}) as response:
        events = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n") if event]
    *chunks, last = [json.loads(event) for event in events[:-1]]
    assert events[-1] == "[DONE]"
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (len(PROMPT), 4)
    assert all(chunk["choices"] for chunk in chunks)
    usages = [chunk["usage"] for chunk in chunks]
    if not continuous:
        assert usages == [None] * len(chunks)
        return
    made = [usage["completion_tokens"] for usage in usages]
    assert made == sorted(made)
    assert made[-1] == 4
    assert {usage["prompt_tokens"] for usage in usages} == {len(PROMPT)}


async def test_several_prompts_are_one_choice_each(http: aiohttp.ClientSession) -> None:
    prompts = [PROMPT[:size] for size in (5, 40, 300)]
    body = {"model": MODEL, "prompt": prompts, **GREEDY, "max_tokens": 12}
    async with http.post("/v1/completions", json=body) as response:
        content = await response.json()
        assert len(response.headers["x-request-id"].split(", ")) == 3
    assert [c["text"] for c in content["choices"]] == [text_of(expected(12, one)) for one in prompts]
    assert content["usage"]["prompt_tokens"] == 345
    assert content["usage"]["completion_tokens"] == 36
    texts = [""] * 3
    async with http.post("/v1/completions", json={**body, "stream": True}) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                texts[choice["index"]] += choice["text"]
    assert texts == [choice["text"] for choice in content["choices"]]


async def test_equal_requests_at_once_are_not_mixed(ways: dict[str, Way]) -> None:
    async def one(number: int) -> Outcome:
        way = ways[WAYS[number % 3]]
        return await way.ask(PROMPT[: 20 + number], model=MODEL, **GREEDY, max_tokens=2 + number)

    answers = await asyncio.gather(*map(one, range(30)))
    for number, answer in enumerate(answers):
        assert answer.text == text_of(expected(2 + number, PROMPT[: 20 + number]))


async def test_nothing_is_left(cluster: RouterCluster) -> None:
    """Runs last: what was kept for a prefix counts as free."""
    await cluster.until_free()
