"""The formulas: known values, and the same numbers compiled and as plain Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from splitwise.perf import kernels
from splitwise.perf.catalog import shipped
from splitwise.perf.model import Curve, PerformanceModel

MODEL = PerformanceModel(
    model="m",
    hardware="h",
    tensor_parallel=1,
    prompt_single=Curve((100.0, 200.0, 1600.0), (0.1, 0.15, 0.85)),
    prompt_many=Curve((100.0, 200.0, 1600.0), (0.1, 0.15, 1.25)),
    token=Curve((1.0, 2.0, 4.0), (0.02, 0.03, 0.04)),
    context_seconds=1e-6,
    many_unit=200.0,
)

SWEEP = """
import json
import numpy as np
from splitwise.perf import kernels
from splitwise.perf.catalog import shipped
out = []
for name in sorted(shipped().fits):
    row = shipped().fits[name].row()
    for tokens in (1.0, 100.0, 512.0, 1500.0, 2048.0, 9000.0, 60000.0):
        for sequences in (1.0, 2.0, 3.0, 17.0, 64.0, 200.0):
            out.append(kernels.prompt_seconds(row, tokens, sequences))
            out.append(kernels.token_seconds(row, sequences, tokens))
            out.append(kernels.mixed_seconds(row, tokens, 2.0, sequences, tokens * 3))
            out.append(kernels.token_run_seconds(row, sequences, tokens, 40.0))
            out.append(kernels.token_run_iterations(row, sequences, tokens, 3.3))
            out.append(kernels.compat_token_seconds(row, sequences))
            out.append(kernels.compat_mixed_seconds(row, tokens, sequences))
        out.append(kernels.compat_prompt_seconds(row, tokens))
print(json.dumps([float(value).hex() for value in out]))
"""


def sweep(*, jit: bool) -> list[float]:
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "0" if jit else "1"}
    done = subprocess.run(
        [sys.executable, "-c", SWEEP], env=environment, capture_output=True, check=True, text=True
    )
    return [float.fromhex(value) for value in json.loads(done.stdout)]


def test_compiled_and_plain_python_agree() -> None:
    compiled, plain = sweep(jit=True), sweep(jit=False)
    assert len(compiled) == len(plain) == len(shipped().fits) * 7 * (6 * 7 + 1)
    assert np.allclose(compiled, plain, rtol=1e-9, atol=0.0)


def test_plain_python_does_not_load_numba() -> None:
    code = "import sys; from splitwise.perf.catalog import shipped; shipped(); print('numba' in sys.modules)"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, check=True, text=True
    )
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("tokens", "sequences", "seconds"),
    [
        (100, 1, 0.1),
        (150, 1, 0.125),
        (10, 1, 0.1),  # the weights are read however short the prompt is
        (3000, 1, 1.55),  # beyond the last point: its slope goes on
        (1600, 8, 1.25),  # 8 of 200: the curve of many
        (1600, 1, 0.85),
        (1600, 64, 1.25),  # more and shorter ones: not beyond the curve of many
        (150, 2, 0.125),  # below one unit there is only one curve
        (0, 0, 0.0),
    ],
)
def test_prompt_time(tokens: float, sequences: float, seconds: float) -> None:
    assert MODEL.prompt_seconds(tokens, sequences) == pytest.approx(seconds, rel=1e-12)


def test_prompt_time_blends_by_the_logarithm_of_the_sequences() -> None:
    between = MODEL.prompt_seconds(1600, 2)  # log(2) / log(8) = 1/3 of the way
    assert between == pytest.approx(0.85 + (1.25 - 0.85) / 3, rel=1e-12)


@pytest.mark.parametrize(
    ("sequences", "context", "seconds"),
    [(1, 0, 0.02), (3, 0, 0.035), (8, 0, 0.06), (2, 10_000, 0.04), (0, 0, 0.0)],
)
def test_token_time(sequences: float, context: float, seconds: float) -> None:
    assert MODEL.token_seconds(sequences, context) == pytest.approx(seconds, rel=1e-12)


def test_mixed_time() -> None:
    assert MODEL.mixed_seconds(148, 1, 2, 1000) == pytest.approx(1.1 * 0.125 + 0.001, rel=1e-12)
    assert MODEL.mixed_seconds(0, 0, 2, 1000) == MODEL.token_seconds(2, 1000)
    assert MODEL.mixed_seconds(148, 1, 0, 0) == MODEL.prompt_seconds(148, 1)
    assert MODEL.mixed_seconds(1, 1, 4, 10**6) >= MODEL.token_seconds(4, 10**6)


def test_a_run_of_iterations_is_the_sum_of_them() -> None:
    row, sequences, context = MODEL.row(), 3.0, 500.0
    total = sum(kernels.token_seconds(row, sequences, context + sequences * i) for i in range(77))
    assert kernels.token_run_seconds(row, sequences, context, 77.0) == pytest.approx(total, rel=1e-12)


def test_rows_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        MODEL.row()[0] = 1.0
