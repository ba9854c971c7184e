"""Sparklines and the trail they are drawn from: any numbers, any length, a bounded room."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from gradilocks.cli.sparklines import BARS, PLAIN_BARS, Trail, mean, sparkline

numbers = st.none() | st.floats(allow_nan=False, allow_infinity=False)


def test_the_least_is_the_lowest_bar_and_the_greatest_the_highest():
    assert sparkline([1.0, 2.0, None, 8.0], width=10) == "▁▂ █"
    assert sparkline([3.0, 1.0], width=10, bars=PLAIN_BARS) == "@_"


def test_equal_numbers_and_no_numbers_are_drawn_too():
    assert sparkline([2.0, 2.0], width=5) == "▁▁"
    assert sparkline([None, None], width=5) == "  "
    assert sparkline([], width=5) == ""


def test_numbers_that_differ_by_rounding_are_a_flat_line():
    assert sparkline([0.1, 0.1 + 1e-9, 0.1 - 1e-9], width=5) == "▁▁▁"
    assert set(sparkline([0.1] * 1001, width=7)) == {"▁"}


def test_more_numbers_than_places_are_averaged():
    assert sparkline([0.0] * 50 + [10.0] * 50, width=4) == "▁▁██"


@given(st.lists(numbers, max_size=40), st.integers(1, 12))
def test_any_numbers_make_a_line_of_bars_that_is_not_too_long(values, width):
    drawn = sparkline(values, width=width)
    assert len(drawn) == min(len(values), width)
    assert set(drawn) <= {*BARS, " "}


@given(st.lists(numbers, max_size=300))
def test_a_trail_keeps_its_room_and_its_greatest(values):
    trail = Trail(max, most=16)
    for value in values:
        trail.add(value)
    kept = trail.values
    assert len(kept) <= 16
    known = [value for value in values if value is not None]
    assert max((v for v in kept if v is not None), default=None) == max(known, default=None)


def test_a_trail_is_in_order_and_leaves_out_what_is_not_finite():
    trail = Trail(mean, most=4)
    for value in (1.0, math.nan, 3.0, 5.0, math.inf, 7.0, None):
        trail.add(value)
    assert trail.values == [1.0, 4.0, 7.0, None]
