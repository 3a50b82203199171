"""Measuring: what is planned, how moments become samples, and that a fit finds what was measured."""

from __future__ import annotations

import pytest

from splitwise.perf.catalog import shipped
from splitwise.perf.fitting import fit, report
from splitwise.perf.model import PerformanceModelError
from splitwise.perf.profile import Plan, Sample, measure_points, sample_of


def test_a_sample_counts_only_what_all_sequences_share() -> None:
    one = [1.0, 2.0, 2.1, 2.2, 2.3, 2.4]
    late = [1.5, 2.2, 2.3, 2.4, 2.5, 2.6]
    found = sample_of(0.5, [one, late])
    assert found.prompt_seconds == 1.0
    assert found.token_seconds == pytest.approx(0.1)
    assert found.output_tokens == 6.0


def test_sequences_that_never_met_give_no_token_time() -> None:
    assert sample_of(0.0, [[1.0, 1.1, 1.2], [2.0, 2.1, 2.2]]).token_seconds == 0.0
    assert sample_of(0.0, [[1.0]]).token_seconds == 0.0


def test_tokens_that_come_together_share_their_time() -> None:
    """Two tokens in one message: the mean gap over the window is what counts."""
    assert sample_of(0.0, [[1.0, 2.0, 2.2, 2.2, 2.4, 2.4]]).token_seconds == pytest.approx(0.1)


def test_a_sequence_without_tokens_is_an_error() -> None:
    with pytest.raises(PerformanceModelError, match="got no token"):
        sample_of(0.0, [[1.0], []])


def test_the_plan_fits_the_models_context() -> None:
    sizes = Plan().sizes(1100)
    assert sizes == [(t, 1) for t in (128, 256, 512, 1024)] + [(512, b) for b in (2, 4, 8, 16, 32, 64)]
    assert Plan(output_tokens=200).sizes(500) == [(128, 1), (256, 1)]
    with pytest.raises(PerformanceModelError, match="plan shorter ones"):
        Plan().sizes(256)


async def test_the_fit_of_what_was_measured_is_what_was_there() -> None:
    truth = shipped().performance("llama2-70b", "h100-80gb")

    async def measure(prompt_tokens: int, batch: int, output_tokens: int) -> Sample:
        context = batch * (prompt_tokens + output_tokens / 2)
        return Sample(
            truth.prompt_seconds(prompt_tokens * batch, batch),
            truth.token_seconds(batch, context),
            float(output_tokens),
        )

    lines: list[str] = []
    plan = Plan(repeats=2)
    points = await measure_points(measure, plan.sizes(10_000), plan, ("m", "h", 8), progress=lines.append)
    assert len(points) == 2 * 13
    assert lines[0].startswith("[1/13] 1 x 128 prompt tokens: prompt 58")
    found = fit(points)
    assert found.name == "m|h|tp8"
    for batch in (1, 5, 64):
        assert found.token_seconds(batch, 9000) == pytest.approx(truth.token_seconds(batch, 9000), rel=1e-3)
    assert found.prompt_seconds(1500) == pytest.approx(truth.prompt_seconds(1500), rel=1e-6)
    assert found.prompt_seconds(512 * 16, 16) == pytest.approx(truth.prompt_seconds(512 * 16, 16), rel=1e-6)
    errors = report(points)
    assert errors.token is not None
    assert errors.token.repeat_noise < 1e-9
