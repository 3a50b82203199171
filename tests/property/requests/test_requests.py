"""Answers do not depend on how two streams overtake, on restarts, or on the size of messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from splitwise.requests import Answer, Arrived, AttemptMerge, Progress, complete_sampling
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, SamplingParams
from splitwise.text import ByteVocabulary, StopMatcher

Bytes = st.lists(st.sampled_from([*b"ab", *"é😀".encode(), 255]), min_size=2, max_size=30)


@given(st.integers(2, 20), st.integers(0, 20), st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_any_overtaking_of_the_two_streams_gives_the_same_order(
    count: int, first_after: int, sizes: list[int]
) -> None:
    """Tokens 0..count; the prompt side's token 0 is seen after `first_after` messages of the other."""
    later, messages = list(range(1, count)), []
    for size in [*sizes, count]:
        if later:
            messages.append(Arrived(later[:size]))
            later = later[size:]
    messages[-1] = Arrived(messages[-1].token_ids, finish=FINISH_REASON_LENGTH)
    merge, out = AttemptMerge(single=False), []
    for index, message in enumerate(messages):
        if index == first_after:
            out += merge.from_prompt(Arrived([0]))
        out += merge.from_token(message)
    out += merge.from_prompt(Arrived([0]))  # late, or a duplicate
    assert [token for arrived in out for token in arrived.token_ids] == list(range(count))
    assert [bool(arrived.finish) for arrived in out] == [False] * (len(out) - 1) + [True]
    assert merge.over


@given(Bytes, st.lists(st.text("abé", min_size=1, max_size=3), max_size=3), st.integers(0, 5), st.data())
def test_restarts_and_message_sizes_do_not_change_an_answer(
    tokens: list[int], stops: list[str], min_tokens: int, data: st.DataObject
) -> None:
    def make() -> Answer:
        return Answer(
            ByteVocabulary().detokenizer(),
            StopMatcher(stops),
            min_tokens=min_tokens,
            max_tokens=len(tokens),
        )

    at_once = make().push(Arrived(tokens, finish=FINISH_REASON_LENGTH))
    pieces, answer, rest = [], make(), tokens
    progress = Progress([1], complete_sampling(SamplingParams(max_tokens=len(tokens)), room=99))
    while rest and not answer.finished:
        size = data.draw(st.integers(1, len(rest)))
        assert progress.left == len(rest)
        assert progress.continuation().token_ids == [1, *tokens[: len(tokens) - len(rest)]]
        pieces.append(
            answer.push(Arrived(rest[:size], finish=FINISH_REASON_LENGTH if size == len(rest) else 0))
        )  # type: ignore[arg-type]
        progress.add(pieces[-1].token_ids)
        rest = rest[size:]
    assert "".join(piece.text for piece in pieces) == at_once.text
    assert progress.made == at_once.token_ids == tokens[: len(at_once.token_ids)]
    assert pieces[-1].finish == at_once.finish
    assert pieces[-1].stop_matched == at_once.stop_matched
    if at_once.finish == FINISH_REASON_STOP:
        assert len(at_once.token_ids) > min_tokens
    else:
        assert at_once.text == bytes(tokens).decode(errors="replace")
