"""decide: Measurement, scale and ClipLimit in; skip and one multiplier out."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gradilocks.step.engine import decide
from gradilocks.values import ClipLimit, Measurement, Statistics


def measurement(nonfinite):
    zero = torch.zeros(1, dtype=torch.int64)
    return Measurement(
        order=2.0,
        tensors=Statistics(torch.ones(1, dtype=torch.float64), zero, zero),
        norm=torch.tensor(1.0, dtype=torch.float64),
        nonfinite=torch.tensor(float(nonfinite)),
    )


def limit(coefficient, value=None):
    return ClipLimit(
        coefficient=torch.tensor(coefficient, dtype=torch.float64),
        limit=torch.tensor(math.inf),
        clipped=torch.tensor(0.0),
        value=value,
    )


def decided(nonfinite, scale, coefficient=1.0, value=None):
    return decide(measurement(nonfinite), torch.tensor(scale), limit(coefficient, value))


@given(
    nonfinite=st.booleans(),
    scale=st.floats(2.0**-126, 2.0**127, width=32),
    coefficient=st.floats(0.0, 1.0),
)
def test_skip_is_exactly_zero_or_one_and_the_multiplier_is_finite(nonfinite, scale, coefficient):
    decision = decided(nonfinite, scale, coefficient)
    assert decision.skip.item() == float(nonfinite)
    assert decision.skip.dtype is torch.float32
    expected = 1.0 if nonfinite else coefficient / scale
    assert decision.multiplier.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("scale", [0.0, math.nan, 1e-45])
@pytest.mark.parametrize("coefficient", [1.0, math.nan])
def test_a_multiplier_that_is_not_finite_skips_the_step(scale, coefficient):
    decision = decided(False, scale, coefficient)
    if scale == 1e-45 and coefficient == 1.0:
        assert math.isfinite(decision.multiplier.item())  # float64 holds it
    else:
        assert decision.skip.item() == 1.0
        assert decision.multiplier.item() == 1.0


def test_the_bound_is_that_of_the_scaled_elements_and_infinite_when_skipped():
    assert decided(False, 8.0, value=0.5).bound.item() == 4.0
    assert decided(True, 8.0, value=0.5).bound.item() == math.inf
    assert decided(False, 8.0).bound is None


def test_deciding_waits_for_nothing(monkeypatch):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    decision = decided(False, 8.0, value=0.5)
    monkeypatch.undo()
    assert decision.multiplier.item() == 0.125
