"""`grad_scale` and `found_inf` are taken inside the step: gradients are only read, skips change
nothing."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.optim.twins import (
    close,
    copies,
    each_optimizer,
    error,
    exactly,
    give,
    ours,
    parameters,
    run,
    same,
    sizes,
    torchs,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SCALE = 1024.0


def number(value, device):
    return torch.full((), value, device=device)


def decide(optimizer, device, *, scale=None, skip=None):
    """As a scaler does it."""
    optimizer.grad_scale = None if scale is None else number(scale, device)
    optimizer.found_inf = None if skip is None else number(float(skip), device)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [SCALE, 3.0, 0.1])
def test_gradients_are_divided_by_grad_scale(kind, dtype, scale, device):
    mine, theirs = (parameters(sizes(), dtype=dtype, device=device) for _ in range(2))
    optimizer, other = ours(kind, mine), torchs(kind, theirs)
    for step in range(3):
        give(mine, step, factor=scale)
        give(theirs, step)
        decide(optimizer, device, scale=scale)
        optimizer.step()
        other.step()
    close(mine, theirs)


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_are_never_written(kind, dtype, kernel_device):
    params = parameters(sizes(), dtype=dtype, device=kernel_device)
    optimizer = ours(kind, params)
    for skip in (False, True, False):
        give(params, 3, factor=8.0)
        before = [param.grad for param in params]
        kept, versions = copies(before), [grad._version for grad in before]
        decide(optimizer, kernel_device, scale=SCALE, skip=skip)
        optimizer.step()
        assert all(p.grad is grad for p, grad in zip(params, before, strict=True))
        assert same(before, kept)
        assert [grad._version for grad in before] == versions


@each_optimizer
@pytest.mark.parametrize("flag", [1.0, 2.0])
@pytest.mark.parametrize("taken", [0, 2], ids=["at once", "in mid-run"])
def test_a_skipped_step_changes_no_bit(kind, taken, flag, device):
    params = parameters(sizes(), device=device)
    optimizer = ours(kind, params)
    run(optimizer, taken)
    before, state = copies(params), copy.deepcopy(optimizer.state_dict()["state"])
    for step in range(2):
        give(params, step, factor=float("inf") if step else float("nan"))
        decide(optimizer, device, scale=SCALE, skip=flag)
        optimizer.step()
    assert same(copies(params), before)
    found = optimizer.state_dict()["state"]
    if taken:
        assert same(found, state)
    else:  # What a first step makes is there, and empty; or nothing is.
        assert all(not tensor.any() for entry in found.values() for tensor in entry.values())


@each_optimizer
def test_after_skipped_first_steps_training_goes_as_if_they_had_not_been(kind, device):
    mine, theirs = (parameters(sizes(), device=device) for _ in range(2))
    optimizer, other = ours(kind, mine), torchs(kind, theirs)
    for step, skip in enumerate([True, True, False, True, False, False]):
        give(mine, step, factor=float("nan") if skip else 1.0)
        decide(optimizer, device, scale=1.0, skip=skip)
        optimizer.step()
        if not skip:
            give(theirs, step)
            other.step()
    close(mine, theirs)


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_momentum_buffer_starts_with_the_first_step_that_is_taken(nesterov, device):
    settings = {"momentum": 0.9, "dampening": 0.0 if nesterov else 0.5, "nesterov": nesterov}
    mine, theirs = (parameters([(70,), (3,)], device=device) for _ in range(2))
    optimizer = ours("SGD", mine, **settings)
    other = torchs("SGD", theirs, **settings)
    give(mine, 0, factor=float("inf"))
    mine[1].grad = None  # The second parameter starts later still.
    decide(optimizer, device, skip=True)
    optimizer.step()
    give(mine, 1)
    give(theirs, 1)
    mine[1].grad = theirs[1].grad = None
    decide(optimizer, device, skip=False)
    optimizer.step()
    other.step()
    close(mine, theirs)
    for step in range(2, 4):
        give(mine, step)
        decide(optimizer, device, skip=False)
        optimizer.step()
    last = torchs("SGD", theirs, **settings, fused=False)
    last.load_state_dict(other.state_dict())
    for group in last.param_groups:
        group["fused"] = False
    for step in range(2, 4):
        give(theirs, step)
        last.step()
    close(mine, theirs)


@each_optimizer
def test_flags_of_another_shape_dtype_or_device_are_understood(kind, device):
    mine, theirs = (parameters([(70,)], device=device) for _ in range(2))
    optimizer, other = ours(kind, mine), torchs(kind, theirs)
    give(mine, 0, factor=SCALE)
    give(theirs, 0)
    optimizer.grad_scale = torch.full((1,), SCALE, dtype=torch.float32, device=device)
    optimizer.found_inf = torch.zeros(1, device=device)
    optimizer.step()
    other.step()
    close(mine, theirs)
    if device == "cuda":  # Found on the host, as a scaler on the CPU does it.
        give(mine, 1, factor=SCALE)
        give(theirs, 1)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(SCALE), torch.tensor(0.0)
        optimizer.step()
        other.step()
        close(mine, theirs)


@each_optimizer
def test_without_a_flag_a_nonfinite_gradient_goes_through_as_in_torch(kind, device):
    (mine,), (theirs,) = (parameters([(70,)], device=device) for _ in range(2))
    optimizer, other = ours(kind, [mine]), torchs(kind, [theirs])
    for param in (mine, theirs):
        give([param], 0)
        param.grad[3] = float("nan")
        param.grad[5] = float("inf")
    optimizer.step()
    other.step()
    assert torch.equal(mine.isnan(), theirs.isnan())
    assert mine.isnan()[3]
    fine = theirs.isfinite()
    close([mine[fine]], [theirs[fine]])


def test_unscaling_is_as_exact_as_dividing_beforehand(kernel_device):
    """A scale that is no power of two costs one rounding, as in torch's kernel."""
    shapes, scale = sizes(), 3e4
    mine, theirs = (parameters(shapes, device=kernel_device) for _ in range(2))
    optimizer, other = ours("AdamW", mine), torchs("AdamW", theirs)
    for step in range(3):
        for params, stepper in ((mine, optimizer), (theirs, other)):
            give(params, step, factor=scale)
            decide(stepper, kernel_device, scale=scale, skip=False)
            stepper.step()
    exact = exactly("AdamW", shapes, torch.float32, 3)
    assert error(mine, exact) <= 1.1 * error(theirs, exact) + 1e-8


@each_optimizer
def test_float16_gradients_are_unscaled_in_float32(kind, kernel_device):
    """A gradient of 1e-6 is lost in float16, and is there as long as it is scaled."""
    params = parameters([(70,)], dtype=torch.float16, device=kernel_device)
    before = copies(params)
    settings = {"momentum": 0.0, "dampening": 0.0, "lr": 1e6} if kind == "SGD" else {"eps": 1e-12}
    optimizer = ours(kind, params, **settings, weight_decay=0.0)
    params[0].grad = torch.full_like(params[0], 2.0**-24 * 64)
    decide(optimizer, kernel_device, scale=1024.0, skip=False)
    optimizer.step()
    assert (before[0] - params[0]).abs().min() > 1e-4
