"""Progress without a terminal, bars that do not go back, and lanes of the machines' picture."""

from __future__ import annotations

import io
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from splitwise.cli.progress import Steps


def test_elsewhere_than_on_a_terminal_each_end_is_one_line() -> None:
    told = io.StringIO()
    with Steps(["one", "two"], "clusters", Console(file=told)) as steps:
        steps.update("one", 3, 5)
        assert told.getvalue() == ""
        steps.update("one", 8, 0)
        steps.update("one", 8, 0)
        steps.update("two", 4, 0)
    lines = told.getvalue().splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        "one: 8 clusters simulated",
        "two: 4 clusters simulated",
    ]
    assert "1 of 2 done" in lines[0]
    assert lines[1].endswith("about 0 s left)")


def test_on_a_terminal_bars_show_the_time_left() -> None:
    told = io.StringIO()
    console = Console(file=told, force_terminal=True, width=120)
    with Steps(["Splitwise-HH", "Splitwise-HA"], "clusters", console) as steps:
        steps.update("Splitwise-HH", 5, 15)
        steps.update("Splitwise-HH", 6, 60)  # the estimate grew: the bar waits
    assert "25 %" in told.getvalue()
    assert "6 clusters simulated" in told.getvalue()
    assert "left:" in told.getvalue()


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=30), st.floats(0, 5))
def test_spans_of_a_lane_never_touch(raw: list[tuple[float, float]], label: float) -> None:
    figures = pytest.importorskip("splitwise.report.figures")
    spans = [figures._Span(number, begin, begin + length, "k") for number, (begin, length) in enumerate(raw)]
    lanes = figures._lanes(spans, label)
    assert sorted(span.request for lane in lanes for span in lane) == list(range(len(raw)))
    for lane in lanes:
        for before, after in pairwise(lane):
            assert after.begin >= before.end + label
