"""diagnose: could a smaller scale cure it, why, and what to try."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradilocks import DynamicScale
from gradilocks.step.diagnose import Symptom, diagnose, scale_path


def symptoms(*scales, nan=0, inf=1, loss_nonfinite=False):
    return [Symptom(scale=s, nan=nan, inf=inf, loss_nonfinite=loss_nonfinite) for s in scales]


@pytest.mark.parametrize(
    ("found", "bounds", "curable", "words"),
    [
        (symptoms(8.0, 4.0), (1.0, 64.0), True, "smaller scale"),
        (symptoms(8.0, 4.0, nan=3), (1.0, 64.0), True, "smaller scale"),
        (symptoms(4.0, 1.0), (1.0, 64.0), False, "floor of 1"),
        (symptoms(0.4, 0.10000000149), (0.1, 64.0), False, "floor of 0.1"),
        (symptoms(8.0, 4.0, loss_nonfinite=True), (1.0, 64.0), False, "loss itself"),
        (symptoms(1.0, 1.0), (1.0, 1.0), False, "not scaled"),
        (symptoms(8.0, 8.0), (8.0, 8.0), True, "fixed at 8"),
        (symptoms(2.0**20, 2.0**12), (1.0, 2.0**24), False, "fell 256-fold"),
        (symptoms(2.0**20, 2.0**13), (1.0, 2.0**24), True, "can still shrink to 1"),
        # NaN alone: float16 makes them of an overflow too (Inf - Inf), so a scale that has not
        # yet fallen far is still a suspect.
        (symptoms(8.0, 4.0, nan=1, inf=0), (1.0, 64.0), True, "NaN and no Inf"),
        (symptoms(2.0, 1.0, nan=1, inf=0), (0.5, 64.0), False, "NaN and no Inf"),
        (symptoms(2.0**20, 2.0**12, nan=1, inf=0), (0.5, 2.0**24), False, "NaN and no Inf"),
        (symptoms(8.0, nan=1, inf=0), (8.0, 8.0), False, "NaN and no Inf"),
        (symptoms(1.0, nan=1, inf=0), (1.0, 1.0), False, "NaN and no Inf"),
    ],
)
def test_each_cause_has_its_verdict(found, bounds, curable, words):
    verdict = diagnose(found, lowest=bounds[0], highest=bounds[1])
    assert verdict.curable is curable
    assert words in verdict.why
    assert verdict.advice


def test_fewer_infs_than_at_first_are_a_good_sign():
    found = [*symptoms(2.0**20, inf=100), *symptoms(2.0**10, inf=99)]
    assert diagnose(found, lowest=1.0, highest=2.0**24).curable
    found = [*symptoms(2.0**20, inf=100), *symptoms(2.0**10, inf=100)]
    assert not diagnose(found, lowest=1.0, highest=2.0**24).curable


@given(
    power=st.integers(-23, 30),
    falls=st.integers(0, 7),
)
def test_the_scale_to_start_from_is_one_that_the_policy_accepts(power, falls):
    last = 2.0**power
    lowest, highest = DynamicScale().bounds()
    first = min(last * 2.0**falls, highest)
    verdict = diagnose(symptoms(first, last), lowest=lowest, highest=highest)
    suggested = re.search(r"init_scale=([0-9.e+-]+)\)", verdict.advice)
    assert verdict.curable
    assert suggested is None or lowest <= float(suggested.group(1)) < last


@pytest.mark.parametrize(
    ("scales", "shown"),
    [
        ([8.0], "8 throughout"),
        ([8.0, 8.0, 8.0], "8 throughout"),
        ([8.0, 4.0], "8 → 4 (1 halving)"),
        ([8.0, 8.0, 4.0, 2.0, 2.0], "8 → 4 → 2 (2 halvings)"),
        ([2.0**k for k in range(10, 0, -1)], "1024 → 512 → 256 → … → 4 → 2 (9 halvings)"),
    ],
)
def test_the_scales_way_is_one_short_line(scales, shown):
    assert scale_path(scales) == shown
