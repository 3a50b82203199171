"""One client request, without I/O: validation, the answer's text, restarts, timing."""

from splitwise.requests.answer import Answer, Piece
from splitwise.requests.merge import Arrived, AttemptMerge
from splitwise.requests.progress import CannotContinueError, Continuation, Progress, derive_seed
from splitwise.requests.timing import RequestTiming
from splitwise.requests.validation import (
    FieldError,
    Limits,
    check_prompt_tokens,
    check_request,
    check_sampling,
    complete_sampling,
    decode_stops,
)

__all__ = [
    "Answer",
    "Arrived",
    "AttemptMerge",
    "CannotContinueError",
    "Continuation",
    "FieldError",
    "Limits",
    "Piece",
    "Progress",
    "RequestTiming",
    "check_prompt_tokens",
    "check_request",
    "check_sampling",
    "complete_sampling",
    "decode_stops",
    "derive_seed",
]
