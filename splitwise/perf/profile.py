"""Measure a running cluster and fit a performance model to it: what ``splitwise profile`` does.

    async with AsyncClient(address) as client:
        result = await profile_cluster(client, hardware="my-box", plan=Plan())
    write_profile(path, result.points, result.notes)
    save_fit(fit_path, result.model)

Each point sends one batch of equal prompts of random token ids (so that no prefix cache
helps), asks for a fixed number of tokens, and takes times at the client. The router and
the network are in the prompt times: run it where requests will come from. The cluster
must be one prompt and one token machine, without other load: with more, a batch would
spread over them.
"""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any

from splitwise.perf.fitting import FitReport, fit, report
from splitwise.perf.model import PerformanceModel, PerformanceModelError
from splitwise.perf.profiles import ProfilePoint

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from splitwise.client.aio import AsyncClient

_FIRST_ID, _LAST_ID = 1, 255  # ids that every vocabulary has, and none of them special in most


@dataclass(frozen=True, slots=True)
class Sample:
    """One batch's times. `token_seconds` is the mean time of an iteration with all sequences in it."""

    prompt_seconds: float  # start to the last sequence's first token
    token_seconds: float  # 0: the sequences were never all in the token phase at once
    output_tokens: float  # made by each sequence


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured: single prompts of several sizes, and batches of prompts of one size."""

    prompt_tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8192)
    batches: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    batch_prompt_tokens: int = 512
    output_tokens: int = 64
    repeats: int = 5
    warmups: int = 1

    def sizes(self, max_model_len: int) -> list[tuple[int, int]]:
        """(prompt tokens, batch) of every point that a model of this context length can serve."""
        room = max_model_len - self.output_tokens
        found = [(tokens, 1) for tokens in self.prompt_tokens if tokens <= room]
        if self.batch_prompt_tokens <= room:
            found += [(self.batch_prompt_tokens, batch) for batch in self.batches]
        if len([size for size in found if size[1] == 1]) < 2:
            raise PerformanceModelError(
                f"a context of {max_model_len} tokens leaves fewer than 2 of the plan's prompt sizes "
                f"{self.prompt_tokens} beside {self.output_tokens} output tokens: plan shorter ones"
            )
        return found


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """The points as measured, the model fitted to them, and how far it can be trusted."""

    points: list[ProfilePoint]
    model: PerformanceModel
    report: FitReport
    notes: dict[str, Any] = field(default_factory=dict)


async def profile_cluster(
    client: AsyncClient,
    *,
    hardware: str,
    model: str = "",
    tensor_parallel: int = 1,
    plan: Plan | None = None,
    progress: Callable[[str], None] = lambda _line: None,
) -> ProfileResult:
    """Measure the cluster's model (the only one, or `model`) and fit it.

    Raises `PerformanceModelError` when the cluster cannot be measured, and the client's errors.
    """
    plan = plan or Plan()
    name, max_model_len, machines = await _what_serves(client, model)
    measure = _through(client, name)
    sizes = plan.sizes(max_model_len)
    points = await measure_points(measure, sizes, plan, (name, hardware, tensor_parallel), progress=progress)
    source = f"measured on {', '.join(machines)} at {time.strftime('%Y-%m-%d')}"
    return ProfileResult(points, fit(points, source=source), report(points), {"source": source})


async def measure_points(
    measure: Callable[[int, int, int], Awaitable[Sample]],
    sizes: Sequence[tuple[int, int]],
    plan: Plan,
    key: tuple[str, str, int],
    *,
    progress: Callable[[str], None] = lambda _line: None,
) -> list[ProfilePoint]:
    """Measure every size `repeats` times after its warm-ups; `measure(prompt, batch, output tokens)`."""
    points = []
    for number, (tokens, batch) in enumerate(sizes, start=1):
        for _ in range(plan.warmups):
            await measure(tokens, batch, plan.output_tokens)
        samples = [await measure(tokens, batch, plan.output_tokens) for _ in range(plan.repeats)]
        points += [
            ProfilePoint(*key, tokens, batch, s.output_tokens, s.prompt_seconds, s.token_seconds)
            for s in samples
        ]
        progress(
            f"[{number}/{len(sizes)}] {batch} x {tokens} prompt tokens: "
            f"prompt {1e3 * median(s.prompt_seconds for s in samples):.1f} ms, "
            f"token {1e3 * median(s.token_seconds for s in samples):.2f} ms"
        )
    return points


async def _what_serves(client: AsyncClient, model: str) -> tuple[str, int, list[str]]:
    """Return the model's name, its context length, and the two machines."""
    models = [m for m in await client.models() if model in ("", m.name)]
    if len(models) != 1 or not models[0].serving:
        names = ", ".join(m.name for m in models) or "none"
        raise PerformanceModelError(
            f"profile one model that is being served; {model or 'all models'} gives: {names}"
        )
    chosen = models[0]
    cluster = await client.cluster()
    machines = [m for m in cluster.machines if m.model == chosen.name and m.state != "lost"]
    pools = sorted(m.home_pool for m in machines)
    if pools != ["prompt", "token"]:
        raise PerformanceModelError(
            f"profile one prompt and one token machine; {chosen.name} has {len(machines)} "
            f"({', '.join(m.machine_id for m in machines)}): a batch would spread over them"
        )
    if cluster.running or cluster.queued:
        raise PerformanceModelError(
            f"the cluster serves {cluster.running + cluster.queued} other requests: profile it idle"
        )
    return chosen.name, chosen.max_model_len, [m.machine_id for m in machines]


def _through(client: AsyncClient, model: str) -> Callable[[int, int, int], Awaitable[Sample]]:
    """Return a measurement that sends its batch through the router."""

    async def one(prompt: list[int], output_tokens: int) -> list[float]:
        stream = client.generate(
            prompt, model=model, max_tokens=output_tokens, temperature=0.0, ignore_eos=True
        )
        moments: list[float] = []
        async for chunk in stream.chunks():
            moments += [time.perf_counter()] * len(chunk.token_ids)
        return moments

    async def measure(prompt_tokens: int, batch: int, output_tokens: int) -> Sample:
        draw = random.Random()  # noqa: S311 - prompts that differ, no secret
        prompts = [[draw.randint(_FIRST_ID, _LAST_ID) for _ in range(prompt_tokens)] for _ in range(batch)]
        start = time.perf_counter()
        moments = await asyncio.gather(*(one(prompt, output_tokens) for prompt in prompts))
        return sample_of(start, moments)

    return measure


def sample_of(start: float, moments: Sequence[Sequence[float]]) -> Sample:
    """Turn the moments of each sequence's tokens into one sample.

    A token iteration counts when every sequence of the batch is in the token phase: from
    the latest second token to the earliest last token.
    """
    if not moments or not all(moments):
        raise PerformanceModelError("a sequence of the batch got no token; see the router's log")
    prompt = max(times[0] for times in moments) - start
    first = max(times[1] if len(times) > 1 else times[0] for times in moments)
    last = min(times[-1] for times in moments)
    gaps = []
    for times in moments:
        inside = [moment for moment in times[1:] if first <= moment <= last]
        if len(inside) > 1 and inside[-1] > inside[0]:
            gaps.append((inside[-1] - inside[0]) / (len(inside) - 1))
    token = median(gaps) if len(gaps) == len(moments) else 0.0
    return Sample(prompt, token, sum(map(len, moments)) / len(moments))
