"""Chat templates: a model's own Jinja template turns messages into its prompt.

Templates come with models and are not trusted: they run in Jinja's sandbox, on copies.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
import jinja2.sandbox

from splitwise.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path


class ChatTemplateError(ValueError):
    """The template refused the messages, or there is none; the message says why."""


def _refuse(message: str) -> NoReturn:
    raise ChatTemplateError(f"the model's chat template refuses the messages: {message}")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


class ChatTemplate:
    """One compiled template with the special tokens that it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_refuse, strftime_now=_now)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)

    @classmethod
    def from_folder(cls, folder: Path, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
        """Find the template beside a tokenizer: its own file, else in tokenizer_config.json."""
        path = folder / "chat_template.jinja"
        source: object = path.read_text() if path.is_file() else tokenizer_config.get("chat_template")
        if isinstance(source, list):  # several named ones
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str):
            return None
        return cls(source, _special_tokens(tokenizer_config))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render the prompt up to where the assistant's answer begins."""
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except ChatTemplateError:
            raise
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise ChatTemplateError(f"the model's chat template fails on the messages: {error}") from error


def _special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return bos_token, eos_token and the like, which are text or {"content": text}."""
    tokens: dict[str, str] = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens
