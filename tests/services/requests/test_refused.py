"""Requests that are refused, each over gRPC and HTTP of one router: the status, and the field at fault.

A row is written in both protocols, since each names fields in its own way. Where gRPC's types leave
no room for the mistake, its client refuses it, or there is nothing to send.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp
import pytest

from services.engine.emulated import settings_from_options
from splitwise.client import AsyncClient
from splitwise.errors import InvalidRequestError
from tests.services.requests.conftest import KEY
from tests.services.router.cluster import ENGINE, MODEL

if TYPE_CHECKING:
    from tests.services.requests.ways import Http, Way
    from tests.services.router.cluster import RouterCluster

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
SETTINGS = settings_from_options(ENGINE)
VOCABULARY, LIMIT = SETTINGS.vocab_size, SETTINGS.max_model_len
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
HELLO = [{"role": "user", "content": "hello"}]


@dataclass
class Refused:
    """`grpc` is prompt and sampling, `http` changes the body; each with the path of the field at fault."""

    name: str
    grpc: tuple[Any, dict[str, Any]] | None
    grpc_field: str
    http: dict[str, Any]
    http_field: str


def both(name: str, **sampling: Any) -> Refused:
    """Return the row of one sampling field that is written alike."""
    (field,) = sampling
    return Refused(f"{name}: {sampling}", ("x", sampling), f"sampling.{field}", sampling, field)


def http_only(name: str, field: str, **body: Any) -> Refused:
    return Refused(name, None, "", body, field)


REFUSED = [
    both("range", temperature=-1),
    both("range", temperature=2.5),
    both("range", top_p=2),
    both("range", top_p=0),
    both("range", top_k=-5),
    both("range", min_p=1.5),
    both("range", presence_penalty=3),
    both("range", repetition_penalty=0),
    both("range", max_tokens=0),
    both("range", logprobs=21),
    both("several answers", n=2),
    both("several answers", n=0),
    Refused("stop", ("x", {"stop": ["a", ""]}), "sampling.stop[1]", {"stop": ["a", ""]}, "stop[1]"),
    Refused(
        "min_tokens over max_tokens",
        ("x", {"max_tokens": 2, "min_tokens": 3}),
        "sampling.min_tokens",
        {"max_tokens": 2, "min_tokens": 3},
        "min_tokens",
    ),
    Refused("empty text", ("", {}), "text", {"prompt": ""}, "prompt"),
    Refused("empty ids", ([], {}), "token_ids.ids", {"prompt": []}, "prompt"),
    Refused(
        "an id outside the vocabulary",
        ([1, 2, VOCABULARY], {}),
        "token_ids.ids[2]",
        {"prompt": [1, 2, VOCABULARY]},
        "prompt[2]",
    ),
    Refused(
        "a role that is none",
        ([{"role": "judge", "content": "x"}], {}),
        "chat.messages[0].role",
        {"messages": [{"role": "judge", "content": "x"}]},
        "messages[0].role",
    ),
    Refused(
        "one token over the limit",
        ([1] * LIMIT, {}),
        "token_ids.ids",
        {"prompt": [1] * LIMIT},
        "prompt",
    ),
    Refused(
        "one token over the limit with the output",
        ([1] * (LIMIT - 3), {"max_tokens": 4}),
        "sampling.max_tokens",
        {"prompt": [1] * (LIMIT - 3), "max_tokens": 4},
        "max_tokens",
    ),
    Refused(
        "logit_bias, which this engine does not have",
        ("x", {"logit_bias": {5: 1.0}}),
        "sampling.logit_bias",
        {"logit_bias": {"5": 1.0}},
        "logit_bias",
    ),
    Refused(
        "logit_bias of an id outside the vocabulary",
        ("x", {"logit_bias": {VOCABULARY: 1.0}}),
        "sampling.logit_bias[0]",
        {"logit_bias": {str(VOCABULARY): 1.0}},
        "logit_bias[0]",
    ),
    http_only("best_of", "best_of", best_of=2),
    http_only("echo with logprobs", "echo", echo=True, logprobs=1),
    http_only("a suffix", "suffix", suffix="and so on"),
    http_only("structured output", "response_format", messages=HELLO, response_format=SCHEMA),
    http_only("structured output", "guided_json", guided_json={"type": "object"}),
    http_only("two limits", "max_completion_tokens", max_tokens=2, max_completion_tokens=3),
    http_only("no messages", "messages", messages=[]),
    http_only("type", "temperature", temperature="hot"),
    http_only("type", "max_tokens", max_tokens="ten"),
    http_only("type", "max_tokens", max_tokens=[]),
    http_only("type", "top_k", top_k=1.5),
    http_only("type", "stop", stop=5),
    http_only("type", "stream", stream="yes"),
    http_only("type", "logprobs", logprobs=True),
    http_only("type", "logprobs", messages=HELLO, logprobs=3),
    http_only("type", "seed", seed={}),
    http_only("type", "prompt", prompt={"text": "x"}),
    http_only("type", "prompt[1]", prompt=[1, "x"]),
    http_only("type", "messages[0].content", messages=[{"role": "user", "content": 5}]),
    http_only("type", "model", model=5),
]


def names(cases: list[Refused]) -> list[str]:
    return [f"{case.name}-{case.http_field}" for case in cases]


GRPC = [case for case in REFUSED if case.grpc is not None]


@pytest.mark.parametrize("case", GRPC, ids=names(GRPC))
async def test_grpc_names_the_field(ways: dict[str, Way], case: Refused) -> None:
    assert case.grpc is not None
    prompt, sampling = case.grpc
    answer = await ways["grpc"].ask(prompt, model=MODEL, **sampling)
    assert answer.error == ("INVALID_ARGUMENT", case.grpc_field), answer.message
    assert answer.pieces == []


@pytest.mark.parametrize("way", ["http", "sse"])
@pytest.mark.parametrize("case", REFUSED, ids=names(REFUSED))
async def test_http_names_the_field(ways: dict[str, Http], case: Refused, way: str) -> None:
    if way == "sse" and "stream" in case.http:
        pytest.skip("the row is about stream itself")
    chat = "messages" in case.http
    body = {"model": MODEL, **({} if chat else {"prompt": "x"}), **case.http}
    answer = await ways[way].post("/v1/chat/completions" if chat else "/v1/completions", body)
    assert answer.error == (400, case.http_field), answer.message
    assert answer.message.startswith(f"{case.http_field}: ")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": "ten"}, "sampling.max_tokens"),
        ({"temperature": "hot"}, "sampling.temperature"),
        ({"seed": 1.5}, "sampling.seed"),
        ({"stop": ["a", "\ud800"]}, "sampling.stop[1]"),
        ({"stop_token_ids": [1, -1]}, "sampling.stop_token_ids[1]"),
        ({"logit_bias": {"five": 1}}, "sampling.logit_bias['five']"),
    ],
)
async def test_the_client_names_what_grpc_cannot_carry(
    cluster: RouterCluster, options: dict[str, Any], field: str
) -> None:
    async with AsyncClient(cluster.address) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.generate("x", model=MODEL, **options)
        assert caught.value.message.startswith(f"{field}: ")
        with pytest.raises(InvalidRequestError, match=r"^chat\.messages: "):
            client.chat([], model=MODEL)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff\xfe", b'{"prompt": "\\ud800"}', b'{"n":1}{'])
async def test_what_is_no_json_object(http: aiohttp.ClientSession, body: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] is None


async def test_an_unknown_model(ways: dict[str, Way]) -> None:
    assert (await ways["grpc"].ask("x", model="none")).error == ("NOT_FOUND", "model")
    assert (await ways["http"].ask("x", model="none")).error == (404, "model")
    assert (await ways["http"].ask("x", model="")).error == (400, "model")  # there are two


async def test_keys(cluster: RouterCluster, http: aiohttp.ClientSession) -> None:
    """A refusal says nothing about machines: both pairs serve before and after."""
    body = json.dumps({"model": MODEL, "prompt": [1, 2], "max_tokens": 2})
    statuses = []
    async with aiohttp.ClientSession(cluster.http) as session:
        for key in (None, "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}"):
            headers = {"Content-Type": "application/json", **({"Authorization": key} if key else {})}
            async with session.post("/v1/completions", data=body, headers=headers) as response:
                statuses.append(response.status)
    assert statuses == [401, 401, 401, 200]
    assert {machine.state for machine in (await cluster.describe()).machines} == {"serving"}


async def test_nothing_was_started_for_any_of_them(cluster: RouterCluster) -> None:
    """Runs last: only what an engine itself refused was ever given to a machine."""
    counted = (await cluster.until_free()).counters
    assert counted.failed == 3  # logit_bias, by each way
    assert counted.received == counted.failed + counted.finished
    assert counted.restarted == 0
