"""``splitwise generate`` and ``splitwise chat``: text from a running cluster."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from splitwise.cli.common import (
    ConfigOption,
    JsonOption,
    RouterOption,
    TimeoutOption,
    connect,
    guarded,
    print_json,
)
from splitwise.errors import InvalidRequestError

if TYPE_CHECKING:
    from splitwise.client import Generation, Message, SamplingOptions, Stream

Model = Annotated[str, typer.Option(help="Model name; may be left out when the cluster serves one.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to make.")]
Temperature = Annotated[float | None, typer.Option(help="0 (always the likeliest token) to 2.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the likeliest tokens of this probability.")]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")]
System = Annotated[str | None, typer.Option(help="System message.")]


@guarded
def generate(
    prompt: Annotated[str, typer.Argument(help="The text to continue; - reads it from standard input.")],
    model: Model = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    router: RouterOption = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the text.")] = False,
) -> None:
    """Continue a text. The text goes to standard output as it comes, the numbers to standard error."""
    text = _standard_input() if prompt == "-" else prompt
    options = _options(max_tokens, temperature, top_p, seed, stop)
    with connect(router, config, timeout) as client, client.generate(text, model=model, **options) as stream:
        if as_json:
            print_json(stream.result())
            return
        result = write_stream(stream)
    if not quiet:
        typer.secho(summary(result), dim=True, err=True)


@guarded
def chat(
    message: Annotated[str | None, typer.Argument(help="One message; without it: a conversation.")] = None,
    system: System = None,
    model: Model = "",
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    stop: Stop = None,
    router: RouterOption = None,
    config: ConfigOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Talk with the model; an empty line or Ctrl-D ends it, Ctrl-C ends an answer."""
    from splitwise.client import Message

    if as_json and message is None:
        raise InvalidRequestError("--json: needs a MESSAGE; a conversation is for reading")

    options = _options(max_tokens, temperature, top_p, seed, stop)
    history: list[Message] = [Message("system", system)] if system else []
    with connect(router, config, timeout) as client:
        client.models()  # says at once when nobody is there
        while True:
            said = message if message is not None else _ask()
            if not said:
                return
            history.append(Message("user", said))
            with client.chat(history, model=model, **options) as stream:
                if as_json:
                    print_json(stream.result())
                    return
                result = write_stream(stream)
            if message is not None:
                return
            history.append(Message("assistant", result.text))


def write_stream(stream: Stream) -> Generation:
    """Write the text as it comes; returns the whole answer."""
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return stream.result()


def summary(result: Generation) -> str:
    """One line of numbers about an answer."""
    timing, placement = result.timing, result.placement
    return (
        f"[{result.request_id}] {result.prompt_tokens} + {result.output_tokens} tokens, "
        f"{placement.prompt_machine} -> {placement.token_machine}, "
        f"TTFT {timing.ttft * 1e3:.0f} ms, TBT {timing.tbt_mean * 1e3:.1f} ms, "
        f"E2E {timing.e2e * 1e3:.0f} ms, {result.finish_reason or 'unknown'}"
    )


def _ask() -> str:
    try:
        return input("you> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return ""


def _standard_input() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"prompt: standard input is not UTF-8: {error}") from None


def _options(
    max_tokens: int | None,
    temperature: float | None,
    top_p: float | None,
    seed: int | None,
    stop: list[str] | None,
) -> SamplingOptions:
    given: SamplingOptions = {}
    if max_tokens is not None:
        given["max_tokens"] = max_tokens
    if temperature is not None:
        given["temperature"] = temperature
    if top_p is not None:
        given["top_p"] = top_p
    if seed is not None:
        given["seed"] = seed
    if stop:
        given["stop"] = stop
    return given
