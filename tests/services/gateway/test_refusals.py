"""What is refused, as clients see it: status, `param`, when to retry; never 500 for bad input."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import openai
import pytest

from services.router.gateway import GatewayOptions, serve_gateway
from splitwise import errors

if TYPE_CHECKING:
    import aiohttp

    from splitwise.config import Address
    from tests.services.gateway.scripted import ScriptedBackend

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "tiny", "prompt": "x"}

# path, what is changed in a good body, the expected param
BAD: list[tuple[str, dict[str, Any], str]] = [
    ("completions", {"temperature": -1}, "temperature"),
    ("completions", {"temperature": "hot"}, "temperature"),
    ("completions", {"temperature": True}, "temperature"),
    ("completions", {"top_p": 2}, "top_p"),
    ("completions", {"top_p": 0}, "top_p"),
    ("completions", {"top_k": -5}, "top_k"),
    ("completions", {"top_k": 2**40}, "top_k"),
    ("completions", {"min_p": 1.5}, "min_p"),
    ("completions", {"max_tokens": "ten"}, "max_tokens"),
    ("completions", {"max_tokens": "10"}, "max_tokens"),
    ("completions", {"max_tokens": 1.5}, "max_tokens"),
    ("completions", {"max_tokens": 0}, "max_tokens"),
    ("completions", {"max_tokens": -1}, "max_tokens"),
    ("completions", {"max_tokens": 2**63}, "max_tokens"),
    ("completions", {"max_tokens": 10_000}, "max_tokens"),
    ("completions", {"max_completion_tokens": 10_000}, "max_completion_tokens"),
    ("completions", {"max_completion_tokens": 0}, "max_completion_tokens"),
    ("completions", {"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ("completions", {"seed": 2**63}, "seed"),
    ("completions", {"prompt": ""}, "prompt"),
    ("completions", {"prompt": []}, "prompt"),
    ("completions", {"prompt": None}, "prompt"),
    ("completions", {"prompt": 5}, "prompt"),
    ("completions", {"prompt": {}}, "prompt"),
    ("completions", {"prompt": ["a", ""]}, "prompt[1]"),
    ("completions", {"prompt": ["a", 5]}, "prompt[1]"),
    ("completions", {"prompt": ["a", None]}, "prompt[1]"),
    ("completions", {"prompt": ["a", "x" * 600]}, "prompt[1]"),
    ("completions", {"prompt": ["a"] * 129}, "prompt"),
    ("completions", {"prompt": [[1], [2, 300]]}, "prompt[1][1]"),
    ("completions", {"prompt": [[1], []]}, "prompt[1]"),
    ("completions", {"prompt": [[1], [[2]]]}, "prompt[1][0]"),
    ("completions", {"prompt": [[]]}, "prompt"),
    ("completions", {"prompt": [1, "a"]}, "prompt[1]"),
    ("completions", {"prompt": [1, 1.5]}, "prompt[1]"),
    ("completions", {"prompt": [1, True]}, "prompt[1]"),
    ("completions", {"prompt": [1, -1]}, "prompt[1]"),
    ("completions", {"prompt": [1, 2, 300]}, "prompt[2]"),
    ("completions", {"prompt": [2**70]}, "prompt[0]"),
    ("completions", {"prompt": "x" * 600}, "prompt"),
    ("completions", {"n": 2}, "n"),
    ("completions", {"n": 0}, "n"),
    ("completions", {"best_of": 2}, "best_of"),
    ("completions", {"echo": True, "logprobs": 1}, "echo"),
    ("completions", {"echo": "yes"}, "echo"),
    ("completions", {"logprobs": 21}, "logprobs"),
    ("completions", {"logprobs": True}, "logprobs"),
    ("completions", {"stop": 5}, "stop"),
    ("completions", {"stop": ["a", 5]}, "stop[1]"),
    ("completions", {"stop": ["a", ""]}, "stop[1]"),
    ("completions", {"stop": ["a"] * 17}, "stop"),
    ("completions", {"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
    ("completions", {"stop_token_ids": [300]}, "stop_token_ids[0]"),
    ("completions", {"logit_bias": {"a": 1}}, "logit_bias.a"),
    ("completions", {"logit_bias": {"1": 101}}, "logit_bias[1]"),
    ("completions", {"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ("completions", {"logit_bias": [1]}, "logit_bias"),
    ("completions", {"stream": "true"}, "stream"),
    ("completions", {"stream_options": {"include_usage": True}}, "stream_options"),
    ("completions", {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ("completions", {"stream": True, "stream_options": 7}, "stream_options"),
    ("completions", {"suffix": "end"}, "suffix"),
    ("completions", {"guided_json": {"type": "object"}}, "guided_json"),
    ("completions", {"use_beam_search": True}, "use_beam_search"),
    ("completions", {"model": 5}, "model"),
    ("chat/completions", {"messages": []}, "messages"),
    ("chat/completions", {"messages": None}, "messages"),
    ("chat/completions", {"messages": "x"}, "messages"),
    ("chat/completions", {"messages": ["x"]}, "messages[0]"),
    ("chat/completions", {"messages": [{"content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": 5, "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
    ("chat/completions", {"messages": [{"role": "user"}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat/completions", {"messages": [{"role": "user", "content": [5]}]}, "messages[0].content[0]"),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
        "messages[0].content[0].type",
    ),
    (
        "chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ("chat/completions", {"top_logprobs": 2}, "top_logprobs"),
    ("chat/completions", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat/completions", {"logprobs": 2}, "logprobs"),
    ("chat/completions", {"response_format": {"type": "json_object"}}, "response_format"),
    ("chat/completions", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
    ("chat/completions", {"tools": [{"type": "function"}]}, "tools"),
    ("chat/completions", {"tool_choice": "required"}, "tool_choice"),
    ("chat/completions", {"modalities": ["text", "audio"]}, "modalities"),
    ("chat/completions", {"max_tokens": 2, "max_completion_tokens": 3}, "max_completion_tokens"),
]


@pytest.mark.parametrize(
    ("path", "change", "param"), BAD, ids=[f"{p}-{json.dumps(c)[:50]}" for p, c, _ in BAD]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields_are_named(
    http: aiohttp.ClientSession,
    backend: ScriptedBackend,
    path: str,
    change: dict[str, Any],
    param: str,
    stream: bool,
) -> None:
    body = (TEXT if path == "completions" else CHAT) | change
    if stream and not change.keys() & {"stream", "stream_options"}:
        body["stream"] = True
    async with http.post(f"/v1/{path}", json=body) as response:
        answer = await response.json()
        assert (response.status, answer["error"]["param"]) == (400, param)
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(f"{param}: ")
    assert backend.running == 0


@pytest.mark.parametrize(
    "change",
    [
        {
            "temperature": None,
            "max_tokens": None,
            "stop": None,
            "logit_bias": None,
            "stream": None,
            "n": None,
        },
        {"response_format": {"type": "text"}, "tools": [], "tool_choice": "none", "modalities": ["text"]},
        {"max_tokens": 3.0, "top_k": 0, "stop": [], "logit_bias": {}},
        {"suffix": None, "best_of": 1, "logprobs": None, "user": "u", "metadata": {"a": "b"}, "unknown": [1]},
        {"model": None},
    ],
)
async def test_what_changes_nothing_is_accepted(http: aiohttp.ClientSession, change: dict[str, Any]) -> None:
    async with http.post("/v1/completions", json=TEXT | change) as response:
        assert response.status == 200, await response.text()


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b'{"prompt": "\\ud800"}', b"[" * 100_000, b'{"a":1}x'],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
async def test_what_is_no_json_object_is_400(http: aiohttp.ClientSession, path: str, body: bytes) -> None:
    async with http.post(path, data=body, headers={"Content-Type": "application/json"}) as response:
        answer = await response.json()
        assert response.status == 400
        assert answer["error"]["param"] is None
        assert "body" in answer["error"]["message"]


async def test_prompts_are_not_repeated_in_errors(http: aiohttp.ClientSession) -> None:
    for body in ({"messages": [{"role": "user", "content": {"s": "hunter2"}}]}, {"messages": "hunter2"}):
        async with http.post("/v1/chat/completions", json=body) as response:
            assert "hunter2" not in await response.text()
    async with http.post(
        "/v1/completions", data=b'{"prompt": "hunter2', headers={"Content-Type": "application/json"}
    ) as response:
        assert "hunter2" not in await response.text()


async def test_unknown_model_is_404(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        await client.completions.create(model="gpt-5", prompt="x")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"
    assert "tiny" in caught.value.message


async def test_a_model_must_be_named_where_there_are_several(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.names = ("tiny", "small")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="", prompt="x")
    assert caught.value.param == "model"
    assert "small, tiny" in caught.value.message
    backend.names = ()
    with pytest.raises(openai.InternalServerError) as missing:
        await client.completions.create(model="", prompt="x")
    assert missing.value.status_code == 503


# exception, status, error code, Retry-After, retry-after-ms
FAILURES: list[tuple[errors.RemoteError, int, str | None, str | None, str | None]] = [
    (errors.OverloadedError("full", retry_after=2.5), 429, "overloaded", "3", "2500"),
    (errors.OverloadedError("full"), 429, "overloaded", "1", "1000"),
    (errors.UnavailableError("none", retry_after=0.02), 503, "unavailable", "1", "20"),
    (errors.PreconditionError("other KV layout"), 503, "unavailable", "1", "1000"),
    (errors.DeadlineError("late"), 504, "timeout", None, None),
    (errors.NotFoundError("who"), 404, "model_not_found", None, None),
    (errors.InvalidRequestError("bad"), 400, None, None, None),
    (errors.DataLossError("corrupt"), 500, "data_loss", None, None),
    (errors.ServerError("broken"), 500, "internal_error", None, None),
    (errors.CancelledError("stopped"), 503, "cancelled", "1", "1000"),
]


@pytest.mark.parametrize(("error", "status", "code", "seconds", "milliseconds"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
async def test_failures_before_the_first_token_are_statuses(
    http: aiohttp.ClientSession,
    backend: ScriptedBackend,
    error: errors.RemoteError,
    status: int,
    code: str | None,
    seconds: str | None,
    milliseconds: str | None,
    stream: bool,
) -> None:
    backend.failures = {0: error}
    async with http.post("/v1/completions", json=TEXT | {"stream": stream}) as response:
        answer = await response.json()
        assert response.status == status
        assert response.headers.get("Retry-After") == seconds
        assert response.headers.get("retry-after-ms") == milliseconds
        assert answer["error"]["code"] == code
        assert answer["error"]["message"] == error.message


async def test_the_official_client_retries_as_told(address: Address, backend: ScriptedBackend) -> None:
    backend.failures = {0: errors.OverloadedError("full", retry_after=0.05)}
    async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="x", max_retries=2) as client:
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model="tiny", prompt="x")
    assert len(backend.requests) == 3


async def test_a_fault_of_the_gateway_itself_is_500_and_says_nothing(
    http: aiohttp.ClientSession, backend: ScriptedBackend
) -> None:
    backend.failures = {0: RuntimeError("hunter2")}
    async with http.post("/v1/completions", json=TEXT) as response:
        assert response.status == 500
        assert "hunter2" not in await response.text()


async def test_unknown_paths_and_methods(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/embeddings", json={}) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "unknown_url"
    async with http.get("/v1/completions") as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert "POST" in (await response.json())["error"]["message"]


async def test_bodies_need_the_json_type(http: aiohttp.ClientSession) -> None:
    async with http.post("/v1/completions", data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 415
    body = json.dumps(TEXT).encode()
    headers = {"Content-Type": "application/json; charset=utf-8"}
    async with http.post("/v1/completions", data=body, headers=headers) as response:
        assert response.status == 200


async def test_large_bodies_are_served_and_refused_like_small_ones(http: aiohttp.ClientSession) -> None:
    padded = TEXT | {"user": "x" * 200_000}
    async with http.post("/v1/completions", json=padded) as response:
        assert response.status == 200
    async with http.post("/v1/completions", json=padded | {"prompt": [1, 2, -3]}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "prompt[2]")


class TestBounds:
    @pytest.fixture
    def options(self) -> GatewayOptions:
        return GatewayOptions(body_bytes=10_000, body_s=0.5, drain_s=5)

    async def test_a_large_body_is_413(self, http: aiohttp.ClientSession, backend: ScriptedBackend) -> None:
        async with http.post("/v1/completions", json=TEXT | {"user": "x" * 20_000}) as response:
            assert response.status == 413
            assert (await response.json())["error"]["code"] == "request_too_large"
        assert backend.requests == []

    async def test_a_large_body_of_unsaid_length_is_413(self, http: aiohttp.ClientSession) -> None:
        async def pieces() -> Any:
            for _ in range(30):
                yield b"x" * 1000

        headers = {"Content-Type": "application/json"}
        async with http.post("/v1/completions", data=pieces(), headers=headers) as response:
            assert response.status == 413

    async def test_a_body_that_unpacks_to_more_is_413(self, http: aiohttp.ClientSession) -> None:
        import zlib

        headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
        packed = zlib.compress(b" " * 5_000_000)
        assert len(packed) < 10_000
        async with http.post("/v1/completions", data=packed, headers=headers) as response:
            assert response.status == 413

    async def test_a_broken_encoding_is_400(self, http: aiohttp.ClientSession) -> None:
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        async with http.post("/v1/completions", data=b"not gzip", headers=headers) as response:
            assert response.status == 400

    async def test_a_slow_body_is_408(self, address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        async with asyncio.timeout(30):
            assert b"408" in await reader.readline()
        writer.close()

    async def test_a_long_request_id_is_refused(self, http: aiohttp.ClientSession) -> None:
        async with http.post("/v1/completions", json=TEXT, headers={"x-request-id": "i" * 257}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == "x-request-id"

    async def test_a_request_id_of_odd_bytes_is_taken(self, address: Address) -> None:
        reader, writer = await asyncio.open_connection(address.host, address.port)
        body = json.dumps(TEXT).encode()
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"x-request-id: \xff\xfe\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        async with asyncio.timeout(30):
            assert b"200" in await reader.readline()
        writer.close()


class TestKeys:
    @pytest.fixture
    def options(self) -> GatewayOptions:
        return GatewayOptions(api_keys=("first-key", "zweiter-schlüssel"), drain_s=5)

    @pytest.mark.parametrize(
        ("header", "status"),
        [
            (None, 401),
            ("", 401),
            ("Bearer", 401),
            ("Bearer wrong", 401),
            ("Bearer first-ke", 401),
            ("Basic first-key", 401),
            ("first-key", 401),
            ("Bearer first-key", 200),
            ("bearer  first-key ", 200),
            ("Bearer zweiter-schlüssel", 200),
        ],
    )
    async def test_the_key_decides(
        self, http: aiohttp.ClientSession, backend: ScriptedBackend, header: str | None, status: int
    ) -> None:
        headers = {} if header is None else {"Authorization": header}
        async with http.post("/v1/completions", json=TEXT, headers=headers) as response:
            assert response.status == status
            if status == 401:
                assert response.headers["WWW-Authenticate"] == "Bearer"
                assert (await response.json())["error"]["code"] == "invalid_api_key"
        assert len(backend.requests) == (status == 200)

    async def test_the_official_client_reads_it(self, address: Address) -> None:
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="first-key") as good:
            assert (await good.completions.create(model="tiny", prompt="x")).choices
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="bad") as bad:
            with pytest.raises(openai.AuthenticationError):
                await bad.completions.create(model="tiny", prompt="x")

    async def test_probes_need_no_key_and_all_else_does(self, http: aiohttp.ClientSession) -> None:
        for path, status in (
            ("/health", 200),
            ("/metrics", 200),
            ("/version", 200),
            ("/v1/models", 401),
            ("/x", 401),
        ):
            async with http.get(path) as response:
                assert response.status == status, path

    async def test_keys_are_in_no_log_line(
        self, http: aiohttp.ClientSession, backend: ScriptedBackend, capfd: pytest.CaptureFixture[str]
    ) -> None:
        backend.failures = {0: RuntimeError("boom")}
        for key in ("first-key", "guessed-key"):
            async with http.post("/v1/completions", json=TEXT, headers={"Authorization": f"Bearer {key}"}):
                pass
        captured = capfd.readouterr()
        logged = captured.out + captured.err
        assert "gateway.failed" in logged
        assert "first-key" not in logged
        assert "guessed-key" not in logged


async def test_a_taken_address_is_a_listen_error(address: Address, backend: ScriptedBackend) -> None:
    with pytest.raises(errors.ListenError, match=str(address.port)):
        async with serve_gateway(backend, address):
            pass
