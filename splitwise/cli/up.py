"""``splitwise up`` and ``splitwise demo``: a whole cluster from one command."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from splitwise.cli.common import JsonOption, guarded, print_json
from splitwise.config import Address, EngineKind
from splitwise.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from splitwise.cli.display import Display
    from splitwise.client import Generation
    from splitwise.launch.plan import ClusterOptions
    from splitwise.launch.supervisor import Supervisor

# Long enough that its KV cache is pushed layer by layer while the prompt is computed.
DEMO_PROMPT = (
    "Large language models answer in two phases. The prompt phase reads the whole prompt at once and "
    "keeps the arithmetic units busy; the token phase makes one token after the other and mostly waits "
    "for memory. "
) * 15 + "In one sentence, the two phases should run on different machines because"

Prompts = Annotated[int, typer.Option("--prompt", min=1, help="Prompt machines.")]
Tokens = Annotated[int, typer.Option("--token", min=1, help="Token machines.")]
ModelOption = Annotated[
    Path | None,
    typer.Option(help="Folder of a Hugging Face model; default: SmolLM2-135M-Instruct, prepared once."),
]
EngineOption = Annotated[EngineKind, typer.Option(help="vllm computes; emulated only takes the time.")]
EngineOptions = Annotated[
    list[str] | None, typer.Option("--engine-option", help="name=value for every engine; may be repeated.")
]
Emulate = Annotated[
    list[str] | None,
    typer.Option(
        help="An emulated fleet, such as 25xH100:prompt; may be repeated; replaces --prompt, --token."
    ),
]
Config = Annotated[Path | None, typer.Option("--config", help="Settings file for all processes.")]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]


@guarded
def up(
    prompt: Prompts = 1,
    token: Tokens = 1,
    model: ModelOption = None,
    model_name: Annotated[str, typer.Option(help="The name that requests use.")] = "",
    engine: EngineOption = EngineKind.VLLM,
    engine_option: EngineOptions = None,
    emulate: Emulate = None,
    listen: Annotated[str, typer.Option(help="Router's host:port; port 0: a free one.")] = "127.0.0.1:0",
    http: Annotated[
        str | None, typer.Option(help="host:port of the OpenAI-compatible gateway and the dashboard.")
    ] = None,
    config: Config = None,
    power: Annotated[
        bool,
        typer.Option("--power", help="Cap GPUs by pool (emulated ones with --emulate); see docs/power.md."),
    ] = False,
    power_budget: Annotated[
        float | None, typer.Option(min=1, help="Watts of all GPUs' limits together; implies --power.")
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="host:port of the router's metrics; the other processes take the ports after it."),
    ] = None,
    log_level: LogLevel = "info",
    as_json: Annotated[
        bool, typer.Option("--json", help="Once it serves, print where, as JSON on standard output.")
    ] = False,
) -> None:
    """Run a cluster in the foreground until Ctrl-C, which takes everything down."""
    from splitwise.cli.display import LEVELS, Display
    from splitwise.launch.plan import ClusterOptions

    if log_level not in LEVELS:
        raise ConfigError(f"--log-level {log_level!r}: must be debug, info, warning or error")
    display = Display(level=log_level)
    options = ClusterOptions(
        prompt=prompt,
        token=token,
        engine=EngineKind.EMULATED if emulate else engine,
        model_name=model_name,
        engine_options=_engine_options(engine_option),
        emulate=_groups(emulate),
        listen=_address("--listen", listen),
        http_listen=None if http is None else _address("--http", http),
        config=config,
        log_level=log_level,
        power=power or power_budget is not None,
        power_budget_watts=power_budget,
        metrics=_metrics(metrics, config),
        model=_model(model, EngineKind.EMULATED if emulate else engine, display),
    )
    raise typer.Exit(asyncio.run(_up(options, display, as_json)))


@guarded
def demo(
    text: Annotated[str, typer.Argument(help="The prompt.")] = DEMO_PROMPT,
    max_tokens: Annotated[int, typer.Option(min=1, help="Most tokens to make.")] = 48,
    model: ModelOption = None,
    engine: EngineOption = EngineKind.VLLM,
    engine_option: EngineOptions = None,
    as_json: JsonOption = False,
) -> None:
    """Start one prompt and one token machine, answer one prompt, show the numbers, stop."""
    from splitwise.cli.display import Display
    from splitwise.launch.plan import ClusterOptions

    display = Display(level="error")
    options = ClusterOptions(
        engine=engine,
        engine_options=_engine_options(engine_option),
        model=_model(model, engine, display),
    )
    raise typer.Exit(asyncio.run(_demo(options, display, text, max_tokens, as_json)))


async def _up(options: ClusterOptions, display: Display, as_json: bool) -> int:
    stop = _stop_on_signals()
    try:
        async with _running(options, display, stop) as cluster:
            display.say(f"serving after {cluster.seconds_to_ready:.1f} s at {cluster.router}", "bold green")
            if as_json:
                print_json(
                    {
                        "router": str(cluster.router),
                        "http": None if cluster.http is None else str(cluster.http),
                        "seconds_to_ready": cluster.seconds_to_ready,
                    }
                )
                sys.stdout.flush()
            if cluster.http is not None:
                display.say(f"OpenAI-compatible gateway and dashboard: http://{cluster.http}", "green")
            if options.metrics is not None and options.metrics.port:
                display.say(f"metrics of the router: http://{options.metrics}/metrics", "green")
            display.say('try: splitwise generate "Once upon a time" --max-tokens 32; Ctrl-C stops', "dim")
            await stop.wait()
            display.say("stopping", "bold")
    except asyncio.CancelledError:
        display.say("stopped before it was ready", "bold")
        return ExitCode.INTERRUPTED
    display.say("all processes have ended", "dim")
    return ExitCode.OK


async def _demo(options: ClusterOptions, display: Display, text: str, max_tokens: int, as_json: bool) -> int:
    from splitwise.client import AsyncClient

    stop = _stop_on_signals()
    try:
        async with _running(options, display, stop) as cluster, AsyncClient(cluster.router) as client:
            display.say(f"serving after {cluster.seconds_to_ready:.1f} s\n", "bold green")
            stream = client.generate(text, max_tokens=max_tokens, temperature=0)
            if not as_json:
                display.say(f"... {text[-200:]}" if len(text) > 200 else text, "dim")
                async for piece in stream:
                    sys.stdout.write(piece)
                    sys.stdout.flush()
                sys.stdout.write("\n\n")
            result = await stream.result()
            if as_json:
                print_json(result)
            else:
                typer.echo("\n".join(numbers(result)))
    except asyncio.CancelledError:
        display.say("stopped before its end", "bold")
        return ExitCode.INTERRUPTED
    return ExitCode.OK


def numbers(result: Generation) -> list[str]:
    """Say where the phases ran and what they took, line by line."""
    timing, placement, push = result.timing, result.placement, result.transfer
    lines = [
        f"prompt phase    {placement.prompt_machine}: {result.prompt_tokens} tokens",
        f"token phase     {placement.token_machine}: {result.output_tokens} tokens ({placement.reason})",
        f"TTFT            {timing.ttft * 1e3:.0f} ms (queued {timing.queued * 1e3:.1f} ms)",
        f"second token    {timing.second * 1e3:.1f} ms after the first",
        f"TBT             {timing.tbt_mean * 1e3:.1f} ms mean, {timing.tbt_max * 1e3:.1f} ms longest",
        f"E2E             {timing.e2e * 1e3:.0f} ms",
    ]
    if push is None:
        return [*lines, "KV push         none was needed"]
    rate = push.bytes / push.seconds / 1e6 if push.seconds else 0.0
    what = f"{push.blocks} blocks, {push.mode or 'mode unknown'}, over {push.transport or 'unknown'}"
    exposed = f"{push.exposed * 1e3:.1f} ms of it after the first token"
    return [
        *lines,
        f"KV push         {push.bytes / 1e6:.2f} MB in {push.puts} puts ({what})",
        f"{'':16}{push.seconds * 1e3:.1f} ms, {exposed}: {push.hidden_share:.1%} hidden ({rate:.0f} MB/s)",
    ]


@asynccontextmanager
async def _running(
    options: ClusterOptions, display: Display, stop: asyncio.Event
) -> AsyncIterator[Supervisor]:
    """Start the cluster with progress shown; a signal in the meantime cancels."""
    from splitwise.launch.supervisor import StartError, Supervisor

    supervisor = Supervisor(options, display)
    display.begin(supervisor.processes)
    task = asyncio.current_task()
    on_stop = asyncio.create_task(stop.wait())
    starting = True

    def interrupt(_done: object) -> None:
        if starting and task is not None and stop.is_set():
            task.cancel()

    on_stop.add_done_callback(interrupt)
    try:
        try:
            await supervisor.__aenter__()
        finally:
            starting = False
            display.end_start()
        try:
            yield supervisor
        finally:
            await supervisor.stop()
    except StartError as error:
        display.last_lines(error.process)
        if error.configuration:
            raise ConfigError(f"{error}; see its last line above") from None
        raise
    finally:
        on_stop.cancel()


def _metrics(flag: str | None, config: Path | None) -> Address | None:
    """Return the flag's address, else that of the settings: one port cannot serve many processes."""
    if flag is not None:
        return _address("--metrics", flag)
    from splitwise.config import load_settings

    return load_settings(file=config).settings.telemetry.metrics_listen


def _stop_on_signals() -> asyncio.Event:
    """Set the returned event on Ctrl-C, SIGTERM and a closed terminal."""
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop


def _model(model: Path | None, engine: EngineKind, display: Display) -> Path | None:
    """Check the model's folder, or prepare the default model."""
    from splitwise.models import prepare_default_model, read_model_folder

    if engine is EngineKind.EMULATED:
        return model
    if model is not None:
        return read_model_folder(model).path.absolute()
    return prepare_default_model(lambda line: display.say(f"model: {line}", "dim")).path


def _engine_options(words: list[str] | None) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for word in words or []:
        name, equals, value = word.partition("=")
        if not equals or not name:
            raise ConfigError(f"--engine-option {word!r}: write name=value")
        options[name] = yaml.safe_load(value)
    return options


def _groups(words: list[str] | None) -> tuple[Any, ...]:
    from splitwise.launch.emulate import parse_groups

    return tuple(parse_groups([part for word in words for part in word.split()])) if words else ()


def _address(flag: str, text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}") from None
