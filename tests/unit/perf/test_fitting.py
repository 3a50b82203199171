"""Fits: known truth is recovered, the published profile is met on held-out points."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from splitwise.perf.catalog import shipped
from splitwise.perf.fitting import compat_table, fit, groups, report
from splitwise.perf.model import PerformanceModelError
from splitwise.perf.profiles import ProfilePoint, read_csv

PUBLISHED = Path(__file__).parents[4] / "shared" / "data" / "splitwise_sim_perf_model.csv"
published = pytest.mark.skipif(not PUBLISHED.exists(), reason=f"the authors' profile is not at {PUBLISHED}")


def prompt_truth(tokens: int, batch: int) -> float:
    return 0.03 + 1e-4 * tokens * batch * (1.2 if batch > 1 else 1.0)


def token_truth(batch: int, context: float) -> float:
    return 0.02 + 0.0005 * batch + 3e-7 * context


def made_up(*, noise: float = 0.0, seed: int = 1) -> list[ProfilePoint]:
    draw = random.Random(seed)
    sizes = [(tokens, 1) for tokens in (128, 256, 512, 1024, 2048, 4096, 8192)]
    sizes += [(512, batch) for batch in (2, 4, 8, 16, 32, 64)]
    points = []
    for tokens, batch in sizes:
        for _ in range(5):
            point = ProfilePoint("m", "h", 8, tokens, batch, 128.0, prompt_truth(tokens, batch), 1.0)
            seconds = token_truth(batch, point.mean_context)
            factor = 1.0 + draw.uniform(-noise, noise)
            points.append(
                replace(point, token_seconds=seconds * factor, prompt_seconds=point.prompt_seconds * factor)
            )
    return points


def test_known_truth_is_recovered() -> None:
    model = fit(made_up())
    assert model.context_seconds == pytest.approx(3e-7, rel=1e-6)
    for batch in (1, 3, 24, 64):
        assert model.token_seconds(batch, 5000) == pytest.approx(token_truth(batch, 5000), rel=1e-6)
    assert model.prompt_seconds(3000, 1) == pytest.approx(prompt_truth(3000, 1), rel=1e-9)
    assert model.prompt_seconds(512 * 24, 24) == pytest.approx(prompt_truth(512, 24), rel=1e-9)


def test_the_held_out_error_is_that_of_the_noise() -> None:
    quiet, loud = report(made_up(noise=0.01)), report(made_up(noise=0.10))
    assert quiet.token is not None
    assert loud.token is not None
    assert quiet.prompt.mean < 1.0 < 3.0 < loud.prompt.mean
    assert quiet.token.mean < 1.0 < 3.0 < loud.token.mean


def test_a_wrong_shape_shows_in_the_held_out_error() -> None:
    """Times that depend on something the model does not know cannot be met."""
    points = [
        replace(p, token_seconds=p.token_seconds * (1.5 if i % 2 else 1.0)) for i, p in enumerate(made_up())
    ]
    found = report(points).token
    assert found is not None
    assert found.mean > 10.0


def test_runs_cut_short_are_left_out_and_named() -> None:
    points = made_up()
    broken = [replace(p, prompt_seconds=p.prompt_seconds / 10) if p.batch == 64 else p for p in points]
    found = report(broken)
    assert len(found.left_out) == 1
    assert found.left_out[0].startswith("64 x 512 prompt tokens")
    assert fit(broken).prompt_many.x[-1] == 512 * 32


def test_two_minds_at_one_context_are_named() -> None:
    points = made_up()
    doubted = [
        replace(p, output_tokens=140.0, token_seconds=p.token_seconds * 1.2) if i % 5 == 0 else p
        for i, p in enumerate(points)
    ]
    assert not report(points).warnings
    assert any("jump by 20 %" in line for line in report(doubted).warnings)


def test_of_two_sweeps_that_disagree_the_one_over_the_sizes_is_kept() -> None:
    points = made_up()
    # A second sweep at batch 1, over output lengths, on a machine that is 10 % slower.
    slower = [
        replace(p, output_tokens=float(tokens), token_seconds=1.1 * token_truth(1, 512 + tokens / 2))
        for p in points[:1]
        for p in (replace(p, prompt_tokens=512, prompt_seconds=prompt_truth(512, 1)),)
        for tokens in (200, 300, 400, 600)
    ]
    alone, both = fit(points), fit([*points, *slower])
    assert both.context_seconds == pytest.approx(alone.context_seconds, rel=1e-6)
    assert both.token.y == pytest.approx(alone.token.y, rel=1e-6)
    left_out = report([*points, *slower]).left_out
    assert len(left_out) == 1
    assert left_out[0].startswith("token times of 4 runs at batch 1 with other than about 128 output tokens")


def test_what_was_not_measured_is_said() -> None:
    model = fit(made_up())
    assert model.extrapolates(prompt_tokens=500, sequences=64) == []
    assert model.extrapolates(sequences=65) == ["sequences=65 lies outside the measured 1 to 64"]
    assert any("1 to 64 sequences" in line for line in report(made_up()).extrapolated)
    holes = [p for p in made_up() if p.batch not in (4, 8, 16, 64)]
    told = report(holes).extrapolated
    assert "everything outside 1 to 32 sequences in the token phase" in told
    assert any(line.startswith("batches between 2 and 32 sequences: a straight line") for line in told)
    assert not any("straight line" in line for line in report(made_up()).extrapolated)
    prompts_only = [replace(p, token_seconds=0.0) for p in made_up()]
    assert report(prompts_only).token is None
    assert "not measured" in "\n".join(report(prompts_only).lines())


def test_more_sizes_than_a_curve_holds_are_thinned() -> None:
    points = [
        ProfilePoint("m", "h", 1, tokens, 1, 128.0, prompt_truth(tokens, 1), 0.02)
        for tokens in range(64, 64 * 61, 64)
    ]
    model = fit(points)
    assert len(model.prompt_single.x) == 16
    assert (model.prompt_single.x[0], model.prompt_single.x[-1]) == (64.0, 3840.0)
    assert model.prompt_seconds(1000) == pytest.approx(prompt_truth(1000, 1), rel=1e-9)


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "empty"),
        (made_up()[:3], "at least 2 are needed"),
        ([p for p in made_up() if p.batch > 1], "at batch 1"),
        (
            [replace(p, token_seconds=0.0) if p.batch == 1 else p for p in made_up()],
            "no token times at batch 1",
        ),
        ([*made_up(), replace(made_up()[0], hardware="other")], "2 models or machines in one fit"),
    ],
)
def test_profiles_that_cannot_carry_a_model(points: list[ProfilePoint], message: str) -> None:
    with pytest.raises(PerformanceModelError, match=message):
        fit(points)


@published
def test_the_published_profile_is_met_on_held_out_points() -> None:
    """Prompt below 4 %, token below 2 %; where two sweeps disagree, what is left out is named."""
    for key, points in groups(read_csv(PUBLISHED)).items():
        found = report(points, splits=50)
        assert found.prompt.mean < 4.0, found.lines()
        assert found.token is not None
        assert found.token.mean < 2.0, found.lines()
        named = any("token times of 31 runs at batch 1" in line for line in found.left_out)
        assert named is (key == ("llama2-70b", "a100-80gb", 2))


@published
def test_the_shipped_models_are_the_fit_of_the_published_profile() -> None:
    fits = shipped().fits
    as_published = groups(read_csv(PUBLISHED, repeated_rows=True))
    for key, points in groups(read_csv(PUBLISHED)).items():
        if key[1] == "h100-80gb-pcap":
            continue
        model = fit(points)
        shipped_model = fits[model.name]
        assert shipped_model.token.y == pytest.approx(model.token.y, rel=1e-6)
        assert shipped_model.prompt_many == model.prompt_many
        assert shipped_model.compat == compat_table(as_published[key])


@published
def test_the_derived_capped_h100_equals_its_published_rows() -> None:
    for key, points in groups(read_csv(PUBLISHED, repeated_rows=True)).items():
        if key[1] != "h100-80gb-pcap":
            continue
        table = compat_table(points)
        derived = shipped().performance(*key).compat
        assert derived is not None
        assert derived.prompt.y == pytest.approx(table.prompt.y, rel=1e-9)
        assert derived.token.y == pytest.approx(table.token.y, rel=1e-9)
