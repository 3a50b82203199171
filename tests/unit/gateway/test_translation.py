"""Whatever a body holds, it is translated or refused with a field's name; nothing else is raised."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.router.gateway.bodies import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from services.router.gateway.refusals import ParamNames, Refusal, from_error
from services.router.gateway.translate import chat_call, completion_call, parse, tokenize_request
from services.router.gateway.unserved import UNSERVED, refuse_unserved
from splitwise.errors import RemoteError
from splitwise.requests import FieldError, check_request

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
TEXT = {"model": "tiny", "prompt": "x"}
FIELDS = sorted({*ChatBody.model_fields, *CompletionBody.model_fields, *UNSERVED, "unknown"})
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        | st.fixed_dictionaries({}, optional={"role": inner, "content": inner, "type": inner, "text": inner})
    ),
    max_leaves=8,
)


def refused(body: dict[str, Any], kind: str) -> Refusal | None:
    """Translate and check `body` as the gateway and the router do; return the refusal."""
    raw = json.dumps(body).encode()
    try:
        if kind == "chat":
            check_request(chat_call(parse(ChatBody, raw), "").prompts[0].request)
        elif kind == "completion":
            for asked in completion_call(parse(CompletionBody, raw), "").prompts:
                check_request(asked.request)
        elif kind == "tokenize":
            check_request(tokenize_request(parse(TokenizeBody, raw)))
        else:
            parse(DetokenizeBody, raw)
    except Refusal as refusal:
        return refusal
    except RemoteError as error:
        return from_error(error)
    return None


@settings(max_examples=600, deadline=None)
@given(
    change=st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1, max_size=3),
    kind=st.sampled_from(["chat", "completion", "tokenize", "detokenize"]),
)
def test_no_input_is_a_server_error(change: dict[str, Any], kind: str) -> None:
    refusal = refused((CHAT if kind == "chat" else TEXT) | change, kind)
    if refusal is not None:
        assert refusal.status == 400
        json.loads(refusal.body())


@given(st.binary(max_size=60))
def test_no_bytes_are_a_server_error(raw: bytes) -> None:
    for kind in (ChatBody, CompletionBody, TokenizeBody, DetokenizeBody):
        try:
            parse(kind, raw)
        except Refusal as refusal:
            status = refusal.status
        else:
            status = 400
        assert status == 400


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("sampling.stop[2]", "stop[2]"),
        ("sampling.max_tokens", "max_completion_tokens"),
        ("sampling.logprobs", "top_logprobs"),
        ("sampling.temperature", "temperature"),
        ("chat.messages[3].role", "messages[3].role"),
        ("chat", "messages"),
        ("text", "prompt"),
        ("token_ids.ids[7]", "prompt[7]"),
        ("token_ids.ids", "prompt"),
        ("token_ids[7]", "prompt[7]"),
        ("client_request_id", "x-request-id"),
        ("model", "model"),
    ],
)
def test_paths_are_named_as_the_client_named_them(path: str, expected: str) -> None:
    names = ParamNames(sampling={"max_tokens": "max_completion_tokens", "logprobs": "top_logprobs"})
    refusal = from_error(FieldError(path, "wrong"), names)
    assert (refusal.status, refusal.param, refusal.message) == (400, expected, f"{expected}: wrong")


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_every_unserved_field_is_harmless_when_empty_and_refused_otherwise(name: str) -> None:
    harmless, why = UNSERVED[name]
    for value in (None, "", [], {}, *harmless):
        refuse_unserved({name: value}, chat=False)
    with pytest.raises(Refusal, match=why) as caught:
        refuse_unserved({name: {"some": "thing"}}, chat=False)
    assert caught.value.param == name


def test_one_is_not_taken_for_true() -> None:
    """1 == True in Python; a number where a flag belongs is still refused."""
    with pytest.raises(Refusal):
        refuse_unserved({"skip_special_tokens": 1}, chat=False)


def test_chat_templates_put_special_tokens_in_themselves() -> None:
    refuse_unserved({"add_special_tokens": False}, chat=True)
    with pytest.raises(Refusal):
        refuse_unserved({"add_special_tokens": False}, chat=False)
