"""The performance model's formulas, as kernels over one flat row of float64 per model.

A row holds everything known of one (LLM, hardware, tensor parallel size); `pack` in
``splitwise.perf.model`` writes it. The simulator stacks rows into a matrix and calls
these inside its compiled loop (``token_seconds(rows[kind], sequences, context)``), the
emulated engine calls the same functions as plain Python. All times are seconds, all
sizes tokens.

Row layout: seven scalars (`PROMPT_SINGLE_KNOTS` ... `MIXED_FACTOR`), then nine curves of
`KNOTS` slots each, at the offsets named below; a curve's x come before its y.

Two families. *Faithful* (`prompt_seconds`, `token_seconds`, `mixed_seconds`) fits the
profile. *Compat* (`compat_*`) repeats the authors' published simulator, which looks the
token time up by the number of sequences in a table whose x is prompt tokens, so that
it hardly grows with the batch; it exists for comparison only.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

from splitwise.scheduling.compiled import compiled

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Row = NDArray[np.float64]

KNOTS = 16  # the most points one curve may have
# Scalars.
PROMPT_SINGLE_KNOTS = 0  # points of the curve "one sequence of x tokens"
PROMPT_MANY_KNOTS = 1  # points of the curve "x tokens made of many sequences"
TOKEN_KNOTS = 2  # points of the curve "x sequences, no context"
COMPAT_KNOTS = 3
CONTEXT_SECONDS = 4  # seconds per token of context, summed over the batch
MANY_UNIT = 5  # sequence length that the many-sequences curve was measured with
MIXED_FACTOR = 6  # mixed iteration over the prompt time of all its tokens
# Curves.
PROMPT_SINGLE_X = 8
PROMPT_SINGLE_Y = PROMPT_SINGLE_X + KNOTS
PROMPT_MANY_X = PROMPT_SINGLE_Y + KNOTS
PROMPT_MANY_Y = PROMPT_MANY_X + KNOTS
TOKEN_X = PROMPT_MANY_Y + KNOTS
TOKEN_Y = TOKEN_X + KNOTS
COMPAT_X = TOKEN_Y + KNOTS
COMPAT_PROMPT_Y = COMPAT_X + KNOTS
COMPAT_TOKEN_Y = COMPAT_PROMPT_Y + KNOTS
ROW = COMPAT_TOKEN_Y + KNOTS  # length of a row


@compiled
def line_through(row: Row, x0: int, y0: int, count: int, x: float) -> float:
    """Interpolate linearly between a curve's points; beyond its ends go on with the outer two."""
    high = 1
    while high < count - 1 and row[x0 + high] < x:
        high += 1
    if count == 1:
        return float(row[y0])
    low = high - 1
    slope = (row[y0 + high] - row[y0 + low]) / (row[x0 + high] - row[x0 + low])
    return float(row[y0 + low] + slope * (x - row[x0 + low]))


@compiled
def prompt_seconds(row: Row, tokens: float, sequences: float) -> float:
    """Time of one iteration that computes `tokens` prompt tokens of `sequences` sequences.

    One long sequence and many short ones of the same total differ by up to a third, so
    two curves are kept and blended by log(sequences) between one sequence and the
    many-curve's own sequence count. Below the shortest measured prompt the time is
    that prompt's: reading the weights dominates.
    """
    if tokens <= 0.0:
        return 0.0
    count = int(row[PROMPT_SINGLE_KNOTS])
    single_x = max(tokens, row[PROMPT_SINGLE_X])
    single = line_through(row, PROMPT_SINGLE_X, PROMPT_SINGLE_Y, count, single_x)
    if sequences <= 1.0 or tokens <= row[MANY_UNIT]:
        return single
    count = int(row[PROMPT_MANY_KNOTS])
    many_x = max(tokens, row[PROMPT_MANY_X])
    many = line_through(row, PROMPT_MANY_X, PROMPT_MANY_Y, count, many_x)
    share = min(log2(sequences) / log2(tokens / row[MANY_UNIT]), 1.0)
    return single + share * (many - single)


@compiled
def token_seconds(row: Row, sequences: float, context: float) -> float:
    """Time of one iteration that makes one token for each of `sequences` sequences.

    `context` is the total number of tokens, over the batch, whose KV cache is read.
    """
    if sequences <= 0.0:
        return 0.0
    x = max(sequences, row[TOKEN_X])
    base = line_through(row, TOKEN_X, TOKEN_Y, int(row[TOKEN_KNOTS]), x)
    return float(base + row[CONTEXT_SECONDS] * context)


@compiled
def mixed_seconds(
    row: Row, prompt_tokens: float, prompt_sequences: float, sequences: float, context: float
) -> float:
    """Time of one iteration with prompt tokens and `sequences` sequences in the token phase.

    1.1 times the prompt time of all tokens (the factor of the authors' simulator), plus
    the reading of the token phase's context; never less than either phase alone.
    """
    if sequences <= 0.0:
        return prompt_seconds(row, prompt_tokens, prompt_sequences)
    alone = token_seconds(row, sequences, context)
    if prompt_tokens <= 0.0:
        return alone
    both = row[MIXED_FACTOR] * prompt_seconds(row, prompt_tokens + sequences, prompt_sequences)
    return float(max(both + row[CONTEXT_SECONDS] * context, alone))


@compiled
def token_run_seconds(row: Row, sequences: float, context: float, iterations: float) -> float:
    """Time of `iterations` token iterations with an unchanged batch whose first sees `context`.

    Closed form: each iteration lengthens every sequence's context by one token.
    """
    first = token_seconds(row, sequences, context)
    grown = row[CONTEXT_SECONDS] * sequences * iterations * (iterations - 1.0) * 0.5
    return float(first * iterations + grown)


@compiled
def token_run_iterations(row: Row, sequences: float, context: float, seconds: float) -> int:
    """Count the whole token iterations that are over within `seconds` (inverse of `token_run_seconds`)."""
    first = token_seconds(row, sequences, context)
    if first <= 0.0 or seconds < first:
        return 0
    curve = row[CONTEXT_SECONDS] * sequences * 0.5
    linear = first - curve
    # n*first + curve*n*(n-1) = seconds, in the form that stays exact as curve goes to 0
    root = 2.0 * seconds / (linear + (linear * linear + 4.0 * curve * seconds) ** 0.5)
    iterations = int(root)
    # The root carries rounding; settle on the exact side.
    while token_run_seconds(row, sequences, context, iterations + 1.0) <= seconds:
        iterations += 1
    while iterations > 0 and token_run_seconds(row, sequences, context, float(iterations)) > seconds:
        iterations -= 1
    return iterations


@compiled
def compat_prompt_seconds(row: Row, tokens: float) -> float:
    """Prompt time as the authors' simulator has it: one table over the batch's prompt tokens."""
    return line_through(row, COMPAT_X, COMPAT_PROMPT_Y, int(row[COMPAT_KNOTS]), tokens)


@compiled
def compat_token_seconds(row: Row, sequences: float) -> float:
    """Token time as the authors' simulator has it: the prompt-token table read at `sequences`."""
    return line_through(row, COMPAT_X, COMPAT_TOKEN_Y, int(row[COMPAT_KNOTS]), sequences)


@compiled
def compat_mixed_seconds(row: Row, prompt_tokens: float, sequences: float) -> float:
    """Mixed iteration as the authors' simulator has it: 1.1 times the prompt time of all tokens."""
    return float(row[MIXED_FACTOR] * compat_prompt_seconds(row, prompt_tokens + sequences))
