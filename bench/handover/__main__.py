"""What the hand-over costs: the same requests split over two engines and on one, in turns.

    python -m bench.handover --rounds 7 --lengths 100 500 1500

The paper calls the gap between first and second token the visible transfer latency; one
decode step is its floor. Medians over rounds, both kinds in the same run, so that the ratio
holds although the times depend on the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from services.engine.vllm import VllmSettings
from services.engine.vllm.launch import engine_arguments
from splitwise.models import ModelFolder, prepare_default_model
from tests.vllm.harness import Node, Split, greedy, prompt

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from services.engine.interface import TokenOutput

MADE = 16


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


async def plain_run(engine: Any, tokens: list[int], name: str) -> list[float]:
    """Return the same for one plain vLLM engine."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0,
        ignore_eos=True,
        max_tokens=MADE,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    start = time.perf_counter()
    times: list[float] = []
    async for output in engine.generate({"type": "token", "prompt_token_ids": tokens}, sampling, name):
        times.extend([time.perf_counter() - start] * len(output.outputs[0].token_ids))
    return times


def plain_engine(settings: VllmSettings, model: ModelFolder) -> Any:
    """Make vLLM's engine with the same arguments and no connector."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = engine_arguments(settings, model, {})
    del arguments["kv_transfer_config"]
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def measure(lengths: list[int], rounds: int) -> None:
    """Start three engines, take turns, print medians in milliseconds and ratios split to one engine."""
    model = prepare_default_model(print)
    settings = VllmSettings(model=model.path, kv_bytes=256 << 20, max_model_len=4096, prefix_caching=False)
    runs: dict[tuple[int, str], list[list[float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        nodes = [Node(Path(folder), name, settings) for name in ("left", "right")]
        try:
            for node in nodes:
                await node.start()
            split = Split(*nodes)
            plain = await asyncio.to_thread(plain_engine, settings, model)
            for number in range(rounds + 1):
                for length in lengths:
                    tokens = prompt(length, seed=number + 1)
                    one = await plain_run(plain, tokens, f"plain-{number}-{length}")
                    two = await split_run(split, tokens)
                    if number:  # the first round warms up
                        runs[length, "one engine"].append(one)
                        runs[length, "split"].append(two)
            plain.shutdown()
        finally:
            for node in nodes:
                await node.stop()
    report(lengths, runs)


def report(lengths: list[int], runs: dict[tuple[int, str], list[list[float]]]) -> None:
    """Print one line per prompt length and measure."""
    print(f"{'prompt':>7} {'measure':<22} {'one engine':>11} {'split':>9} {'ratio':>7}")
    measures: dict[str, Callable[[list[float]], float]] = {
        "TTFT": lambda times: times[0],
        "first to second token": lambda times: times[1] - times[0],
        "later tokens, mean gap": lambda times: (times[-1] - times[1]) / (len(times) - 2),
        "E2E": lambda times: times[-1],
    }
    for length in lengths:
        for name, value in measures.items():
            one, two = (
                statistics.median(1e3 * value(times) for times in runs[length, kind])
                for kind in ("one engine", "split")
            )
            print(f"{length:>7} {name:<22} {one:>11.1f} {two:>9.1f} {two / one:>7.3f}")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[100, 500, 1500])
    chosen = parser.parse_args()
    asyncio.run(measure(chosen.lengths, chosen.rounds))


if __name__ == "__main__":
    main()
