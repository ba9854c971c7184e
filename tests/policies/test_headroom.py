"""HeadroomScale: the scale it chooses, and the overflows it remembers."""

from __future__ import annotations

import math

import pytest
import torch

from gradilocks.scale import HeadroomScale


def run(policy, *gradients, overflow_above=math.inf):
    """Scales before each step and after the last; a step overflows where scale * gradient exceeds a bound."""
    state = policy.init()
    scales = [state["scale"].item()]
    for gradient in gradients:
        scaled = scales[-1] * abs(gradient)
        largest = torch.tensor(scaled if scaled <= overflow_above else math.inf, dtype=torch.float64)
        state = policy.update(state, torch.tensor(scaled > overflow_above), largest)
        scales.append(state["scale"].item())
    return scales


def test_the_scale_fits_after_one_step():
    # 65504 / 2^-10 is 2^25.99; four doublings are kept free.
    assert run(HeadroomScale(init_scale=2.0**8), 2.0**-10, 2.0**-10)[1:] == [2.0**21, 2.0**21]


@pytest.mark.parametrize("margin", [0, 1, 8])
def test_it_keeps_the_margin(margin):
    scale = run(HeadroomScale(margin=margin), 3e-5)[-1]
    assert 65504 / 2.0 ** (margin + 1) < scale * 3e-5 <= 65504 / 2.0**margin


def test_it_comes_down_before_growing_gradients_overflow():
    gradients = [2.0**-10 * 2**k for k in range(30)]
    scales = run(HeadroomScale(max_scale=2.0**24), *gradients, overflow_above=65504.0)
    assert all(scale * gradient <= 65504.0 for gradient, scale in zip(gradients[1:], scales[1:], strict=False))
    assert scales[-1] < scales[1]


def test_after_an_overflow_it_halves_and_holds_until_the_interval_has_passed():
    # The gradient of an activation is 2^9 times the parameter's, and only the overflow shows it.
    policy = HeadroomScale(growth_interval=5)
    scales = run(policy, *[2.0**-10] * 30, overflow_above=65504.0 / 2**9)
    assert scales[:8] == [2.0**8, *(2.0**k for k in range(21, 15, -1)), 2.0**16]
    overflows = [k for k, scale in enumerate(scales[:-1]) if scale == 2.0**17]
    assert overflows == [5, 11, 17, 23, 29]
    assert all(scale in (2.0**16, 2.0**17) for scale in scales[5:])


def test_a_spike_costs_one_step_and_half_the_scale():
    gradients = [2.0**-10] * 4 + [2.0**20] + [2.0**-10] * 4
    scales = run(HeadroomScale(), *gradients, overflow_above=65504.0)
    assert scales == [2.0**8, *[2.0**21] * 4, *[2.0**20] * 5]


@pytest.mark.parametrize("growth_factor", [1.5, 2.0, 4.0, 100.0])
def test_with_any_factor_it_rarely_tries_a_scale_that_overflowed(growth_factor):
    policy = HeadroomScale(growth_interval=50, growth_factor=growth_factor)
    scales = run(policy, *[2.0**-10] * 60, overflow_above=65504.0 / 2**9)
    overflows = [k for k, scale in enumerate(scales[:-1]) if scale * 2.0**-10 * 2**9 > 65504.0]
    assert len(overflows) <= 5 + math.ceil(math.log2(growth_factor))


@pytest.mark.parametrize("largest", [0.0, math.inf, math.nan])
def test_without_a_usable_magnitude_a_finite_step_leaves_the_scale(largest):
    policy = HeadroomScale()
    state = policy.update(policy.init(), torch.tensor(False), torch.tensor(1.0))
    for _ in range(3):
        new = policy.update(state, torch.tensor(False), torch.tensor(largest))
        assert new["scale"] == state["scale"]
        state = new


def test_it_stays_within_its_bounds():
    policy = HeadroomScale(init_scale=8.0, min_scale=4.0, max_scale=64.0)
    assert run(policy, 1e-20, 1e-20)[1:] == [64.0, 64.0]
    assert run(policy, 1e20, 1e20)[1:] == [4.0, 4.0]
    assert run(policy, 1.0, 1.0, 1.0, overflow_above=0.0)[1:] == [4.0, 4.0, 4.0]
