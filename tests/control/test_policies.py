"""Scale policies, and users' own clip policies, through a control on every device path."""

from __future__ import annotations

import math

import pytest
import torch

import gradilocks
from control.given_gradients import INF, NAN, parameter, take_step
from gradilocks import (
    AdaGC,
    DynamicScale,
    GradientControl,
    HeadroomScale,
    StaticScale,
)
from policies.own_policies import Thirds

SCALES = {
    "dynamic": DynamicScale(init_scale=2.0**10, growth_interval=2),
    "hysteresis": DynamicScale(init_scale=2.0**10, growth_interval=3, hysteresis=2, min_scale=2.0**8),
    "headroom": HeadroomScale(init_scale=2.0**10, growth_interval=2),
    "static": StaticScale(2.0**10),
    "own": Thirds(),
}


@pytest.mark.parametrize("clip", [None, AdaGC(warmup=1)])
@pytest.mark.parametrize("name", SCALES)
def test_a_scale_policy_moves_as_its_update_says(name, clip, device):
    policy = SCALES[name]
    p = parameter(0.0, 0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=policy, clip=clip)
    state = policy.init()
    for size in (1.0, 4.0, INF, 1.0, 1.0, 0.0, NAN, INF, 0.25, 1.0, 1.0):
        scale = state["scale"].item()
        assert control.scale == scale
        outcome = take_step(control, (p, torch.tensor([size, size / 2])))
        assert outcome.scale == scale
        largest = torch.tensor(size * scale, dtype=torch.float64)
        state = policy.update(state, torch.tensor(not math.isfinite(size)), largest)
    assert control.scale == state["scale"].item()


def test_a_policy_of_the_user_never_sees_a_nonfinite_step_in_its_state(device):
    class Average:
        """Bounds the norm by twice the mean of all norms so far."""

        def init(self):
            return {"sum": torch.zeros((), dtype=torch.float64), "count": torch.zeros((), dtype=torch.int64)}

        def limit(self, norms, total, state):
            mean = state["sum"] / state["count"].clamp(min=1)
            bound = torch.where(state["count"] > 0, 2.0 * mean, math.inf)
            no = torch.zeros_like(total, dtype=torch.bool)
            return gradilocks.clip.Limit(torch.where(total > bound, bound / total, 1.0), bound, no)

        def update(self, norms, total, limit, state):
            return {"sum": state["sum"] + total, "count": state["count"] + 1}

    p = parameter(0.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=1.0), clip=Average(), scale=4.0)
    limits = []
    for size in (1.0, NAN, 3.0, INF, 100.0):
        limits.append(take_step(control, (p, size)).limit)
    assert [limits[0], limits[2], limits[4]] == [INF, 2.0, 4.0]
    assert p.item() == -7.0
    state = control.state_dict()["gradilocks"]["clip"]["0"]["0"]
    assert (state["policy"], state["sum"].item(), state["count"].item()) == ("Average", 104.0, 3)


def test_a_policy_of_the_user_that_leaves_the_range_of_scales_is_clamped():
    class Explodes:
        def init(self):
            return {"scale": torch.ones(())}

        def update(self, state, overflow, largest):
            return {"scale": torch.where(overflow, state["scale"] * 0.0, state["scale"] * math.inf)}

    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=Explodes())
    for gradient in (1.0, INF, 1.0):
        take_step(control, (p, gradient))
        assert 0.0 < control.scale < INF
