"""A prompt engine, a token engine, real daemons between them: texts, corruption, cancels, lost daemons."""

from __future__ import annotations

import asyncio
import random
from typing import TYPE_CHECKING

import pytest

from services.engine.emulated import EmulatedSettings, expected_tokens

if TYPE_CHECKING:
    from tests.services.emulated.conftest import StartPair

SETTINGS = EmulatedSettings()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(SETTINGS.vocab_size) for _ in range(length)]


@pytest.mark.parametrize("nodes", [1, 2])
async def test_texts_equal_the_reference(start_pair: StartPair, nodes: int) -> None:
    """Lengths at, below and above a block and a batch; 2,100 tokens are pushed in two chunks."""
    pair = await start_pair(nodes)
    assert pair.prompt.ready["fingerprint"] == pair.token.ready["fingerprint"]
    for length in (1, 15, 16, 17, 32, 512, 2047, 2048, 2049, 2100):
        name = f"r{length}"
        pair.start(name, prompt_of(length), max_tokens=20)
        assert await pair.text(name) == expected_tokens(SETTINGS, prompt_of(length), 20)
        assert pair.token.finish[name] == "length"
    await pair.until_empty()


async def test_sixteen_at_once(start_pair: StartPair) -> None:
    pair = await start_pair()
    lengths = {f"r{i}": random.Random(i).randrange(1, 1500) for i in range(16)}
    for name, length in lengths.items():
        pair.start(name, prompt_of(length), max_tokens=64)
    texts = await asyncio.gather(*map(pair.text, lengths))
    for (name, length), text in zip(lengths.items(), texts, strict=True):
        assert text == expected_tokens(SETTINGS, prompt_of(length), 64), name
    await pair.until_empty()


async def test_more_than_the_token_machine_holds(start_pair: StartPair) -> None:
    """Requests wait for blocks, are preempted and recompute; every text stays right."""
    pair = await start_pair(kv_blocks=40, max_running=8)
    names = [f"r{i}" for i in range(10)]
    for index, name in enumerate(names):
        pair.start(name, prompt_of(100, index), max_tokens=150)
    texts = await asyncio.gather(*map(pair.text, names))
    for index, text in enumerate(texts):
        assert text == expected_tokens(SETTINGS, prompt_of(100, index), 150)
    assert (await pair.token.ask(do="load"))["preemptions"] > 0
    await pair.until_empty()


async def test_sampling_with_a_seed(start_pair: StartPair) -> None:
    pair = await start_pair(1)
    texts = []
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        pair.start(name, prompt_of(40), max_tokens=12, temperature=1.0, seed=seed)
        texts.append(await pair.text(name))
    assert texts[0] == texts[1] == expected_tokens(SETTINGS, prompt_of(40), 12, seed=7)
    assert texts[2] == expected_tokens(SETTINGS, prompt_of(40), 12, seed=8) != texts[0]


@pytest.mark.parametrize("nodes", [1, 2])
async def test_a_flipped_byte_changes_the_text(start_pair: StartPair, nodes: int) -> None:
    pair = await start_pair(nodes, time_scale=0.2)
    prompt = prompt_of(200)
    pair.start("r", prompt, max_tokens=120)
    await pair.token.has_tokens("r", 20)
    before = len(pair.token.texts["r"])
    await pair.token.ask(do="flip", at=SETTINGS.token_bytes_per_layer * 3 + 5)  # block 0, token 3, layer 0
    text, right = await pair.text("r"), expected_tokens(SETTINGS, prompt, 120)
    same = next(index for index in range(120) if text[index] != right[index])
    assert before < same < 120
    assert not set(text[same:]) <= set(right[same:])
    await pair.until_empty()


async def test_the_first_token_may_end_the_request(start_pair: StartPair) -> None:
    pair = await start_pair()
    first = expected_tokens(SETTINGS, prompt_of(50), 1)[0]
    pair.start("r", prompt_of(50), max_tokens=30, stop_token_ids=[first])
    assert (await pair.prompt.end("r"))["event"] == "over"
    assert pair.prompt.texts["r"] == [first]
    assert pair.prompt.finish["r"] == "stop"
    assert (await pair.token.end("r"))["event"] == "failed"
    await pair.until_empty()


async def test_ends_and_minimum_lengths(start_pair: StartPair) -> None:
    settings = EmulatedSettings(eos_probability=0.1)
    pair = await start_pair(1, eos_probability=0.1)
    for index in range(8):
        prompt = prompt_of(30, index)
        pair.start(f"r{index}", prompt, max_tokens=60, min_tokens=4)
        right = expected_tokens(settings, prompt, 60, min_tokens=4)
        assert await pair.text(f"r{index}") == right
        assert pair.token.finish[f"r{index}"] == ("stop" if len(right) < 60 else "length")
        pair.start(f"i{index}", prompt, max_tokens=60, ignore_eos=True)
        assert await pair.text(f"i{index}") == expected_tokens(settings, prompt, 60, ignore_eos=True)


