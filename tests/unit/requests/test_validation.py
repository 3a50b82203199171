"""Requests are refused by field, at the exact ends of what is allowed."""

from __future__ import annotations

import math
from typing import Any

import pytest

from splitwise.requests import (
    FieldError,
    check_prompt_tokens,
    check_request,
    complete_sampling,
    decode_stops,
)
from splitwise.rpc.v1.common_pb2 import SamplingParams, TokenIds
from splitwise.rpc.v1.router_pb2 import ChatMessage, ChatPrompt, GenerateRequest

BAD: list[tuple[dict[str, Any], str]] = [
    ({"temperature": -1}, "sampling.temperature"),
    ({"temperature": 2.5}, "sampling.temperature"),
    ({"temperature": math.nan}, "sampling.temperature"),
    ({"temperature": math.inf}, "sampling.temperature"),
    ({"top_p": 2}, "sampling.top_p"),
    ({"top_p": 0}, "sampling.top_p"),
    ({"top_k": -5}, "sampling.top_k"),
    ({"min_p": -0.1}, "sampling.min_p"),
    ({"presence_penalty": 3}, "sampling.presence_penalty"),
    ({"frequency_penalty": -3}, "sampling.frequency_penalty"),
    ({"repetition_penalty": 0}, "sampling.repetition_penalty"),
    ({"max_tokens": 0}, "sampling.max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "sampling.min_tokens"),
    ({"n": 2}, "sampling.n"),
    ({"n": 0}, "sampling.n"),
    ({"logprobs": 21}, "sampling.logprobs"),
    ({"stop": [b"a", b""]}, "sampling.stop[1]"),
    ({"stop": [b"a", b"b", b"x\xff"]}, "sampling.stop[2]"),
    ({"stop": [b"x" * 257]}, "sampling.stop[0]"),
    ({"stop": [b"x"] * 17}, "sampling.stop"),
    ({"stop_token_ids": range(65)}, "sampling.stop_token_ids"),
    ({"logit_bias": {7: 101}}, "sampling.logit_bias[7]"),
    ({"logit_bias": {7: math.nan}}, "sampling.logit_bias[7]"),
    ({"logit_bias": dict.fromkeys(range(301), 1)}, "sampling.logit_bias"),
]


def field_of(request: GenerateRequest) -> str:
    with pytest.raises(FieldError) as caught:
        check_request(request)
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    assert caught.value.code == "INVALID_ARGUMENT"
    return caught.value.field


@pytest.mark.parametrize(("sampling", "field"), BAD)
def test_bad_sampling_is_refused_by_field(sampling: dict[str, Any], field: str) -> None:
    assert field_of(GenerateRequest(text="x", sampling=SamplingParams(**sampling))) == field


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0},
        {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0},
        {"top_k": 0, "n": 1, "logprobs": 0},
        {"logprobs": 20, "max_tokens": 1, "min_tokens": 1},
        {"repetition_penalty": 10, "presence_penalty": -2, "frequency_penalty": 2},
        {"stop": ["👍".encode()] * 16, "stop_token_ids": range(64), "seed": -(2**63)},
        {"logit_bias": {0: -100, 1: 100}},
    ],
)
def test_the_ends_of_the_ranges_are_inside(sampling: dict[str, Any]) -> None:
    check_request(GenerateRequest(text="x", sampling=SamplingParams(**sampling)))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (GenerateRequest(), "prompt"),
        (GenerateRequest(text=""), "text"),
        (GenerateRequest(text="x" * 6_000_000), "text"),
        (GenerateRequest(text="é" * (2 * 2**20 + 1)), "text"),  # bytes count, not characters
        (GenerateRequest(token_ids=TokenIds()), "token_ids.ids"),
        (GenerateRequest(token_ids=TokenIds(ids=[1] * 2_000_000)), "token_ids.ids"),
        (GenerateRequest(chat=ChatPrompt()), "chat.messages"),
        (
            GenerateRequest(chat=ChatPrompt(messages=[ChatMessage(role="robot", content="x")])),
            "chat.messages[0].role",
        ),
        (
            GenerateRequest(
                chat=ChatPrompt(messages=[ChatMessage(role="user", content="x" * 3_000_000)] * 2)
            ),
            "chat.messages[1].content",
        ),
        (GenerateRequest(text="x", client_request_id="é" * 129), "client_request_id"),
        (GenerateRequest(text="x", transfer_mode=9), "transfer_mode"),  # type: ignore[arg-type]
    ],
)
def test_bad_prompts_are_refused_by_field(request_: GenerateRequest, field: str) -> None:
    assert field_of(request_) == field


def check(length: int, limit: int = 100, vocabulary: int = 50, **sampling: Any) -> str | None:
    params = complete_sampling(SamplingParams(**sampling), room=max(1, limit - length))
    try:
        check_prompt_tokens("text", [1] * length, params, max_model_len=limit, vocab_size=vocabulary)
    except FieldError as error:
        return error.field
    return None


def test_the_models_length_is_reached_exactly_and_not_passed() -> None:
    assert check(60, max_tokens=40) is None
    assert check(60, max_tokens=41) == "sampling.max_tokens"
    assert check(99) is None
    assert check(100) == "text"
    assert check(0) == "text"
    assert check(60, min_tokens=40) is None
    assert check(60, min_tokens=41) == "sampling.min_tokens"


def test_ids_outside_the_vocabulary_are_named_by_index() -> None:
    params = complete_sampling(SamplingParams(), room=5)
    with pytest.raises(FieldError, match=r"^token_ids\.ids\[2\]: token id 50 is outside"):
        check_prompt_tokens("token_ids.ids", [1, 49, 50, 51], params, max_model_len=100, vocab_size=50)
    check_prompt_tokens("token_ids.ids", [1, 49, 50], params, max_model_len=100, vocab_size=0)
    assert check(1, stop_token_ids=[1, 50]) == "sampling.stop_token_ids[1]"
    assert check(1, logit_bias={50: 1}) == "sampling.logit_bias[0]"


def test_defaults_are_filled_in_and_nothing_given_is_lost() -> None:
    complete = complete_sampling(SamplingParams(temperature=0, top_k=-1, seed=0, logprobs=0), room=17)
    assert complete.max_tokens == 17
    assert (complete.temperature, complete.top_p, complete.top_k) == (0, 1, 0)
    assert (complete.repetition_penalty, complete.n) == (1, 1)
    assert complete.HasField("seed")
    assert complete.HasField("logprobs")
    assert not complete_sampling(SamplingParams(), room=1).HasField("seed")


def test_stops_are_text() -> None:
    assert decode_stops(SamplingParams(stop=["é".encode(), b"b"])) == ["é", "b"]
    with pytest.raises(FieldError, match=r"sampling\.stop\[1\]: not valid UTF-8 at byte 1"):
        decode_stops(SamplingParams(stop=[b"a", b"a\xc3"]))
