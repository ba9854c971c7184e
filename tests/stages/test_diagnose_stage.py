"""diagnose: could a smaller scale cure it, why, and what to try."""

import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradilocks import DynamicScale, HeadroomScale
from gradilocks.step.diagnose import Symptom, diagnose, scale_path


def symptoms(*scales, nan=0, inf=1, loss_nonfinite=False):
    return [Symptom(scale=s, nan=nan, inf=inf, loss_nonfinite=loss_nonfinite) for s in scales]


BROKEN = symptoms(4.0, loss_nonfinite=True)


@pytest.mark.parametrize(
    ("found", "bounds", "curable", "words"),
    [
        (symptoms(8.0, 4.0), (1.0, 64.0), None, "a smaller scale may cure this"),
        (symptoms(8.0, 4.0, nan=3), (1.0, 64.0), None, "hold NaN and Inf"),
        (symptoms(4.0, 1.0), (1.0, 64.0), None, "floor of 1"),
        (symptoms(0.4, 0.1), (0.1, 64.0), None, "above 6.55e+05"),
        (symptoms(1.0, 1.0), (1.0, 1.0), None, "not scaled"),
        (symptoms(8.0, 8.0), (8.0, 8.0), None, "fixed at 8"),
        # However far it has fallen: gradients of 1000 overflow in float16 from 2^32 down to 128.
        (symptoms(2.0**20, 2.0**12), (1.0, 2.0**24), None, "fallen 256-fold"),
        (symptoms(2.0**32, 2.0**7), (1.0, 2.0**127), None, "proves nothing"),
        (symptoms(2.0**20, 2.0**13), (1.0, 2.0**24), None, "can still shrink to 1"),
        # NaN alone: float16 makes them of an overflow too (Inf - Inf).
        (symptoms(8.0, 4.0, nan=1, inf=0), (1.0, 64.0), None, "NaN and no Inf, which float16"),
        (symptoms(2.0, 1.0, nan=1, inf=0), (0.5, 64.0), None, "NaN and no Inf, which float16"),
        (symptoms(2.0**20, nan=1, inf=0), (2.0**20, 2.0**20), None, "NaN and no Inf, which float1"),
        (symptoms(1.0, nan=1, inf=0), (1.0, 1.0), None, "not scaled"),
        # Where even gradients of 10^12 would have room.
        (symptoms(2.0**16, 2.0**-24), (2.0**-24, 2.0**32), False, "up to 1.1e+12"),
        (symptoms(2.0**-24, nan=1, inf=0), (2.0**-126, 2.0**32), False, "NaN and no Inf at"),
        (symptoms(2.0**-23), (2.0**-24, 2.0**32), None, "may cure this"),
        # Losses.
        (symptoms(8.0, 4.0, loss_nonfinite=True), (1.0, 64.0), False, "The loss itself was"),
        (symptoms(2.0**-30, loss_nonfinite=True), (2.0**-30, 1.0), False, "The loss itself was"),
        (symptoms(8.0) + BROKEN, (1.0, 64.0), None, "NaN or Inf at 1 of 2 steps, the last among"),
        (BROKEN + symptoms(2.0), (1.0, 64.0), None, "NaN or Inf at 1 of 2 steps, which no scale"),
        (
            symptoms(8.0, 8.0, loss_nonfinite=None) + BROKEN,
            (1.0, 64.0),
            None,
            "NaN or Inf at 1 of 1 steps of which that is known",
        ),
        (symptoms(8.0, loss_nonfinite=None) + symptoms(4.0), (1.0, 64.0), None, "hold Inf, and"),
        # What was found while unscaling may be gone, and unscaling may overflow.
        (symptoms(8.0, inf=0), (1.0, 64.0), None, "neither NaN nor Inf"),
    ],
)
def test_each_cause_has_its_verdict(found, bounds, curable, words):
    verdict = diagnose(found, lowest=bounds[0], highest=bounds[1])
    assert verdict.curable is curable
    assert words in verdict.why
    assert ("not known" in verdict.why) is (curable is None)
    assert verdict.advice


FADING = {
    "each time fewer": ([12, 11, 10, 9], True),
    "as many at first": ([12, 12, 12, 11, 10, 9], True),
    "to one": ([1000, 100, 10, 1], True),
    "once fewer": ([100, 99], None),
    "twice fewer": ([12, 11, 10], None),
    "once more": ([12, 11, 10, 11, 9, 8, 7], None),
    "as many throughout": ([12, 12, 12, 12, 12], None),
    "more and more": ([9, 10, 11, 12], None),
}


@pytest.mark.parametrize("case", FADING)
@pytest.mark.parametrize("what", ["nan", "inf"])
def test_only_what_becomes_fewer_with_the_scale_is_an_overflow(case, what):
    counts, curable = FADING[case]
    found = []
    for at, number in enumerate(counts):
        found += symptoms(2.0 ** (20 - at), **{"nan": 0, "inf": 0, what: number})
    verdict = diagnose(found, lowest=1.0, highest=2.0**24)
    assert verdict.curable is curable
    # Numbers that fall by themselves, under a scale that stands still, say nothing of it.
    still = [dataclasses.replace(each, scale=8.0) for each in found]
    assert diagnose(still, lowest=1.0, highest=2.0**24).curable is None
    assert diagnose(still, lowest=8.0, highest=8.0).curable is None


def test_several_steps_at_one_scale_count_as_one():
    found = []
    for power, counts in ((9, (12, 14)), (8, (11, 10)), (7, (8, 9)), (6, (7,))):
        for number in counts:
            found += symptoms(2.0**power, inf=number)
    assert diagnose(found, lowest=1.0, highest=2.0**24).curable is True
    overlapping = [*symptoms(2.0**10, inf=11), *found]
    assert diagnose(overlapping, lowest=1.0, highest=2.0**24).curable is None


def test_a_floor_that_is_reached_while_they_fade_is_to_be_lowered():
    found = []
    for at, number in enumerate([12, 11, 10, 9]):
        found += symptoms(2.0 ** (3 - at), inf=number)
    verdict = diagnose(found, lowest=1.0, highest=2.0**24)
    assert verdict.curable is True
    assert "set a lower one" in verdict.advice


@given(
    power=st.integers(-23, 126),
    falls=st.integers(0, 7),
    policy=st.sampled_from([DynamicScale(), DynamicScale.torch(), HeadroomScale()]),
)
def test_the_scale_to_start_from_is_one_that_the_policy_accepts(power, falls, policy):
    lowest, highest = policy.bounds()
    last = min(2.0**power, highest)
    first = min(last * 2.0**falls, highest)
    verdict = diagnose(symptoms(first, last), lowest=lowest, highest=highest)
    suggested = re.search(r"init_scale=([0-9.e+-]+)\)", verdict.advice)
    assert verdict.curable is None
    assert suggested is not None
    assert DynamicScale(init_scale=float(suggested.group(1))).init_scale < last


@pytest.mark.parametrize(
    ("scales", "shown"),
    [
        ([8.0], "8 throughout"),
        ([8.0, 8.0, 8.0], "8 throughout"),
        ([8.0, 4.0], "8 → 4 (1 halving)"),
        ([8.0, 4.0, 16.0], "8 → 4 → 16 (1 doubling)"),
        ([8.0, 8.0, 4.0, 2.0, 2.0], "8 → 4 → 2 (2 halvings)"),
        ([2.0**k for k in range(10, 0, -1)], "1024 → 512 → 256 → … → 4 → 2 (9 halvings)"),
    ],
)
def test_the_scales_way_is_one_short_line(scales, shown):
    assert scale_path(scales) == shown
