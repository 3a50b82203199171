"""Prompts and chat messages in all the forms that clients write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.router.gateway.bodies import UINT32
from services.router.gateway.refusals import invalid
from splitwise.rpc.v1.router_pb2 import ChatMessage, GenerateRequest

if TYPE_CHECKING:
    from services.router.gateway.refusals import Refusal

# "developer" is OpenAI's newer name for the system's role.
ROLE_NAMES = {"developer": "system"}
MAX_PROMPTS = 128
"""Prompts in one request: each is a request of its own to the scheduler."""


def split_prompts(prompt: object) -> list[tuple[str, object]]:
    """Return each prompt with its path: one, or the elements of a list of texts or of token id lists.

    Raises a `Refusal` for more than are served in one request.
    """
    if not (isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list)):
        return [("prompt", prompt)]
    if len(prompt) > MAX_PROMPTS:
        raise invalid("prompt", f"{len(prompt)} prompts; one request may have {MAX_PROMPTS}")
    if len(prompt) == 1:
        return [("prompt", prompt[0])]
    return [(f"prompt[{index}]", element) for index, element in enumerate(prompt)]


def put_prompt(request: GenerateRequest, prompt: object, path: str = "prompt") -> None:
    """Set the prompt: text or token ids; raises a `Refusal` that names the element at fault."""
    if isinstance(prompt, str):
        if not prompt:
            raise invalid(path, "empty")
        request.text = prompt
    elif isinstance(prompt, list):
        request.token_ids.ids.extend(_token_ids(prompt, path))
    elif prompt is None:
        raise invalid(path, "missing")
    else:
        raise invalid(path, "must be text or a list of token ids")


def _token_ids(prompt: list[object], path: str) -> list[int]:
    if not prompt:
        raise invalid(path, "empty")
    ids: list[int] = []
    for index, element in enumerate(prompt):
        # bool is an int to Python, but no token id
        if not isinstance(element, int) or isinstance(element, bool):
            raise invalid(f"{path}[{index}]", "must be a token id (a whole number)")
        if not 0 <= element <= UINT32:
            raise invalid(f"{path}[{index}]", f"token id {element} is outside every vocabulary")
        ids.append(element)
    return ids


def put_messages(request: GenerateRequest, messages: object) -> None:
    """Set the chat; raises a `Refusal` that names the part at fault."""
    if messages is None:
        raise invalid("messages", "missing")
    if not isinstance(messages, list):
        raise invalid("messages", "must be a list")
    if not messages:
        raise invalid("messages", "empty")
    request.chat.messages.extend(
        _message(message, f"messages[{index}]") for index, message in enumerate(messages)
    )


def _message(message: object, path: str) -> ChatMessage:
    if not isinstance(message, dict):
        raise invalid(path, "must be an object with role and content")
    role = message.get("role")
    if not isinstance(role, str):
        raise invalid(f"{path}.role", "missing" if role is None else "must be text")
    if message.get("tool_calls") or message.get("function_call"):
        raise invalid(f"{path}.tool_calls", "tools are not served")
    content = message.get("content")
    if content is None and role == "assistant":
        content = ""
    return ChatMessage(role=ROLE_NAMES.get(role, role), content=_content(content, f"{path}.content"))


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise invalid(path, "missing")
    if not isinstance(content, list):
        raise invalid(path, "must be text or a list of text parts")
    # vLLM puts a line end between parts, for templates that take plain text.
    return "\n".join(_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part(part: object, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise invalid(path, "must be an object with type and text")
    kind = part.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise _unknown_part(kind, path)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text", "missing" if text is None else "must be text")
    return text


def _unknown_part(kind: object, path: str) -> Refusal:
    if not isinstance(kind, str):
        return invalid(f"{path}.type", "missing" if kind is None else "must be text")
    return invalid(f"{path}.type", "only text parts are served")
