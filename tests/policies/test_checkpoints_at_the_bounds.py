"""A scale is a float32 and its bounds are not: what was saved at a bound loads again, everywhere.

1e-4 lies above the float32 next to it and 1e14 below: a scale that stands there is past its bound.
"""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, GradScaler, HeadroomScale, StaticScale
from gradilocks.errors import BadState
from gradilocks.scale import ScalePolicy, bounds_in_float32
from gradilocks.values import ScaleState

INF = math.inf
FLOOR, CEILING = 1e-4, 1e14
DOWN, UP = [INF] * 40 + [1e9, 1e9], [0.0] * 40
BOUNDED = {
    "HeadroomScale at its floor": (HeadroomScale(min_scale=FLOOR), DOWN),
    "HeadroomScale at its ceiling": (HeadroomScale(max_scale=CEILING), UP),
    "HeadroomScale after it": (HeadroomScale(max_scale=CEILING), [*UP, INF]),
    "DynamicScale at its floor": (DynamicScale(min_scale=FLOOR), DOWN[:-2]),
    "DynamicScale at its ceiling": (
        DynamicScale(init_scale=CEILING, max_scale=CEILING, growth_interval=1),
        UP,
    ),
    "DynamicScale with a tolerance": (DynamicScale(min_scale=FLOOR, tolerance=0.5), DOWN[:-2]),
    "StaticScale below": (StaticScale(FLOOR), [1.0]),
    "StaticScale above": (StaticScale(CEILING), [1.0]),
}


def optimizer():
    return torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.0)


def through_json(saved):
    return json.loads(json.dumps(saved, allow_nan=False))


def stepped(control, gradients):
    """Steps on gradients of these sizes, however the control is scaled."""
    (param,) = control.optimizers[0].param_groups[0]["params"]
    for size in gradients:
        control.zero_grad()
        control.backward(param.sum())
        param.grad.fill_(size)
        control.step()
    return control


def scaled(scaler, gradients):
    mine = optimizer()
    (param,) = mine.param_groups[0]["params"]
    for size in gradients:
        mine.zero_grad()
        scaler.scale(param.sum()).backward()
        param.grad.fill_(size)
        scaler.step(mine)
        scaler.update()
    return scaler


@pytest.mark.parametrize("case", BOUNDED)
def test_a_control_loads_what_it_has_saved_at_a_bound(case):
    policy, gradients = BOUNDED[case]
    control = stepped(GradientControl(optimizer(), scale=policy, give_up_after=None), gradients)
    saved = through_json(control.state_dict())
    if "after" not in case:
        assert saved["scale"] not in policy.bounds()
    waiting = GradientControl(scale=policy, give_up_after=None)
    waiting.load_state_dict(saved)
    waiting.bind(optimizer())
    fresh = {
        policies: GradientControl(optimizer(), scale=policy, give_up_after=None)
        for policies in ("checkpoint", "control")
    }
    for policies, each in fresh.items():
        each.load_state_dict(saved, policies=policies)
    behind = GradientControl(optimizer(), scale=policy, give_up_after=None)
    behind.as_scaler().load_state_dict(through_json(control.as_scaler().state_dict()))
    expected = stepped(control, [1.0, INF, 1e-3]).state_dict()
    for each in (waiting, behind, *fresh.values()):
        assert stepped(each, [1.0, INF, 1e-3]).state_dict() == expected


@pytest.mark.parametrize("case", BOUNDED)
def test_a_scaler_with_a_policy_loads_what_it_has_saved_at_a_bound(case):
    policy, gradients = BOUNDED[case]
    scaler = scaled(GradScaler("cpu", policy=policy), gradients)
    again = GradScaler("cpu", policy=policy)
    again.load_state_dict(through_json(scaler.state_dict()))
    assert scaled(again, [1.0, INF]).state_dict() == scaled(scaler, [1.0, INF]).state_dict()


