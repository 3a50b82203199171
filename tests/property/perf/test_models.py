"""What must hold for every performance model, not only for the shipped ones."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from splitwise.perf import kernels
from splitwise.perf.catalog import shipped
from splitwise.perf.link import LinkModel
from splitwise.perf.model import Curve, PerformanceModel

SHIPPED = sorted(shipped().fits)


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    steps = draw(st.lists(st.integers(1, 2000), min_size=1, max_size=kernels.KNOTS))
    rises = draw(st.lists(st.floats(0.0, 1.0), min_size=len(steps), max_size=len(steps)))
    start = draw(st.floats(1e-3, 1.0))
    return Curve.of(np.cumsum(steps), start + np.cumsum(rises))


@st.composite
def models(draw: st.DrawFn) -> PerformanceModel:
    return PerformanceModel(
        "m",
        "h",
        1,
        draw(curves()),
        draw(curves()),
        draw(curves()),
        draw(st.floats(0.0, 1e-4)),
        many_unit=float(draw(st.integers(1, 1024))),
    )


@given(models(), st.integers(1, 300), st.integers(0, 100_000), st.floats(0.0, 1e3))
def test_counting_iterations_inverts_their_time(
    model: PerformanceModel, sequences: int, context: int, seconds: float
) -> None:
    row = model.row()
    count = kernels.token_run_iterations(row, float(sequences), float(context), seconds)
    assert count >= 0
    if count:
        assert kernels.token_run_seconds(row, float(sequences), float(context), float(count)) <= seconds
    assert kernels.token_run_seconds(row, float(sequences), float(context), count + 1.0) > seconds


@given(models(), st.integers(1, 50_000), st.integers(1, 400))
def test_prompt_time_lies_between_its_two_curves(
    model: PerformanceModel, tokens: int, sequences: int
) -> None:
    row = model.row()
    single = model.prompt_seconds(tokens, 1)
    x = max(float(tokens), row[kernels.PROMPT_MANY_X])
    many = kernels.line_through(
        row, kernels.PROMPT_MANY_X, kernels.PROMPT_MANY_Y, int(row[kernels.PROMPT_MANY_KNOTS]), x
    )
    found = model.prompt_seconds(tokens, sequences)
    slack = 1e-9 * max(single, many)
    assert min(single, many) - slack <= found <= max(single, many) + slack


@given(curves(), st.data())
def test_a_curve_meets_its_points_and_stays_between_neighbours(curve: Curve, data: st.DataObject) -> None:
    model = PerformanceModel("m", "h", 1, curve, curve, curve, 0.0)
    index = data.draw(st.integers(0, len(curve.x) - 1))
    assert abs(model.prompt_seconds(curve.x[index]) - curve.y[index]) <= 1e-9 * curve.y[index]
    if index + 1 < len(curve.x):
        middle = (curve.x[index] + curve.x[index + 1]) / 2
        assert curve.y[index] - 1e-9 <= model.prompt_seconds(middle) <= curve.y[index + 1] + 1e-9


@given(models())
def test_models_survive_plain_data(model: PerformanceModel) -> None:
    assert PerformanceModel.from_dict(model.to_dict()) == model


@given(
    st.sampled_from(SHIPPED),
    st.integers(1, 30_000),
    st.integers(1, 64),
    st.integers(1, 64),
    st.integers(0, 40_000),
)
def test_shipped_times_are_positive_and_a_mixed_iteration_is_the_longest(
    name: str, tokens: int, prompts: int, sequences: int, context: int
) -> None:
    model = shipped().fits[name]
    prompt, token = model.prompt_seconds(tokens, prompts), model.token_seconds(sequences, context)
    mixed = model.mixed_seconds(tokens, prompts, sequences, context)
    assert 0.0 < prompt < 60.0
    assert 0.0 < token < 2.0
    assert mixed >= token
    if tokens >= 1024:  # below, the published prompt times are not monotonous
        assert mixed >= prompt


@given(
    st.floats(1.0, 1e11),
    st.integers(1, 200),
    st.floats(1e-3, 100.0),
    st.floats(1e6, 1e12),
    st.floats(1.0, 64.0),
)
def test_a_layerwise_transfer_ends_no_earlier_than_its_last_layer_can(
    size: float, layers: int, prompt: float, rate: float, sharing: float
) -> None:
    link = LinkModel(rate, latency=0.0)
    seen = link.exposed_seconds(size, prompt, layers=layers, layerwise=True, sharing=sharing)
    whole = link.transfer_seconds(size, sharing=sharing)
    assert seen >= whole / layers * (1 - 1e-9)
    assert seen >= (whole + prompt / layers - prompt) * (1 - 1e-9) - 1e-9
    assert seen <= whole * (1 + 1e-9) + 1e-9