async def test_cancelling_anywhere_gives_everything_back(start_pair: StartPair) -> None:
    """Either side or both, at moments from before the prompt to well into the text."""
    pair = await start_pair(time_scale=0.3)
    draw = random.Random(5)
    moments = [0.0, 0.001, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2]
    for round_number, sides in enumerate(["both", "prompt", "token"]):
        names = [f"{round_number}-{index}" for index in range(len(moments))]
        for name in names:
            pair.start(name, prompt_of(draw.randrange(10, 1500)), max_tokens=200, lease_ms=3000)

        async def cancel(name: str, moment: float, sides: str) -> None:
            await asyncio.sleep(moment)
            if sides in ("both", "prompt"):
                pair.prompt.tell(do="cancel", name=name)
            if sides in ("both", "token"):
                pair.token.tell(do="cancel", name=name)

        await asyncio.gather(*(cancel(n, m, sides) for n, m in zip(names, moments, strict=True)))
        for name in names:
            prompt_end, token_end = await asyncio.gather(pair.prompt.end(name), pair.token.end(name))
            assert prompt_end["event"] in ("over", "cancelled")
            assert token_end["event"] in ("over", "cancelled", "failed")
        await pair.until_empty()
    pair.start("after", prompt_of(300), max_tokens=20)
    assert await pair.text("after") == expected_tokens(SETTINGS, prompt_of(300), 20)


@pytest.mark.parametrize("side", ["prompt", "token"])
async def test_a_killed_daemon_fails_its_transfers_and_serves_again(start_pair: StartPair, side: str) -> None:
    pair = await start_pair(time_scale=1.0)
    daemon = getattr(pair, side).daemon
    texts = {}
    for index in range(6):
        texts[f"r{index}"] = prompt_of(1200, index)
        pair.start(f"r{index}", texts[f"r{index}"], max_tokens=40)
    await pair.prompt.has_tokens("r1", 1)  # some are over, some on their way, some not begun
    await daemon.kill()
    for name, prompt in texts.items():
        end = await pair.token.end(name)
        assert end["event"] in ("over", "failed"), end
        assert (await pair.prompt.end(name))["event"] == "over"
        right = expected_tokens(SETTINGS, prompt, 40)
        made = pair.prompt.texts[name] + pair.token.texts[name]
        assert made == (right if end["event"] == "over" else right[:1])
    await pair.until_empty()
    await daemon.start()
    await asyncio.gather(pair.prompt.until_attached(), pair.token.until_attached())
    pair.start("again", prompt_of(500), max_tokens=20)
    assert await pair.text("again") == expected_tokens(SETTINGS, prompt_of(500), 20)
    await pair.until_empty()


async def test_a_source_that_never_comes_is_given_up_by_its_lease(start_pair: StartPair) -> None:
    pair = await start_pair()
    pair.token.work(
        "token",
        "r",
        tokens=prompt_of(40),
        sampling={"max_tokens": 5, "temperature": 0.0},
        transfer="ab" * 16,
        source_kvd=pair.prompt.daemon.address,
        source_engine="p",
        lease_ms=500,
    )
    assert (await pair.token.end("r"))["event"] == "failed"
    await pair.until_empty()


async def test_work_that_can_never_run_is_refused_before_anything_is_held(start_pair: StartPair) -> None:
    pair = await start_pair(1, max_model_len=100, kv_blocks=5)
    wrong = {
        "long": ({"tokens": prompt_of(100)}, {}, "100 tokens; the prompt must have 1 to 99"),
        "empty": ({"tokens": []}, {}, "0 tokens"),
        "vocabulary": ({"tokens": [1, 32_000]}, {}, r"token_ids[1]: 32000"),
        "memory": ({"tokens": prompt_of(50)}, {"max_tokens": 40}, "do not fit 80 tokens of KV memory"),
        "bias": ({"tokens": [1]}, {"logit_bias": {5: 1.0}}, "sampling.logit_bias"),
        "penalty": ({"tokens": [1]}, {"presence_penalty": 0.5}, "sampling.presence_penalty"),
    }
    for name, (work, sampling, message) in wrong.items():
        sampling = {"max_tokens": 2, "temperature": 0.0} | sampling
        pair.prompt.work("prompt", name, sampling=sampling, transfer="cd" * 16, **work)
        end = await pair.prompt.end(name)
        assert end["kind"] == "WorkRefusedError", end
        assert message in end["message"]
    await pair.until_empty()


async def test_one_machine_may_run_both_phases(start_pair: StartPair) -> None:
    """The router's last resort: source and destination of a transfer are the same engine."""
    pair = await start_pair(1, kv_blocks=64, max_model_len=400)
    engine = pair.prompt
    for index in range(6):
        work = {"tokens": prompt_of(300, index), "transfer": f"{index:032x}"}
        sampling = {"max_tokens": 20, "temperature": 0.0}
        source = {"source_kvd": engine.daemon.address, "source_engine": engine.name}
        engine.work("token", f"t{index}", sampling=sampling, **work, **source)
        engine.work("prompt", f"p{index}", sampling=sampling, **work)
    for index in range(6):
        ends = await asyncio.gather(engine.end(f"p{index}"), engine.end(f"t{index}"))
        assert [end["event"] for end in ends] == ["over", "over"], ends
        text = engine.texts[f"p{index}"] + engine.texts[f"t{index}"]
        assert text == expected_tokens(SETTINGS, prompt_of(300, index), 20)
    await engine.until_empty()


async def test_prefix_caches_on_both_sides(start_pair: StartPair) -> None:
    """Blocks that the token side has are not sent; texts are the same."""
    pair = await start_pair(2, prefix_caching=True)
    prompt = prompt_of(700)
    for name, text in (("a", prompt), ("b", prompt), ("c", [*prompt[:330], 5, 6, 7]), ("d", prompt[:40])):
        pair.start(name, text, max_tokens=20)
        assert await pair.text(name) == expected_tokens(SETTINGS, text, 20)
    cached = {name: pair.prompt.cached[name] for name in "abcd"}
    assert cached == {"a": 0, "b": 43 * 16, "c": 20 * 16, "d": 2 * 16}
    await pair.until_empty()