@pytest.mark.parametrize(("init", "gradients"), [(1.0, DOWN[:-2]), (CEILING, UP)])
def test_a_plain_scaler_loads_what_it_has_saved_at_a_bound(init, gradients):
    def made():
        return GradScaler(
            "cpu", init_scale=init, min_scale=FLOOR, max_scale=CEILING, growth_interval=1
        )

    scaler = scaled(made(), gradients)
    again = made()
    again.load_state_dict(through_json(scaler.state_dict()))
    assert again.get_scale() == scaler.get_scale()
    # And in torch's own keys into a control with the same bounds, and back.
    control = GradientControl(
        optimizer(), scale=DynamicScale(init_scale=init, min_scale=FLOOR, max_scale=CEILING)
    )
    control.load_state_dict(scaler.state_dict())
    assert control.scale == scaler.get_scale()
    again = made()
    again.load_state_dict(through_json(control.state_dict()))
    assert again.get_scale() == scaler.get_scale()


@pytest.mark.parametrize("name", ["ceiling", "held"])
@pytest.mark.parametrize("value", [FLOOR * (1 - 2e-7), CEILING * (1 + 2e-7), None, math.nan])
def test_what_no_rounding_explains_is_still_refused(name, value):
    policy = HeadroomScale(min_scale=FLOOR, max_scale=CEILING)
    control = GradientControl(optimizer(), scale=policy)
    saved = control.state_dict()
    saved["gradilocks"]["scale_state"][name] = value
    with pytest.raises(BadState, match=name):
        control.load_state_dict(saved)


def test_bounds_are_widened_by_rounding_and_by_nothing_else():
    low, high = bounds_in_float32(FLOOR, CEILING)
    assert FLOOR * (1 - 6e-8) <= low < FLOOR < CEILING < high <= CEILING * (1 + 6e-8)
    assert bounds_in_float32(2.0**-24, 2.0**32) == (2.0**-24, 2.0**32)
    # Where the float32 lies inside, the bound that was written counts too.
    assert bounds_in_float32(0.1, 1e38) == (0.1, 1e38)


@pytest.mark.parametrize(
    ("saved_with", "loaded_with", "gradients", "scale"),
    [
        (HeadroomScale(), HeadroomScale(max_scale=2.0**10), [1.0] * 4, 2.0**10),
        (HeadroomScale(), HeadroomScale(min_scale=100.0), [INF] * 4 + [1.0], 100.0),
        (DynamicScale(), DynamicScale(tolerance=0.1), [1.0], 2.0**16),
        (DynamicScale(tolerance=0.1), DynamicScale(), [1.0], 2.0**16),
        (DynamicScale.deepspeed(), DynamicScale(), [INF], 2.0**16),
    ],
)
def test_with_settings_of_its_own_a_control_takes_what_fits_them(
    saved_with, loaded_with, gradients, scale
):
    saved = stepped(GradientControl(optimizer(), scale=saved_with), gradients).state_dict()
    control = GradientControl(optimizer(), scale=loaded_with)
    control.load_state_dict(through_json(saved), policies="control")
    assert control.scale == scale
    stepped(control, [1.0, INF])
    lowest, highest = loaded_with.bounds()
    assert lowest <= control.scale <= highest


@dataclasses.dataclass(frozen=True)
class LogMean(ScalePolicy):
    """Of a user: keeps the mean of log2 of the largest magnitudes, which is no scale."""

    needs_largest = True

    def start(self, device):
        state = ScaleState(
            scale=torch.ones((), device=device),
            growth_tracker=torch.zeros((), dtype=torch.int32, device=device),
            hysteresis=torch.zeros((), dtype=torch.int32, device=device),
        )
        state.more["mean"] = torch.zeros((), dtype=torch.float64, device=device)
        state.more["smallest"] = torch.full((), INF, dtype=torch.float64, device=device)
        return state

    def advance(self, state, skip, *, largest=None, loss_nonfinite=None):
        state.more["mean"].mul_(0.5).add_(0.5 * torch.log2(largest.double()))


def test_what_an_own_policy_keeps_need_not_be_a_scale():
    policy = LogMean()
    control = stepped(GradientControl(optimizer(), scale=policy), [2.0**-10])
    saved = through_json(control.state_dict())
    assert saved["gradilocks"]["scale_state"] == {"mean": -5.0, "smallest": None}
    again = GradientControl(optimizer(), scale=policy)
    again.load_state_dict(saved)
    assert again.state_dict() == control.state_dict()
