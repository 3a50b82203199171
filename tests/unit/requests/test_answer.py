"""One answer from two machines' tokens: text, stops, limits and times."""

from __future__ import annotations

import pytest

from splitwise.requests import Answer, Arrived, AttemptMerge, RequestTiming
from splitwise.rpc.v1.common_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP, TokenLogprob
from splitwise.text import ByteVocabulary, StopMatcher


def answer(*stops: str, min_tokens: int = 0, max_tokens: int = 100) -> Answer:
    return Answer(
        ByteVocabulary().detokenizer(), StopMatcher(stops), min_tokens=min_tokens, max_tokens=max_tokens
    )


def test_a_stop_string_over_first_and_second_token() -> None:
    text = answer("ab")
    assert text.push(Arrived([ord("a")])).text == ""
    piece = text.push(Arrived([*b"bcd"], [TokenLogprob(token_id=i) for i in b"bcd"]))
    assert (piece.text, piece.token_ids, piece.finish) == ("", [ord("b")], FINISH_REASON_STOP)
    assert (piece.stop_matched, piece.by_text) == ("ab", True)
    assert [entry.token_id for entry in piece.logprobs] == [ord("b")]


def test_stop_strings_count_only_after_min_tokens() -> None:
    text = answer("b", min_tokens=3)
    piece = text.push(Arrived([*b"abbxb"]))
    assert (piece.text, piece.token_ids, piece.stop_matched) == ("abbx", [*b"abbxb"], "b")


def test_the_token_that_the_engine_stopped_at_has_no_text() -> None:
    piece = answer().push(Arrived([*b"ab"], finish=FINISH_REASON_STOP))
    assert (piece.text, piece.token_ids, piece.finish, piece.by_text) == (
        "a", [*b"ab"], FINISH_REASON_STOP, False,
    )  # fmt: skip


def test_held_text_and_half_characters_come_out_at_the_end() -> None:
    text = answer("end")
    assert text.push(Arrived([*b"xe"])).text == "x"
    piece = text.push(Arrived(["é".encode()[0]], finish=FINISH_REASON_LENGTH))
    assert piece.text == "e\ufffd"


def test_max_tokens_holds_even_if_an_engine_forgets() -> None:
    piece = answer(max_tokens=2).push(Arrived([*b"abc"]))
    assert (piece.text, piece.token_ids, piece.finish, piece.by_text) == (
        "ab", [*b"ab"], FINISH_REASON_LENGTH, True,
    )  # fmt: skip


def test_a_stop_string_wins_over_the_length() -> None:
    piece = answer("b", max_tokens=2).push(Arrived([*b"ab"], finish=FINISH_REASON_LENGTH))
    assert (piece.text, piece.finish, piece.stop_matched) == ("a", FINISH_REASON_STOP, "b")


# ---- the order of the two sides


def test_the_second_token_may_come_before_the_first() -> None:
    merge = AttemptMerge(single=False)
    assert merge.from_token(Arrived([2])) == []
    assert merge.from_prompt(Arrived([1], finish=FINISH_REASON_LENGTH)) == [Arrived([1]), Arrived([2])]
    assert merge.from_prompt(Arrived([1])) == []
    assert merge.from_token(Arrived([3], finish=FINISH_REASON_STOP)) == [
        Arrived([3], finish=FINISH_REASON_STOP)
    ]
    assert merge.from_token(Arrived([4])) == []


def test_a_first_token_that_ends_the_request_ends_it() -> None:
    merge = AttemptMerge(single=False)
    merge.from_token(Arrived([2]))  # an engine that went on nevertheless
    assert [a.token_ids for a in merge.from_prompt(Arrived([1], finish=FINISH_REASON_STOP))] == [[1]]


@pytest.mark.parametrize("finish", [0, FINISH_REASON_LENGTH])
def test_a_single_token_is_the_last(finish: int) -> None:
    (arrived,) = AttemptMerge(single=True).from_prompt(Arrived([1], finish=finish))  # type: ignore[arg-type]
    assert arrived.finish == FINISH_REASON_LENGTH


# ---- timing


def test_times_as_the_client_sees_them() -> None:
    timing = RequestTiming(10.0)
    timing.assigned(10.5)
    timing.assigned(11.0)  # a restart
    timing.tokens(1, 12.0)
    timing.tokens(1, 12.1)
    timing.tokens(2, 12.3)
    timing.tokens(1, 12.35)
    report = timing.report(12.4)
    assert (report.queued_us, report.ttft_us, report.second_us) == (500_000, 2_000_000, 100_000)
    assert report.tbt_max_us == 200_000
    assert report.tbt_mean_us == pytest.approx(250_000 / 3, abs=1)
    assert report.e2e_us == 2_400_000


def test_times_of_a_request_without_tokens_are_zero() -> None:
    report = RequestTiming(1.0).report(2.0)
    assert (report.ttft_us, report.second_us, report.tbt_mean_us, report.e2e_us) == (0, 0, 0, 1_000_000)
