"""A user's requests through `splitwise up`: the same tokens and text as one engine, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import openai
import pytest
import pytest_asyncio
import tokenizers
import transformers

from splitwise.client import AsyncClient
from tests.vllm.cluster.up import PATIENCE_S
from tests.vllm.harness import prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from splitwise.models import ModelFolder
    from tests.vllm.cluster.up import Up
    from tests.vllm.reference import PlainEngine

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.asyncio(loop_scope="session"),
]
MADE = 24
TEXTS = [
    "The capital of France is",
    "👩‍👩‍👧‍👦 family, 🏳️‍🌈 flag: describe these emoji 🙂",
    "请用中文写一句话,今天天气",
    "e\u0301a\u0300o\u0302 combining marks, नमस्ते दुनिया, and tabs\t\tend",
]
# The model goes on as the text does, and the stop string is not complete with its first token:
# this emoji is two tokens, others and the Chinese characters are three.
REPEATED = {
    "emoji": ("🙂\n" * 8, "🙂"),
    "longer emoji": ("🚀\n" * 8, "🚀"),
    "chinese": ("天气天气天气天气天气天气天气天气", "天气"),
    "words": ("one two three one two three one two three one", "o th"),
}


@pytest.fixture(scope="module")
def tokenizer(model: ModelFolder) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model.path / "tokenizer.json"))


@pytest_asyncio.fixture(loop_scope="session")
async def client(up: Up) -> AsyncIterator[AsyncClient]:
    await up.until_serving()
    async with AsyncClient(up.router) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def http(up: Up) -> AsyncIterator[openai.AsyncOpenAI]:
    await up.until_serving()
    async with openai.AsyncOpenAI(base_url=f"http://{up.http}/v1", api_key="none") as client:
        yield client


def greedy(**more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "ignore_eos": True, "max_tokens": MADE, "timeout": PATIENCE_S, **more}


@dataclass(frozen=True)
class Expected:
    """What an answer must be, from the plain engine's tokens alone."""

    text: str
    finish: str

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer, ids: list[int], stop: str | None = None) -> Expected:
        text = tokenizer.decode(ids, skip_special_tokens=True)
        if stop is not None and stop in text:
            return cls(text[: text.index(stop)], "stop")
        return cls(text, "length")


async def over_grpc(stream: Any) -> Expected:
    """Read a stream; its pieces must make up the answer's text."""
    pieces = [piece async for piece in stream]
    answer = await stream.result()
    assert "".join(pieces) == answer.text
    return Expected(answer.text, str(answer.finish_reason))


async def over_http(http: openai.AsyncOpenAI, model: ModelFolder, text: str, **options: Any) -> Expected:
    """Complete a text at once and as a stream, which must be the same."""
    body = {"model": model.name, "prompt": text, "extra_body": {"ignore_eos": True}, **greedy(**options)}
    del body["ignore_eos"]
    whole = (await http.completions.create(**body)).choices[0]
    text, finish = "", None
    async for chunk in await http.completions.create(stream=True, **body):
        text += chunk.choices[0].text
        finish = chunk.choices[0].finish_reason or finish
    assert (text, finish) == (whole.text, whole.finish_reason)
    return Expected(text, str(finish))


async def test_same_tokens_alone_and_together(
    client: AsyncClient, plain: PlainEngine, tokenizer: tokenizers.Tokenizer
) -> None:
    prompts = [prompt(length, seed=40) for length in (1, 16, 33, 500, 1500)]
    prompts += [list(tokenizer.encode(text).ids) for text in TEXTS]
    wanted = await plain.answers(prompts, max_tokens=MADE)

    async def ask(tokens: list[int]) -> list[int]:
        answer = await client.generate(tokens, **greedy()).result()
        assert answer.transfer is not None
        assert answer.transfer.transport == "ucx"
        return list(answer.token_ids)

    assert [await ask(tokens) for tokens in prompts] == wanted
    assert await asyncio.gather(*map(ask, prompts)) == wanted


@pytest.mark.parametrize("text", TEXTS, ids=["ascii", "emoji", "chinese", "combining"])
async def test_same_text_over_grpc_and_http(
    client: AsyncClient,
    http: openai.AsyncOpenAI,
    model: ModelFolder,
    plain: PlainEngine,
    tokenizer: tokenizers.Tokenizer,
    text: str,
) -> None:
    ids = await plain.answer(tokenizer.encode(text).ids, max_tokens=MADE)
    stop = tokenizer.decode(ids)[3:6]  # somewhere in the answer
    for options in ({}, {"stop": [stop]}):
        wanted = Expected.of(tokenizer, ids, *options.get("stop", []))
        assert await over_grpc(client.generate(text, **greedy(**options))) == wanted
        assert await over_http(http, model, text, **options) == wanted


@pytest.mark.parametrize("kind", REPEATED)
async def test_a_stop_string_straddles_the_first_and_the_second_token(
    client: AsyncClient,
    http: openai.AsyncOpenAI,
    model: ModelFolder,
    plain: PlainEngine,
    tokenizer: tokenizers.Tokenizer,
    kind: str,
) -> None:
    text, stop = REPEATED[kind]
    ids = await plain.answer(tokenizer.encode(text).ids, max_tokens=MADE)
    wanted, first = Expected.of(tokenizer, ids, stop), tokenizer.decode(ids[:1])
    assert len(wanted.text) < len(first), "it must begin with the prompt machine's token"
    assert stop not in first, "and end with a token machine's"
    for stops in ([stop], ["\0", stop], [stop + "\0", stop]):
        assert await over_grpc(client.generate(text, **greedy(stop=stops))) == wanted
        assert await over_http(http, model, text, stop=stops) == wanted


async def test_same_chat_over_grpc_and_http(
    client: AsyncClient,
    http: openai.AsyncOpenAI,
    model: ModelFolder,
    plain: PlainEngine,
    tokenizer: tokenizers.Tokenizer,
) -> None:
    """The prompt is what transformers makes of the model's chat template."""
    messages = [{"role": "user", "content": "Write 你好 and 👋🏽 three times, then say why."}]
    ids = transformers.AutoTokenizer.from_pretrained(model.path).apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    wanted = Expected.of(tokenizer, await plain.answer(ids, max_tokens=MADE))
    assert await over_grpc(client.chat(messages, **greedy())) == wanted
    answer = await http.chat.completions.create(
        model=model.name,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=MADE,
        temperature=0.0,
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].message.content == wanted.text
