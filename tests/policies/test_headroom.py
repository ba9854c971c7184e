"""HeadroomScale: where it goes, what it remembers, and what it does not take for an overflow."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, HeadroomScale


def run(policy, *gradients, overflow_above=math.inf, losses=()):
    """A parameter whose gradient is given; it overflows where scale * gradient passes a bound."""
    param = nn.Parameter(torch.zeros(1))
    control = GradientControl(torch.optim.SGD([param], lr=0.0), scale=policy)
    scales = []
    for number, gradient in enumerate(gradients):
        scales.append(control.scale)
        control.zero_grad()
        loss = losses[number] if number < len(losses) else 0.0
        control.backward(((param - param.detach()) * gradient).sum() + loss)
        if abs(scales[-1] * gradient) > overflow_above:
            param.grad.fill_(math.inf)
        control.step()
    return [*scales, control.scale]


def test_it_is_where_it_belongs_after_one_step():
    # 65504 / 2^-10 is 2^25.99; four doublings are kept free.
    assert run(HeadroomScale(init_scale=2.0**8), 2.0**-10, 2.0**-10)[1:] == [2.0**21, 2.0**21]


@pytest.mark.parametrize("margin", [0, 1, 8])
def test_it_keeps_the_margin(margin):
    scale = run(HeadroomScale(margin=margin), 3e-5)[-1]
    assert 65504 / 2.0 ** (margin + 1) < scale * 3e-5 <= 65504 / 2.0**margin


def test_it_comes_down_before_growing_gradients_overflow():
    gradients = [2.0**-10 * 2**k for k in range(30)]
    scales = run(HeadroomScale(max_scale=2.0**24), *gradients, overflow_above=65504.0)
    for gradient, scale in zip(gradients[1:], scales[1:], strict=False):
        assert scale * gradient <= 65504.0
    assert scales[-1] < scales[1]


def test_it_remembers_what_overflowed_and_comes_back_slowly():
    # An activation's gradient is 2^9 times the parameter's, and only overflow shows it.
    policy = HeadroomScale(growth_interval=5)
    scales = run(policy, *[2.0**-10] * 40, overflow_above=65504.0 / 2**9)
    overflows = [k for k, scale in enumerate(scales) if scale * 2.0**-10 * 2**9 > 65504.0]
    # A leap fails, it feels its way up from what held, and one doubling too many fails.
    assert scales[:3] == [2.0**8, 2.0**21, 2.0**8]
    assert scales[2:12] == [2.0**k for k in range(8, 18)]
    assert overflows[:2] == [1, 11]
    again = overflows[2:]
    assert again[0] == 11 + 1 + 5
    assert all(scales[k] == 2.0**17 for k in overflows[1:])
    assert len(again) <= 28 // 6 + 1


def test_a_spike_at_a_scale_that_held_costs_one_step_and_half_the_scale():
    gradients = [2.0**-10] * 4 + [2.0**20] + [2.0**-10] * 4
    scales = run(HeadroomScale(), *gradients, overflow_above=65504.0)
    assert scales == [2.0**8, *[2.0**21] * 4, *[2.0**20] * 5]


@pytest.mark.parametrize("growth_factor", [1.5, 2.0, 4.0, 100.0])
def test_whatever_its_factors_it_stops_trying_what_fails(growth_factor):
    policy = HeadroomScale(growth_interval=50, growth_factor=growth_factor)
    scales = run(policy, *[2.0**-10] * 60, overflow_above=65504.0 / 2**9)
    overflows = [k for k, scale in enumerate(scales[:-1]) if scale * 2.0**-10 * 2**9 > 65504.0]
    assert len(overflows) <= 4  # Two to find it, and two when it is lifted.


def test_a_nan_in_the_loss_is_nobodys_fault():
    nan = torch.tensor(math.nan)
    scales = run(HeadroomScale(), 1.0, 1.0, 1.0, losses=(0.0, nan, nan))
    assert scales[1] == scales[2] == scales[3]


def test_gradients_that_have_all_vanished_make_it_grow():
    assert run(HeadroomScale(init_scale=1.0), 0.0, 0.0, 2.0**-10) == [1.0, 16.0, 256.0, 2.0**21]


def test_growth_from_nothing_ends_at_its_bounds_and_with_the_first_gradient_be_it_inf():
    policy = HeadroomScale(init_scale=1.0, max_scale=2.0**10)
    assert run(policy, 0.0, 0.0, 0.0, 0.0)[1:] == [16.0, 256.0, 1024.0, 1024.0]
    scales = run(HeadroomScale(init_scale=1.0), 0.0, 1.0, 0.0, 0.0, overflow_above=8.0)
    assert scales == [1.0, 16.0, 1.0, 1.0, 1.0]  # Back to what held, and there it stays.


def test_it_stays_within_its_bounds():
    policy = HeadroomScale(init_scale=8.0, min_scale=4.0, max_scale=64.0)
    assert run(policy, 1e-20, 1e-20)[1:] == [64.0, 64.0]
    assert run(policy, 1e20, 1e20)[1:] == [4.0, 4.0]


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"margin": -1}, ValueError, "margin must be at least 0"),
        ({"margin": 1.5}, TypeError, "margin must be an int"),
        ({"largest_value": 0.0}, ValueError, "largest_value must be a positive"),
        ({"init_scale": 1.0, "min_scale": 2.0}, ValueError, "init_scale must lie between"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor must be greater than 1"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be between 0 and 1"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        HeadroomScale(**settings)


def test_gradients_that_were_unscaled_first_are_measured_as_scaled_ones():
    param = nn.Parameter(torch.zeros(1))
    control = GradientControl(torch.optim.SGD([param], lr=0.0), scale=HeadroomScale())
    for _ in range(4):
        control.zero_grad()
        control.backward((param * 2.0**-10).sum())
        control.unscale_()
        control.step()
    assert control.scale == 2.0**21


def test_zeros_in_mid_run_do_not_make_it_grow():
    scales = run(HeadroomScale(), 1.0, *[0.0] * 7, 1.0, overflow_above=65504.0)
    assert len(set(scales[1:])) == 1
