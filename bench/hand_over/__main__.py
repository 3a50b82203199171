"""What the hand-over costs: the same requests split over two engines and on one, in turns.

    python -m bench.hand_over --rounds 7 --lengths 100 500 1500 [--nixl]

The paper calls the gap between first and second token the visible transfer latency; one
token step is its floor. ``--nixl`` lets vLLM's own split take its turn as well. Medians over
rounds, all kinds in the same run, so that the ratios hold although the times depend on the
machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.hand_over.peer import NixlPair, nixl_is_installed
from services.engine.vllm import VllmSettings
from services.engine.vllm.launch import engine_arguments
from splitwise.models import ModelFolder, prepare_default_model
from tests.vllm.harness import Node, Split, greedy, prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from vllm import SamplingParams

    from services.engine.interface import TokenOutput

MADE = 16
ONE = "one engine"
Runs = defaultdict[tuple[int, str], list[list[float]]]  # (prompt length, way): times of each run


async def split_run(split: Split, tokens: list[int]) -> list[float]:
    """Return when each token of one split request came, in seconds after its start."""
    start = time.perf_counter()
    times: list[float] = []

    async def note(outputs: AsyncIterator[TokenOutput]) -> None:
        async for output in outputs:
            times.extend([time.perf_counter() - start] * len(output.token_ids))

    prompt_work, token_work = split.works(tokens, greedy(MADE))
    await asyncio.gather(
        note(split.prompt.engine.run_prompt(prompt_work)), note(split.token.engine.run_token(token_work))
    )
    return times


def sampling(**more: Any) -> SamplingParams:
    """Greedy, to the full length, each token told as it comes."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **{
            "temperature": 0.0,
            "ignore_eos": True,
            "max_tokens": MADE,
            "detokenize": False,
            "output_kind": RequestOutputKind.DELTA,
            **more,
        }
    )


async def plain_run(engine: Any, tokens: list[int], name: str) -> list[float]:
    """Return the same for one plain vLLM engine."""
    start = time.perf_counter()
    times: list[float] = []
    prompt = {"type": "token", "prompt_token_ids": tokens}
    async for output in engine.generate(prompt, sampling(), name):
        times.extend([time.perf_counter() - start] * len(output.outputs[0].token_ids))
    return times


def vllm_engine(settings: VllmSettings, model: ModelFolder, transfer: dict[str, Any] | None = None) -> Any:
    """Make vLLM's engine with the same arguments, and no connector or one of its own."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(settings, model, {})
    del arguments["kv_transfer_config"]
    if transfer is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**transfer)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def measure(lengths: list[int], rounds: int, *, nixl: bool) -> None:
    """Start all engines, take turns, print medians in milliseconds and ratios to one engine."""
    model = prepare_default_model(print)
    settings = VllmSettings(model=model.path, kv_bytes=256 << 20, max_model_len=4096, prefix_caching=False)
    runs: Runs = defaultdict(list)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        nodes = [Node(Path(folder), name, settings) for name in ("left", "right")]
        for node in nodes:
            stack.push_async_callback(node.stop)
            await node.start()
        plain = await asyncio.to_thread(vllm_engine, settings, model)
        stack.callback(plain.shutdown)
        ways: dict[str, Callable[[list[int], str], Awaitable[list[float]]]] = {
            ONE: lambda tokens, name: plain_run(plain, tokens, name),
            "split": lambda tokens, _: split_run(Split(*nodes), tokens),
        }
        if nixl:
            pair = NixlPair(lambda transfer: vllm_engine(settings, model, transfer))
            await pair.start()
            stack.callback(pair.stop)
            ways["vLLM NIXL"] = lambda tokens, name: pair.run(tokens, name, sampling)
        for number in range(rounds + 1):
            for length in lengths:
                tokens = prompt(length, seed=number + 1)
                for way, run in ways.items():
                    times = await run(tokens, f"{number}-{length}")
                    if number:  # the first round warms up
                        runs[length, way].append(times)
    report(lengths, list(ways), runs)


MEASURES: dict[str, Callable[[list[float]], float]] = {
    "TTFT": lambda times: times[0],
    "first to second token": lambda times: times[1] - times[0],
    "later tokens, mean gap": lambda times: (times[-1] - times[1]) / (len(times) - 2),
    "E2E": lambda times: times[-1],
}


def report(lengths: list[int], ways: list[str], runs: Runs) -> None:
    """Print one line per prompt length and measure."""
    header = "".join(f"{way:>12} {'ratio' if way != ONE else '':>7}" for way in ways)
    print(f"{'prompt':>7} {'measure, ms':<22} {header}")
    for length in lengths:
        for name, value in MEASURES.items():
            line = ""
            one = statistics.median(1e3 * value(times) for times in runs[length, ONE])
            for way in ways:
                median = statistics.median(1e3 * value(times) for times in runs[length, way])
                ratio = f"{median / one:.3f}" if way != ONE else ""
                line += f"{median:>12.1f} {ratio:>7}"
            print(f"{length:>7} {name:<22} {line}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.hand_over", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 500, 1500])
    parser.add_argument("--nixl", action="store_true", help="vLLM's own split beside it (see peer.py)")
    chosen = parser.parse_args()
    if chosen.nixl and not nixl_is_installed():
        parser.error("--nixl needs: pip install --no-deps nixl nixl-cu12")
    asyncio.run(measure(chosen.lengths, chosen.rounds, nixl=chosen.nixl))


if __name__ == "__main__":
    main()
