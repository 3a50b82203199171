"""Fields that change the answer and are not served here: refused when they would matter.

OpenAI's servers ignore unknown fields, and so does the gateway. A field that is known to
change the text must not be ignored, though: an answer without its JSON schema, or one
choice instead of four, would look like a right one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from services.router.gateway.refusals import invalid

if TYPE_CHECKING:
    from collections.abc import Mapping

STRUCTURED = "structured output is not served"
TOOLS = "tools are not served"
TEXT_ONLY = "only text is served"
TEMPLATE = "the model's own chat template is used, up to where the assistant's answer begins"
PROMPT_LOGPROBS = "log probabilities of the prompt are not served"
SAMPLER = "this way of choosing tokens is not served"
SPECIAL = "special tokens are put around prompts and left out of answers"

# Field: (values that change nothing, why others are refused). null and empty are always harmless.
UNSERVED: dict[str, tuple[tuple[object, ...], str]] = {
    "response_format": (({"type": "text"},), STRUCTURED),
    "structured_outputs": ((), STRUCTURED),
    "guided_json": ((), STRUCTURED),
    "guided_regex": ((), STRUCTURED),
    "guided_choice": ((), STRUCTURED),
    "guided_grammar": ((), STRUCTURED),
    "tools": ((), TOOLS),
    "functions": ((), TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "function_call": (("none", "auto"), TOOLS),
    "audio": ((), TEXT_ONLY),
    "modalities": ((["text"],), TEXT_ONLY),
    "web_search_options": ((), "web search is not served"),
    "suffix": ((), "insertion before a suffix is not served"),
    "prompt_embeds": ((), TEXT_ONLY),
    "prompt_logprobs": ((), PROMPT_LOGPROBS),
    "use_beam_search": ((False,), SAMPLER),
    "bad_words": ((), SAMPLER),
    "allowed_token_ids": ((), SAMPLER),
    "logits_processors": ((), SAMPLER),
    "include_stop_str_in_output": ((False,), "stop strings are never part of the answer"),
    "skip_special_tokens": ((True,), SPECIAL),
    "add_special_tokens": ((True,), SPECIAL),
    "truncate_prompt_tokens": ((-1,), "prompts are not cut"),
    "return_token_ids": ((False,), "ask for logprobs with return_tokens_as_token_ids"),
    "chat_template": ((), TEMPLATE),
    "chat_template_kwargs": ((), TEMPLATE),
    "documents": ((), TEMPLATE),
    "add_generation_prompt": ((True,), TEMPLATE),
    "continue_final_message": ((False,), TEMPLATE),
}
# Chat templates put the special tokens in themselves, so false is what happens there.
HARMLESS_IN_CHAT: dict[str, tuple[object, ...]] = {"add_special_tokens": (False,)}


def refuse_unserved(extra: Mapping[str, Any] | None, *, chat: bool) -> None:
    """Raise a `Refusal` for the first field of `extra` that would have changed the answer."""
    for name, value in (extra or {}).items():
        if name not in UNSERVED or value is None or value in ("", [], {}):
            continue
        harmless, why = UNSERVED[name]
        allowed = HARMLESS_IN_CHAT.get(name, harmless) if chat else harmless
        if not any(type(value) is type(other) and value == other for other in allowed):
            raise invalid(name, why)
