"""Applying a Decision: amp arguments for torch's fused steps, in-place multiplication for all others."""

from __future__ import annotations

import pytest
import torch

import gradilocks
from control.given_gradients import OPTIMIZERS, OWN_OPTIMIZERS, parameter
from gradilocks.step.update import can_bypass_step, uses_amp_arguments


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OWN_OPTIMIZERS])
def test_only_fused_steps_of_torch_and_ours_get_amp_arguments(name):
    optimizer = (OPTIMIZERS | OWN_OPTIMIZERS)[name]([parameter(1.0)])
    assert uses_amp_arguments(optimizer) == ("fused" in name or name.startswith("own"))
    assert can_bypass_step(optimizer) == name.startswith("own")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_a_fused_step_may_be_chosen_in_the_param_groups(kind):
    """As torchtitan does. torch sets its flag `_step_supports_amp_scaling` only for `fused=True` in the constructor."""
    param = parameter(1.0)
    optimizer = kind([{"params": [param], "fused": True}], lr=0.1)
    assert uses_amp_arguments(optimizer)
    param.grad = torch.full_like(param, torch.inf)
    before = param.detach().clone()
    optimizer.found_inf, optimizer.grad_scale = torch.ones(()), None
    optimizer.step()
    assert torch.equal(param, before)
    assert not uses_amp_arguments(kind([{"params": [parameter(1.0)], "fused": True}, {"params": [parameter(1.0)]}]))


def test_a_wrapped_or_overridden_step_is_not_taken_for_torchs():
    class Mine(torch.optim.AdamW):
        def step(self, closure=None):
            return super().step(closure)

    assert not uses_amp_arguments(Mine([parameter(1.0)], lr=0.1, fused=True))
    optimizer = torch.optim.AdamW([parameter(1.0)], lr=0.1, fused=True)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert uses_amp_arguments(optimizer)  # torch's own wrapper is looked through.
    original = optimizer.step
    optimizer.step = lambda closure=None: original(closure)
    assert not uses_amp_arguments(optimizer)


def test_hooks_of_others_end_the_direct_step():
    optimizer = gradilocks.optim.SGD([parameter(1.0)], lr=0.1)
    assert can_bypass_step(optimizer)
    handle = optimizer.register_step_post_hook(lambda *_: None)
    assert not can_bypass_step(optimizer)
    handle.remove()
    assert can_bypass_step(optimizer)
