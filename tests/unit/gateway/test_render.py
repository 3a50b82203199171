"""Streamed and whole answers say the same, whatever the text, and each event is one line of ASCII."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.gateway.logprobs import LOWEST, LogprobWriter
from services.router.gateway.render import Answer, Choice
from splitwise.errors import CancelledError, ServerError
from splitwise.rpc.v1.common_pb2 import (
    FINISH_REASON_CANCELLED,
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
    TokenAlternative,
    TokenLogprob,
)
from splitwise.rpc.v1.router_pb2 import Finished, GenerateResponse

pieces = st.lists(
    st.tuples(st.text(max_size=6), st.lists(st.integers(0, 255), max_size=3)), min_size=1, max_size=6
)


def spell(token_id: int) -> bytes:
    return bytes((token_id,))


def answer(*, chat: bool, logprobs: bool = True, echo: str = "") -> Answer:
    writer = LogprobWriter(spell, 2) if logprobs else None
    choice = Choice(0, chat=chat, prompt_tokens=3, logprobs=writer, echo=echo)
    return Answer(chat=chat, request_id="r", model="m", created=1, choices=[choice])


def responses(parts: list[tuple[str, list[int]]], reason: int = FINISH_REASON_STOP) -> list[GenerateResponse]:
    messages = [
        GenerateResponse(
            text=text,
            token_ids=ids,
            logprobs=[
                TokenLogprob(token_id=i, logprob=-1, top=[TokenAlternative(token_id=i + 1, logprob=-2)] * 3)
                for i in [min(i, 254) for i in ids]
            ],
        )
        for text, ids in parts
    ]
    messages[0].prompt_tokens = 3
    count = sum(len(ids) for _, ids in parts)
    messages[-1].finished.CopyFrom(
        Finished(reason=reason, prompt_tokens=3, output_tokens=count, stop_matched="\n")  # type: ignore[arg-type]
    )
    return messages


def data(events: bytes) -> list[Any]:
    assert events.isascii()
    assert events.endswith(b"\n\n")
    lines = events.decode()[:-2].split("\n\n")
    assert all(line.startswith("data: ") and len(line.splitlines()) == 1 for line in lines)
    return [json.loads(line[6:]) for line in lines]


@given(parts=pieces, chat=st.booleans(), logprobs=st.booleans())
def test_streamed_and_whole_answers_are_equal(
    parts: list[tuple[str, list[int]]], chat: bool, logprobs: bool
) -> None:
    messages = responses(parts)
    streamed = answer(chat=chat, logprobs=logprobs, echo="" if chat else "echo")
    chunks = [data(streamed.chunk(0, message, "running"))[0] for message in messages]
    whole = json.loads(answer(chat=chat, logprobs=logprobs, echo="" if chat else "echo").whole([messages]))
    choices = [chunk["choices"][0] for chunk in chunks]
    text = "".join((c["delta"]["content"] if chat else c["text"]) for c in choices)
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if chat else choice["text"])
    assert {chunk["id"] for chunk in chunks} == {whole["id"]}
    assert [c["finish_reason"] for c in choices] == [None] * (len(parts) - 1) + ["stop"]
    assert (choice["finish_reason"], choice["stop_reason"], choices[-1]["stop_reason"]) == (
        "stop",
        "\n",
        "\n",
    )
    assert chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    if not logprobs:
        assert choice["logprobs"] is None
        return
    for key in choice["logprobs"].keys() - {"refusal"}:
        assert [entry for c in choices for entry in c["logprobs"][key]] == choice["logprobs"][key]


@given(parts=pieces)
def test_usage_only_grows(parts: list[tuple[str, list[int]]]) -> None:
    streamed = answer(chat=False)
    usages = [data(streamed.chunk(0, message, "running"))[0]["usage"] for message in responses(parts)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert {usage["prompt_tokens"] for usage in usages} == {3}


@pytest.mark.parametrize("chat", [False, True])
def test_usage_is_absent_null_or_counted(chat: bool) -> None:
    (message,) = responses([("a", [1])])
    assert "usage" not in data(answer(chat=chat).chunk(0, message, None))[0]
    assert data(answer(chat=chat).chunk(0, message, "null"))[0]["usage"] is None
    ended = answer(chat=chat)
    ended.chunk(0, message, None)
    last = data(ended.usage_chunk())[0]
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 1)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("reason", "error"), [(FINISH_REASON_CANCELLED, CancelledError), (FINISH_REASON_UNSPECIFIED, ServerError)]
)
def test_only_stop_and_length_are_ends(chat: bool, reason: int, error: type[Exception]) -> None:
    messages = responses([("a", [1])], reason)
    with pytest.raises(error):
        answer(chat=chat).whole([messages])
    with pytest.raises(error):
        answer(chat=chat).chunk(0, messages[0], None)
    assert json.loads(answer(chat=chat).whole([responses([("a", [1])], FINISH_REASON_LENGTH)]))["choices"]


@given(st.floats(width=32))
@example(math.inf)
@example(-math.inf)
@example(math.nan)
def test_log_probabilities_are_always_json(value: float) -> None:
    entry = TokenLogprob(token_id=65, logprob=value, top=[TokenAlternative(token_id=66, logprob=value)])
    writer = LogprobWriter(spell, 1)
    completion = json.dumps(writer.completion([entry]), allow_nan=False)
    json.dumps(writer.chat([entry]), allow_nan=False)
    shown = json.loads(completion)["token_logprobs"][0]
    assert shown >= LOWEST
    assert shown == value or not math.isfinite(value) or value < LOWEST


@given(counts=st.lists(st.integers(1, 5), min_size=2, max_size=4), order=st.randoms(use_true_random=False))
def test_choices_of_several_prompts_are_told_apart(counts: list[int], order: Any) -> None:
    """However their messages come, each choice has its own text, role, usage and end."""
    answers = [responses([(f"{index}.", [1]) for _ in range(count)]) for index, count in enumerate(counts)]
    left = [index for index, count in enumerate(counts) for _ in range(count)]
    order.shuffle(left)
    choices = [Choice(index, chat=False, prompt_tokens=3, echo=f"e{index}") for index in range(len(counts))]
    streamed = Answer(chat=False, request_id="r", model="m", created=1, choices=choices)
    texts, sent = [""] * len(counts), [0] * len(counts)
    for index in left:
        assert not streamed.finished
        (chunk,) = data(streamed.chunk(index, answers[index][sent[index]], "running"))
        sent[index] += 1
        (choice,) = chunk["choices"]
        assert choice["index"] == index
        assert chunk["usage"]["completion_tokens"] == sent[index]
        assert (choice["finish_reason"] is not None) == (sent[index] == counts[index])
        texts[index] += choice["text"]
    assert streamed.finished
    assert texts == [f"e{index}" + f"{index}." * count for index, count in enumerate(counts)]
    (usage,) = data(streamed.usage_chunk())
    assert usage["usage"]["prompt_tokens"] == 3 * len(counts)
    assert usage["usage"]["completion_tokens"] == sum(counts)
    whole = json.loads(
        Answer(
            chat=False,
            request_id="r",
            model="m",
            created=1,
            choices=[Choice(i, chat=False, prompt_tokens=3, echo=f"e{i}") for i in range(len(counts))],
        ).whole(answers)
    )
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert whole["usage"] == usage["usage"]
