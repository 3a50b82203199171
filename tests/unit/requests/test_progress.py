"""What a later attempt is asked for, so that the client sees one answer."""

from __future__ import annotations

from typing import Any

import pytest

from splitwise.requests import CannotContinueError, Progress, complete_sampling, derive_seed
from splitwise.rpc.v1.common_pb2 import SamplingParams


def progress(**sampling: Any) -> Progress:
    return Progress([1, 2, 3], complete_sampling(SamplingParams(**sampling), room=100))


def test_the_first_attempt_is_the_request_itself() -> None:
    plan = progress(max_tokens=10, min_tokens=5, stop=[b"x"], seed=7).continuation()
    assert plan.token_ids == [1, 2, 3]
    assert not plan.single
    assert plan.prompt_sampling.seed == 7  # as one engine would sample the first token
    assert plan.token_sampling.seed == derive_seed(7, 1)
    for sampling in (plan.prompt_sampling, plan.token_sampling):
        assert (sampling.max_tokens, sampling.min_tokens) == (10, 5)
        assert not sampling.stop  # strings are the router's


def test_a_later_attempt_begins_where_the_client_is() -> None:
    request = progress(max_tokens=10, min_tokens=5, seed=7)
    request.add([8, 9, 10])
    plan = request.continuation()
    assert plan.token_ids == [1, 2, 3, 8, 9, 10]
    assert (plan.prompt_sampling.max_tokens, plan.prompt_sampling.min_tokens) == (7, 2)
    assert plan.prompt_sampling.seed == derive_seed(7, 3)
    assert plan.token_sampling.seed == derive_seed(7, 4)
    request.add([1] * 6)
    plan = request.continuation()
    assert plan.single
    assert (plan.token_sampling.max_tokens, plan.token_sampling.min_tokens) == (1, 0)
    assert request.sampling.max_tokens == 10  # the user's own is kept


def test_without_a_seed_none_is_made_up() -> None:
    assert not progress().continuation().token_sampling.HasField("seed")


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_that_count_output_cannot_be_continued(name: str) -> None:
    request = progress(**{name: 0.5})
    request.continuation()  # from the beginning they can
    request.add([4])
    with pytest.raises(CannotContinueError, match=name):
        request.continuation()


def test_a_repetition_penalty_can() -> None:
    request = progress(repetition_penalty=1.5)
    request.add([4])
    assert request.continuation().prompt_sampling.repetition_penalty == 1.5


def test_seeds_differ_by_position_and_are_valid() -> None:
    for seed in (0, -1, 2**63 - 1, -(2**63)):
        seeds = [derive_seed(seed, position) for position in range(200)]
        assert seeds[0] == seed
        assert len(set(seeds)) == 200
        assert all(0 <= later < 2**63 for later in seeds[1:])
        SamplingParams(seed=seeds[1])
    assert derive_seed(7, 3) == 6148384659390418248  # a recorded run stays repeatable
