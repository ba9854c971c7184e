"""A skipped step leaves parameters, optimizer state, step counts and gradients bit for bit unchanged."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from control.given_gradients import (
    INF,
    NAN,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    assert_same,
    contents,
    gradients,
    loss_giving,
    nan_in_new_memory,
    parameter,
    take_step,
)
from gradilocks import AdaGC, ClipByNorm, ClipByValue, GradientControl

CLIPS = {"none": None, "norm": ClipByNorm(0.5), "value": ClipByValue(0.25), "tensor": AdaGC(warmup=1)}
EVERY_OPTIMIZER = OPTIMIZERS | OWN_OPTIMIZERS
GOOD = [
    (torch.tensor([[0.5, -1.0, 2.0], [0.25, 3.0, -0.125]]), torch.tensor([1.5, -0.5])),
    (torch.tensor([[-1.5, 1.0, 0.0], [0.75, -2.0, 1.125]]), torch.tensor([0.5, 4.0])),
    (torch.tensor([[2.5, 0.5, 1.0], [-0.25, 1.0, 0.5]]), torch.tensor([-1.0, 0.25])),
]


def setting(make, clip=None, device="cpu"):
    p = nn.Parameter(torch.tensor([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], device=device))
    q = nn.Parameter(torch.tensor([0.7, 0.8], device=device))
    optimizer = make([p, q])
    return p, q, optimizer, GradientControl(optimizer, clip=clip)


def skip_after(good, bad, name, *options):
    """Some good steps, then one with a bad gradient, which must change nothing."""
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name], *options)
    for g, h in good:
        take_step(control, (p, g), (q, h))
    before = contents(optimizer)
    control.zero_grad()
    control.backward(loss_giving((p, GOOD[0][0]), (q, torch.tensor([1.0, bad]))))
    made = gradients(optimizer)
    assert control.step().skipped
    assert_same(contents(optimizer), before)
    assert_same(gradients(optimizer), made)


@pytest.mark.parametrize("bad", [INF, NAN])
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_a_skipped_step_changes_no_bit(name, bad):
    skip_after(GOOD, bad, name)


@pytest.mark.parametrize("name", ["AdamW fused", "SGD momentum fused", "Adagrad", *OWN_OPTIMIZERS])
@pytest.mark.parametrize("clip", CLIPS)
def test_a_skipped_step_changes_no_bit_on_any_device_path(name, clip, device):
    skip_after(GOOD[:1], NAN, name, CLIPS[clip], device)


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", EVERY_OPTIMIZER)
def test_the_run_continues_as_if_skipped_steps_had_never_been(name, clip):
    p, q, optimizer, control = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    r, s, other, untouched = setting(EVERY_OPTIMIZER[name], CLIPS[clip])
    with nan_in_new_memory():  # torch's fused SGD allocates momentum without initializing it.
        assert take_step(control, (p, INF), (q, 1.0)).skipped  # A skipped first step leaves a first step to be taken.
        for g, h in GOOD:
            take_step(control, (p, g), (q, h))
            assert take_step(control, (p, NAN), (q, h)).skipped
            assert take_step(control, (p, g), (q, INF)).skipped
            take_step(untouched, (r, g), (s, h))
    assert_same(contents(optimizer), contents(other))


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("fused", [False, True])
def test_one_nonfinite_gradient_skips_every_optimizer(bad, fused, device):
    p, q = parameter(1.0, 2.0, device=device), parameter(3.0, device=device)
    one = torch.optim.Adam([p], lr=0.1, fused=fused)
    two = torch.optim.AdamW([q], lr=0.1, fused=not fused)
    control = GradientControl(one, two, clip=1.0)
    take_step(control, (p, 1.0), (q, 1.0))
    before = contents(one), contents(two)
    assert take_step(control, (p, 1.0), (q, bad)).skipped
    assert_same((contents(one), contents(two)), before)


@pytest.mark.parametrize("fused", [False, True])
def test_a_nan_written_after_unscale_skips_the_step(fused, device):
    p = parameter(1.0, 2.0, device=device)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=fused)
    control = GradientControl(optimizer, clip=ClipByValue(0.5))
    control.backward(loss_giving((p, torch.tensor([3.0, 4.0]))))
    control.unscale_()
    assert p.grad.tolist() == [3.0, 4.0]
    p.grad[1] = NAN
    made = gradients(optimizer)
    assert control.step().skipped
    assert_same(gradients(optimizer), made)


def test_an_inf_that_is_removed_after_unscale_still_skips_the_step(device):
    p = parameter(1.0, 2.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    control.backward(loss_giving((p, torch.tensor([INF, 4.0]))))
    control.unscale_()
    p.grad.nan_to_num_(0.0, 0.0, 0.0)
    outcome = control.step()
    assert outcome.skipped
    assert p.tolist() == [1.0, 2.0]
    assert control.scale == 32768.0


@pytest.mark.parametrize(("scale", "gradient"), [(2.0**-100, 1e30), (2.0**-20, 1e38)])
def test_gradients_that_overflow_when_they_are_unscaled_skip_the_step(scale, gradient, device):
    p = parameter(1.0, device=device)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=scale)
    control.backward(loss_giving((p, 0.0)))
    p.grad.fill_(gradient)
    outcome = control.step()
    assert outcome.skipped
    assert p.item() == 1.0
    assert outcome.describe() == "finite gradients that overflow when they are unscaled"
