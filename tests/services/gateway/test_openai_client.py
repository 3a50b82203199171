"""The official client against the gateway: whole answers, streams, usage, log probabilities."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import openai
import pytest

from tests.services.gateway.scripted import CONTEXT

if TYPE_CHECKING:
    from tests.services.gateway.scripted import ScriptedBackend

USER = [{"role": "user", "content": "Say hello"}]


async def chunks_of(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


async def test_completion(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    backend.cached = 4
    answer = await client.completions.create(model="tiny", prompt="Say hello")
    assert answer.object == "text_completion"
    assert answer.id == "cmpl-r1"
    assert answer.model == "tiny"
    assert answer.choices[0].text == "Hello, world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 9
    assert answer.usage.completion_tokens == 13  # with the end-of-sequence token
    assert answer.usage.total_tokens == 22
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=USER, max_completion_tokens=5)
    assert answer.object == "chat.completion"
    assert answer.id == "chatcmpl-r1"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5


async def test_the_only_model_needs_no_name(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="", prompt="x")
    assert answer.model == "tiny"


async def test_streamed_completion_equals_the_whole_one(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.tokens = tuple("naïve 👩‍👩‍👧 你好 e\u0301".encode())
    chunks = await chunks_of(await client.completions.create(model="tiny", prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "naïve 👩‍👩‍👧 你好 e\u0301"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert {chunk.id for chunk in chunks} == {"cmpl-r1"}
    assert all(chunk.usage is None for chunk in chunks)
    assert all("\ufffd" not in chunk.choices[0].text for chunk in chunks)


async def test_streamed_chat(client: openai.AsyncOpenAI) -> None:
    chunks = await chunks_of(await client.chat.completions.create(model="tiny", messages=USER, stream=True))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == "Hello, world"
    assert chunks[-1].choices[0].finish_reason == "stop"


async def test_text_with_line_separators_stays_in_one_event(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    text = 'a\n\nb\r\nc\u2028d\u2029e\x85f\x0bg\x0ch\x1ci\0j"k\\l data: m'
    backend.tokens = tuple(text.encode())
    chunks = await chunks_of(await client.completions.create(model="tiny", prompt="x", stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == text


async def test_usage_comes_last_and_without_choices(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.cached = 2
    stream = await client.chat.completions.create(
        model="tiny", messages=USER, stream=True, max_tokens=3, stream_options={"include_usage": True}
    )
    *chunks, last = await chunks_of(stream)
    assert len(chunks) == 3
    assert all(chunk.usage is None and "usage" in chunk.model_fields_set for chunk in chunks)
    assert last.choices == []
    assert last.usage.completion_tokens == 3
    assert last.usage.prompt_tokens_details.cached_tokens == 2


async def test_continuous_usage_grows_with_every_chunk(client: openai.AsyncOpenAI) -> None:
    stream = await client.completions.create(
        model="tiny",
        prompt="four",
        stream=True,
        max_tokens=3,
        stream_options={"include_usage": True, "continuous_usage_stats": True},  # type: ignore[typeddict-unknown-key]
    )
    chunks = await chunks_of(stream)
    assert [chunk.usage.completion_tokens for chunk in chunks] == [1, 2, 3, 3]
    assert {chunk.usage.prompt_tokens for chunk in chunks} == {4}
    assert [len(chunk.choices) for chunk in chunks] == [1, 1, 1, 0]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_is_cut_exactly(
    client: openai.AsyncOpenAI, backend: ScriptedBackend, stream: bool
) -> None:
    for stop in ("lo, ", ["zzz", "lo, w", "lo, "]):
        answer = await client.completions.create(model="tiny", prompt="x", stop=stop, stream=stream)
        chunks = await chunks_of(answer) if stream else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "Hel"
        assert chunks[-1].choices[0].finish_reason == "stop"
        assert chunks[-1].choices[0].stop_reason == "lo, "


async def test_ignore_eos_gives_exactly_max_tokens(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="x", max_tokens=64, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 64
    assert answer.choices[0].finish_reason == "length"


async def test_without_a_limit_the_context_decides(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.endless = True
    answer = await client.completions.create(model="tiny", prompt="x" * (CONTEXT - 100))
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 100
    assert not backend.requests[0].sampling.HasField("max_tokens")


async def test_both_limits_may_agree_but_not_differ(client: openai.AsyncOpenAI) -> None:
    both = await client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=2, max_completion_tokens=2
    )
    assert both.choices[0].message.content == "He"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(
            model="tiny", messages=USER, max_tokens=2, max_completion_tokens=3
        )
    assert caught.value.param == "max_completion_tokens"


async def test_all_sampling_fields_reach_the_router(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    await client.chat.completions.create(
        model="tiny",
        messages=USER,
        temperature=0.5,
        top_p=0.25,
        seed=-7,
        presence_penalty=-1.5,
        frequency_penalty=1.5,
        logit_bias={"65": -100, "66": 2},
        stop=["a", "b"],
        n=1,
        max_tokens=9,
        extra_headers={"x-request-id": "mine"},
        extra_body={
            "top_k": 3,
            "min_p": 0.125,
            "min_tokens": 2,
            "repetition_penalty": 1.25,
            "ignore_eos": True,
            "stop_token_ids": [7, 8],
            "user": "ignored",
            "no_such_field": {"also": "ignored"},
        },
    )
    request = backend.requests[0]
    sampling = request.sampling
    assert request.client_request_id == "mine"
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.25, 0.125)
    assert (sampling.top_k, sampling.min_tokens, sampling.max_tokens, sampling.seed) == (3, 2, 9, -7)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (-1.5, 1.5)
    assert sampling.repetition_penalty == 1.25
    assert sampling.ignore_eos
    assert list(sampling.stop) == [b"a", b"b"]
    assert list(sampling.stop_token_ids) == [7, 8]
    assert dict(sampling.logit_bias) == {65: -100, 66: 2}
    assert not sampling.HasField("logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_completion_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="x", max_tokens=2, logprobs=3, stream=stream
    )
    chunks = await chunks_of(answer) if stream else [answer]
    every = [chunk.choices[0].logprobs for chunk in chunks]
    assert [token for part in every for token in part.tokens] == ["H", "e"]
    assert [value for part in every for value in part.token_logprobs] == [-0.25, -0.25]
    assert [offset for part in every for offset in part.text_offset] == [0, 1]
    tops = [top for part in every for top in part.top_logprobs]
    assert tops == [{"A": 0, "B": -1, "C": -2, token: -0.25} for token in "He"]


@pytest.mark.parametrize("stream", [False, True])
async def test_chat_logprobs(client: openai.AsyncOpenAI, stream: bool) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=USER, max_tokens=2, logprobs=True, top_logprobs=2, stream=stream
    )
    chunks = await chunks_of(answer) if stream else [answer]
    entries = [entry for chunk in chunks for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in entries] == ["H", "e"]
    assert [entry.bytes for entry in entries] == [[72], [101]]
    assert [[top.token for top in entry.top_logprobs] for entry in entries] == [["A", "B"]] * 2


async def test_chat_logprobs_without_alternatives(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=USER, max_tokens=1, logprobs=True)
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert answer.choices[0].logprobs.content[0].top_logprobs == []
    assert backend.requests[0].sampling.HasField("logprobs")
    assert backend.requests[0].sampling.logprobs == 0


async def test_parts_of_characters_have_their_bytes_in_logprobs(
    client: openai.AsyncOpenAI, backend: ScriptedBackend
) -> None:
    backend.tokens = tuple("é".encode())
    answer = await client.chat.completions.create(model="tiny", messages=USER, max_tokens=2, logprobs=True)
    assert answer.choices[0].message.content == "é"
    entries = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert entries is not None
    assert [entry.token for entry in entries] == ["bytes:\\xc3", "bytes:\\xa9"]
    assert b"".join(bytes(entry.bytes or ()) for entry in entries).decode() == "é"
    assert all(math.isfinite(entry.logprob) for entry in entries)


async def test_tokens_can_be_named_by_id(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=1,
        logprobs=0,
        extra_body={"return_tokens_as_token_ids": True},
    )
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["token_id:72"]
    assert answer.choices[0].logprobs.top_logprobs == [{"token_id:72": -0.25}]


@pytest.mark.parametrize("prompt", ["ab", [97, 98]])
@pytest.mark.parametrize("stream", [False, True])
async def test_echo_puts_the_prompt_first(client: openai.AsyncOpenAI, prompt: Any, stream: bool) -> None:
    answer = await client.completions.create(
        model="tiny", prompt=prompt, echo=True, max_tokens=2, stream=stream
    )
    chunks = await chunks_of(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "abHe"


@pytest.mark.parametrize("prompt", [[72, 105], ["Hi"], [[72, 105]], "Hi"])
async def test_prompts_in_all_their_forms(
    client: openai.AsyncOpenAI, backend: ScriptedBackend, prompt: Any
) -> None:
    answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 2
    assert backend.requests[0].WhichOneof("prompt") in ("text", "token_ids")


async def test_chat_content_in_parts(client: openai.AsyncOpenAI, backend: ScriptedBackend) -> None:
    await client.chat.completions.create(
        model="tiny",
        max_tokens=1,
        messages=[
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None},
            {"role": "user", "name": "ann", "content": ""},
        ],
    )
    messages = [(m.role, m.content) for m in backend.requests[0].chat.messages]
    assert messages == [("system", "be brief"), ("user", "a\nb"), ("assistant", ""), ("user", "")]


async def test_the_client_of_threads_works_too(address: Any) -> None:
    import asyncio

    def ask() -> str | None:
        with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="tiny", messages=USER)  # type: ignore[arg-type]
            return answer.choices[0].message.content

    assert await asyncio.to_thread(ask) == "Hello, world"
