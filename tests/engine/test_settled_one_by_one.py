"""Steps of one optimizer at a time, settled by the device: the same as with the policies asked."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="Triton is not installed, so there are no kernels to test")

from gradilocks import DynamicScale, GradientControl, optim

# The interpreter computes with NumPy, which warns where float arithmetic overflows as it should.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

STEPS = [(1.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (2.0, 0.5), (1.0, 1.0)]


def trained(device, *, together, clip):
    torch.manual_seed(1)
    models = nn.ModuleDict({"d": nn.Linear(3, 2), "g": nn.Linear(3, 2)}).to(device)
    pair = [optim.AdamW(model.parameters(), lr=0.1) for model in models.values()]
    scale = DynamicScale(init_scale=1024.0, growth_interval=2)
    control = GradientControl(*pair, model=models, scale=scale, clip=clip)
    scaler = control.as_scaler()
    rows, told = torch.linspace(-1, 1, 6, device=device).view(2, 3), []

    def loss_of(model, factor):
        return (model(rows) * factor).square().mean()

    for factors in STEPS:
        models.zero_grad()
        losses = [loss_of(m, f) for m, f in zip(models.values(), factors, strict=True)]
        for loss, optimizer in zip(losses, pair, strict=True):
            if together and optimizer is pair[0]:
                scaler.scale(sum(losses)).backward()
            elif not together:
                scaler.scale(loss).backward()
            scaler.step(optimizer)
            told.append((control.outcome.skipped, control.outcome.norm, control.outcome.clipped))
            if not together:
                scaler.update()
                models.zero_grad()
        if together:
            scaler.update()
        told.append(control.scale)
    return torch.cat([p.detach().flatten() for p in models.parameters()]), told


@pytest.mark.parametrize("together", [True, False], ids=["one loss", "a loss each"])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_device_settles_them_as_the_policies_would(device, settling, together, clip):
    found, told = trained(device, together=together, clip=clip)
    assert settling.count == 2 * len(STEPS)
    settling.allowed = False
    expected, expected_told = trained(device, together=together, clip=clip)
    assert settling.count == 2 * len(STEPS)
    numbers = [repr(each) for each in expected_told]
    assert [repr(each) for each in told] == numbers
    assert torch.equal(found, expected)


def test_what_was_found_while_unscaling_is_found_again(device, settling):
    model = nn.Linear(3, 2).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, model=model)
    scaler = control.as_scaler()
    for spoilt in (False, True, False):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3, device=device)).square().mean()).backward()
        if spoilt:
            model.bias.grad[1] = -math.inf
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert control.outcome.skipped == spoilt
        assert control.outcome.culprits == (("bias",) if spoilt else ())
        assert torch.equal(before, model.weight) == spoilt
    assert settling.count == 3
