"""What a model folder recommends for sampling, and what is refused in it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ConfigError
from splitwise.models import read_sampling_defaults
from splitwise.requests import complete_sampling
from splitwise.rpc.v1.common_pb2 import SamplingParams

if TYPE_CHECKING:
    from pathlib import Path


def folder(path: Path, **config: object) -> Path:
    (path / "generation_config.json").write_text(json.dumps(config))
    return path


def test_the_makers_values_come_between_the_request_and_the_defaults(tmp_path: Path) -> None:
    recommended = read_sampling_defaults(folder(tmp_path, temperature=0.25, top_p=0.5, eos_token_id=2))
    complete = complete_sampling(SamplingParams(top_p=0.75), room=9, recommended=recommended)
    assert (complete.temperature, complete.top_p, complete.top_k) == (0.25, 0.75, 0)


def test_a_request_may_ask_for_zero(tmp_path: Path) -> None:
    recommended = read_sampling_defaults(folder(tmp_path, temperature=0.25))
    assert complete_sampling(SamplingParams(temperature=0), room=9, recommended=recommended).temperature == 0


@pytest.mark.parametrize("config", [{}, {"temperature": None}, {"max_new_tokens": 5, "do_sample": True}])
def test_other_fields_and_nulls_recommend_nothing(tmp_path: Path, config: dict[str, object]) -> None:
    assert read_sampling_defaults(folder(tmp_path, **config)) == SamplingParams()


def test_no_file_recommends_nothing(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path) == SamplingParams()


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_p": 7}, "sampling.top_p: 7"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_k": 1 << 40}, "top_k is"),
    ],
)
def test_a_bad_value_is_named_with_its_file(tmp_path: Path, config: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json") as caught:
        read_sampling_defaults(folder(tmp_path, **config))
    assert named in str(caught.value)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        read_sampling_defaults(tmp_path)
