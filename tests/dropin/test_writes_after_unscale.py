"""A clip after `unscale_` measures the gradients as they are, whatever was written in between and by whom."""

from __future__ import annotations

import math

import pytest
import torch

from control.given_gradients import PATHS
from gradilocks import GradScaler, clip_grad_norm_

SIZES = (5, 300, 1, 70)


@pytest.fixture(params=PATHS)
def device(request, use_kernels):
    return use_kernels(request.param)


def unscaled(device, *, optimizers=1):
    """Parameters whose gradients have just been unscaled, dealt out to so many optimizers."""
    generator = torch.Generator().manual_seed(5)
    params = [torch.nn.Parameter(torch.randn(size, generator=generator).to(device)) for size in SIZES]
    scaler = GradScaler(device, init_scale=1024.0)
    scaler.scale(sum((p * p).sum() for p in params)).backward()
    made = [torch.optim.SGD(params[k::optimizers], lr=0.1) for k in range(optimizers)]
    for optimizer in made:
        scaler.unscale_(optimizer)
    return params, scaler, made


def check_clip(params, *, max_norm=1.0):
    """Clips, and compares with the float64 norm of the gradients."""
    before = [p.grad.detach().clone() for p in params]
    expected = torch.cat([grad.flatten().double() for grad in before]).norm().item()
    assert clip_grad_norm_(params, max_norm).item() == pytest.approx(expected, rel=1e-6)
    coefficient = min(1.0, max_norm / (expected + 1e-6))
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad * coefficient, rtol=1e-5, atol=1e-9)


def test_several_optimizers_are_clipped_together_or_apart(device):
    check_clip(unscaled(device, optimizers=3)[0])
    params, scaler, optimizers = unscaled(device, optimizers=2)
    check_clip(params[0::2])
    check_clip(params[1::2], max_norm=0.5)
    check_clip(params, max_norm=0.25)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
    assert scaler._get_growth_tracker() == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_nonfinite_gradient_is_not_clipped_and_the_step_is_skipped(device, value):
    params, _, _ = unscaled(device)
    params[2].grad.fill_(value)
    scaler, optimizer = GradScaler(device, init_scale=2.0), torch.optim.SGD(params, lr=0.1)
    scaler.scale(torch.ones((), device=device))
    scaler.unscale_(optimizer)
    before = [p.grad.clone() for p in params]
    norm = clip_grad_norm_(params, 1e-3).item()
    assert math.isnan(norm) if math.isnan(value) else norm == math.inf
    for param, grad in zip(params, before, strict=True):
        torch.testing.assert_close(param.grad, grad, rtol=0, atol=0, equal_nan=True)
    scaler.step(optimizer)
    assert scaler.outcome.skipped
    assert scaler.outcome.culprits == ("param_groups[0]['params'][2]",)


def _replace(param):
    param.grad = param.grad * 0.5


def _swap_the_storage(param):
    param.grad.data = param.grad.data * 0.5


WRITES = {
    "in place": lambda param: param.grad.mul_(0.5),
    "replaced": _replace,
    "storage swapped": _swap_the_storage,
    "accumulated": lambda param: (param * 3.0).sum().backward(),
    "clipped by norm": lambda param: clip_grad_norm_([param], 0.1),
    "clipped by torch": lambda param: torch.nn.utils.clip_grad_norm_([param], 0.1),
    "one element through .data": lambda param: param.grad.data[:1].fill_(1000.0),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_write_is_seen(device, write):
    params, _, _ = unscaled(device)
    write(params[1])
    check_clip(params)
