"""Caps as they are written, and what they come to on a device."""

from __future__ import annotations

import pytest

from splitwise.power import Cap, Caps, GpuRange, Role

H100 = GpuRange(floor=200, highest=700, default=700, previous=700)


@pytest.mark.parametrize(
    ("text", "cap", "shown"),
    [
        ("none", Cap(), "none"),
        ("None", Cap(), "none"),
        ("50%", Cap(fraction=0.5), "50%"),
        ("62.5 %", Cap(fraction=0.625), "62.5%"),
        ("100%", Cap(fraction=1.0), "100%"),
        ("350W", Cap(watts=350.0), "350W"),
        ("350 w", Cap(watts=350.0), "350W"),
    ],
)
def test_what_can_be_written(text: str, cap: Cap, shown: str) -> None:
    assert Cap.parse(text) == cap
    assert str(cap) == shown
    assert Cap.parse(shown) == cap


@pytest.mark.parametrize("text", ["", "50", "0%", "0W", "-5W", "half", "350 kW", "1e3W", "50%%"])
def test_what_cannot(text: str) -> None:
    with pytest.raises(ValueError, match=r"write none, a share such as 50%, or watts such as 350W"):
        Cap.parse(text)


def test_more_than_everything() -> None:
    with pytest.raises(ValueError, match="at most 100%"):
        Cap.parse("101%")


def test_the_paper_s_rule_is_the_default() -> None:
    caps = Caps()
    assert H100.limit(caps.of(Role.TOKEN)) == 350
    assert H100.limit(caps.of(Role.PROMPT)) == 700
    assert H100.limit(caps.of(Role.MIXED)) == 700


def test_a_borrowed_machine_has_no_cap_whatever_is_set() -> None:
    caps = Caps(prompt=Cap(watts=300), token=Cap(watts=300), mixed=Cap(watts=300))
    assert H100.limit(caps.of(Role.BORROWED)) == 700
    assert H100.limit(caps.of(Role.MIXED)) == 300


def test_limits_stay_in_the_device_s_range() -> None:
    assert H100.limit(Cap(watts=50)) == 200
    assert H100.limit(Cap(watts=5000)) == 700


def test_nothing_goes_above_what_was_there_before() -> None:
    lowered = GpuRange(floor=200, highest=700, default=700, previous=500)
    assert lowered.limit(Cap()) == 500
    assert lowered.limit(Cap(watts=600)) == 500
    assert lowered.limit(Cap(fraction=0.5)) == 350  # of the default, not of what was there


def test_a_previous_limit_outside_the_range_is_brought_into_it() -> None:
    assert GpuRange(200, 700, 700, previous=0).ceiling == 200
    assert GpuRange(200, 700, 700, previous=900).ceiling == 700
