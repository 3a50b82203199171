"""Tokenizers and chat templates of model folders, and what is wrong with them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from splitwise.errors import ConfigError
from splitwise.text import ChatTemplateError, load_vocabulary
from tests.support.tokenizers_small import byte_level

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}\n{% endfor %}"
    "{% if messages[-1].role == 'assistant' %}{{ raise_exception('ends with assistant') }}{% endif %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def folder(path: Path, **config: object) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def chat(path: Path, *messages: tuple[str, str]) -> str:
    vocabulary = load_vocabulary(path)
    ids = vocabulary.encode_chat([{"role": role, "content": content} for role, content in messages])
    return byte_level().decode(ids, skip_special_tokens=False)


def test_the_template_of_the_tokenizer_config(tmp_path: Path) -> None:
    folder(tmp_path, chat_template=TEMPLATE, eos_token={"content": "<|end|>"})
    assert chat(tmp_path, ("user", "hi")) == "<|user|>hi<|end|>\n<|assistant|>"


def test_a_template_file_wins_and_named_templates_use_the_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    folder(tmp_path, chat_template=named)
    assert chat(tmp_path, ("user", "hi")) == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert chat(tmp_path, ("user", "hi")) == "file"


def test_a_template_may_refuse(tmp_path: Path) -> None:
    folder(tmp_path, chat_template=TEMPLATE, eos_token="")
    with pytest.raises(ChatTemplateError, match="ends with assistant"):
        chat(tmp_path, ("assistant", "x"))


def test_a_model_without_template_says_what_to_send(tmp_path: Path) -> None:
    with pytest.raises(ChatTemplateError, match="token_ids"):
        chat(folder(tmp_path), ("user", "x"))


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}", "{{ 1 / 0 }}"],
)
def test_templates_are_not_trusted(tmp_path: Path, source: str) -> None:
    with pytest.raises(ChatTemplateError):
        chat(folder(tmp_path, chat_template=source), ("user", "x"))


def test_what_is_wrong_with_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json: no such file"):
        load_vocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="not a tokenizer"):
        load_vocabulary(tmp_path)
    folder(tmp_path, chat_template="{% if %}")
    with pytest.raises(ConfigError, match="line 1"):
        load_vocabulary(tmp_path)


def test_the_models_vocabulary_counts_where_it_is_larger(tmp_path: Path) -> None:
    folder(tmp_path)
    named = load_vocabulary(tmp_path).size
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": named + 100}))
    assert load_vocabulary(tmp_path).size == named + 100
