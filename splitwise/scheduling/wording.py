"""What a client is told when the cluster cannot serve its request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitwise.scheduling.fleet import Group
    from splitwise.scheduling.requests import Request


def nobody(group: Group) -> str:
    """No machine serves the model."""
    return f"no machine serves model {group.model!r} now: retry, or start one"


def too_large(request: Request, prompt_blocks: int, most_blocks: int) -> str:
    """No pair of machines has the KV blocks that the two phases need."""
    first, second = request.group.roomiest
    return (
        f"a prompt of {request.context} tokens and up to {request.remaining} output tokens needs"
        f" {prompt_blocks} KV blocks on one machine and {most_blocks} on another; the largest have"
        f" {first} and {second}: shorten the prompt or lower max_tokens"
    )
