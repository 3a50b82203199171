"""KV transfers in `faithful` mode: links that are shared, and layers that hide behind the prompt.

Every machine has one link with two directions; each carries one transfer after another at
the slower end's speed. A prompt above the threshold is pushed layer by layer: its transfer
begins when the first layer is computed and ends at the earliest one layer's time after the
prompt (Splitwise paper, section IV-C); below it the whole cache follows the prompt.
"""

from __future__ import annotations

from splitwise.scheduling.batching import KNOWN, TAKEN
from splitwise.sim.compiled import compiled
from splitwise.sim.job import (
    BEGAN,
    COMPUTING,
    ENDS,
    HAND_OVER_SECONDS,
    LAYERS,
    LINK,
    PROMPT_STAGE,
    PROMPTS,
    RECEIVES_FROM,
    RUN_PROMPTS,
    SENDS_FROM,
    SERIALIZED_BELOW,
    TOKEN_BYTES,
    TOKEN_STAGE,
    VISIBLE,
)
from splitwise.sim.job import RESERVED as TOKEN_RESERVED
from splitwise.sim.world import BYTES_SENT, LINK_BUSY, RECEIVED, TOKEN_MACHINE, World


@compiled
def layerwise(world: World, tokens: int) -> bool:
    """Whether a prompt of this length is pushed layer by layer."""
    return bool(tokens >= world.setup[SERIALIZED_BELOW])


@compiled
def _occupy(world: World, source: int, target: int, ready: float, size: int) -> tuple[float, float]:
    """Take the links' next free stretch; returns when it ends and the bytes per second."""
    real = world.real
    speed = min(real[LINK, source], real[LINK, target])
    begin = max(ready, max(real[SENDS_FROM, source], real[RECEIVES_FROM, target]))
    end = begin + size / speed
    real[SENDS_FROM, source] = real[RECEIVES_FROM, target] = end
    world.stats[source, BYTES_SENT] += size
    world.stats[source, LINK_BUSY] += size / speed
    return end, speed


@compiled
def push_after(world: World, source: int, job: int, tokens: int, now: float) -> None:
    """Send the KV cache of `tokens` tokens now that the prompt is computed."""
    target = world.places[job, TOKEN_MACHINE]
    end, _ = _occupy(world, source, target, now, tokens * world.setup[TOKEN_BYTES])
    world.times[job, RECEIVED] = end + world.rates[HAND_OVER_SECONDS]


@compiled
def push_along(world: World, machine: int) -> None:
    """Plan the layer-wise transfers of what a machine begins to compute, chunk by chunk."""
    began, ends = world.real[BEGAN, machine], world.real[ENDS, machine]
    layers = world.setup[LAYERS]
    for place in range(world.whole[RUN_PROMPTS, machine]):
        job = world.items[PROMPTS, machine, place]
        target = world.places[job, TOKEN_MACHINE]
        prompt = world.jobs[job, PROMPT_STAGE] == COMPUTING
        remote = target != machine and world.jobs[job, TOKEN_STAGE] == TOKEN_RESERVED
        if not (prompt and remote and layerwise(world, world.jobs[job, KNOWN])):
            continue
        size = world.jobs[job, TAKEN] * world.setup[TOKEN_BYTES]
        end, speed = _occupy(world, machine, target, began + (ends - began) / layers, size)
        end = max(end, ends + size / layers / speed)
        world.times[job, RECEIVED] = end + world.real[VISIBLE, machine] + world.rates[HAND_OVER_SECONDS]
