"""A control trains as torch's GradScaler, clip_grad_norm_ and the same optimizer do."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from control.given_gradients import (
    INF,
    MAKERS,
    NAN,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    assert_same,
    batches,
    contents,
    loss_giving,
    loss_of,
    parameter,
    small_model,
    take_step,
)
from gradilocks import ClipByNorm, ClipByValue, DynamicScale, GradientControl

OVERFLOWS = {17, 18, 33}
"""Not the first step: torch's fused SGD then trains on uninitialised momentum buffers."""


def twins(make):
    """Two equal models, each with its optimizer."""
    model = small_model()
    other = copy.deepcopy(model)
    return (model, make(model.parameters())), (other, make(other.parameters()))


def torch_step(scaler, optimizer, model, max_norm=None, order=2.0, max_value=None, unscales=True):
    if unscales:
        scaler.unscale_(optimizer)
    norm = None
    if max_norm is not None:
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type=order)
    if max_value is not None:
        nn.utils.clip_grad_value_(model.parameters(), max_value)
    scaler.step(optimizer)
    scaler.update()
    return norm


MOVING = DynamicScale(growth_interval=7)
FEW = ("SGD", "Adam", "AdamW fused", "SGD nesterov fused")
SAME_BITS = [
    *((name, MOVING, {"max_norm": bound}) for name in OPTIMIZERS for bound in (None, 1e9)),
    *((name, MOVING, {"max_value": bound}) for name in FEW for bound in (0.0, 0.01, 0.1, 100.0)),
    *((name, scale, {}) for name in FEW for scale in (None, 1024, 0.25, 1000.0)),
]


@pytest.mark.parametrize(("name", "scale", "bound"), SAME_BITS, ids=str)
def test_a_run_is_torchs_bit_for_bit_unless_its_norm_is_clipped(name, scale, bound):
    (model, optimizer), (theirs, their_optimizer) = twins(OPTIMIZERS[name])
    clip = bound.get("max_norm", ClipByValue(bound["max_value"]) if "max_value" in bound else None)
    control = GradientControl(optimizer, model=model, clip=clip, scale=scale)
    overflows, interval, init = (OVERFLOWS, 7, 2.0**16) if scale is MOVING else (set(), 10**6, scale or 1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=init, growth_interval=interval)
    skipped = set()
    for step, batch in enumerate(batches(40, overflows)):
        optimizer.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, *batch))
        outcome = control.step()
        scaler.scale(loss_of(theirs, *batch)).backward()
        largest = max(p.grad.abs().max().item() for p in theirs.parameters()) / scaler.get_scale()
        torch_step(scaler, their_optimizer, theirs, **bound, unscales=scale is MOVING)
        assert outcome.clipped == (largest > bound.get("max_value", INF) and not outcome.skipped)
        assert control.scale == scaler.get_scale()
        if outcome.skipped:
            skipped.add(step)
    assert skipped == overflows
    assert_same(contents(optimizer), contents(their_optimizer))


@pytest.mark.parametrize("name", [*OPTIMIZERS, *OWN_OPTIMIZERS])
def test_a_clipped_run_is_torchs_within_float32_rounding(name):
    (model, optimizer), (theirs, their_optimizer) = twins((OPTIMIZERS | OWN_OPTIMIZERS)[name])
    control = GradientControl(optimizer, model=model, clip=0.25, scale=DynamicScale(growth_interval=7))
    scaler = torch.amp.GradScaler("cpu", growth_interval=7)
    clipped = 0
    for batch in batches(40, OVERFLOWS):
        control.zero_grad()
        their_optimizer.zero_grad()
        control.backward(loss_of(model, *batch))
        outcome = control.step()
        scaler.scale(loss_of(theirs, *batch)).backward()
        norm = torch_step(scaler, their_optimizer, theirs, 0.25)
        clipped += outcome.clipped
        if not outcome.skipped:
            assert outcome.norm == pytest.approx(norm.item(), rel=1e-4)
    assert clipped > 25
    assert control.scale == scaler.get_scale()
    for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
        # torch multiplies by 1/scale and by the coefficient one after the other, ours by their product: one rounding
        # error per step, which adaptive optimizers magnify.
        torch.testing.assert_close(mine, their, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, math.inf])
def test_one_step_clipped_by_any_norm_is_torchs(order, device):
    (model, optimizer), (theirs, their_optimizer) = twins(lambda ps: torch.optim.SGD(ps, lr=1.0))
    model.to(device)
    control = GradientControl(optimizer, clip=ClipByNorm(0.01, order=order))
    scaler = torch.amp.GradScaler("cpu")
    x, y, _ = next(batches(1))
    control.backward(loss_of(model, x.to(device), y.to(device)))
    scaler.scale(loss_of(theirs, x, y)).backward()
    outcome = control.step()
    norm = torch_step(scaler, their_optimizer, theirs, 0.01, order)
    assert outcome.clipped
    assert outcome.limit == 0.01
    assert outcome.norm == pytest.approx(norm.item(), rel=1e-5)
    for mine, their in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), their, rtol=1e-5, atol=1e-7)


def test_several_optimizers_share_one_scale_and_one_norm(device):
    p, q = parameter(0.0, 0.0, device=device), parameter(0.0, 0.0, 0.0, device=device)
    one, two = torch.optim.SGD([p], lr=1.0), torch.optim.SGD([q], lr=1.0, fused=True)
    control = GradientControl(one, two, clip=1.0)
    outcome = take_step(control, (p, torch.tensor([3.0, 4.0])), (q, torch.tensor([0.0, 0.0, 12.0])))
    assert outcome.norm == pytest.approx(13.0, rel=1e-7)
    torch.testing.assert_close(-p.detach().cpu(), torch.tensor([0.23076922, 0.30769229]))
    torch.testing.assert_close(-q.detach().cpu(), torch.tensor([0.0, 0.0, 0.92307687]))


def test_accumulating_several_losses_equals_one_big_batch(device):
    # Halves and quarters: every sum is exact, so the order of additions does not matter.
    x = torch.tensor([[1.0, 0.5], [0.25, 2.0], [1.5, 1.0], [0.5, 0.75]], device=device)

    def run(sizes):
        p = parameter(0.5, -0.25, device=device)
        optimizer = torch.optim.SGD([p], lr=0.5, momentum=0.5)
        control = GradientControl(optimizer, clip=1e6, scale=DynamicScale(init_scale=8.0, growth_interval=5))
        for _ in range(6):
            control.zero_grad()
            for part in x.split(sizes):
                control.backward((part @ p).sum() / 4)
            outcome = control.step()
        return contents(optimizer), outcome.norm, outcome.step, control.scale

    whole = run([4])
    assert whole[2:] == (6, 16.0)
    assert_same(run([1, 1, 1, 1]), whole)
    assert_same(run([3, 1]), whole)


numbers = st.one_of(st.floats(-1e6, 1e6, width=32, allow_subnormal=False), st.sampled_from([INF, -INF, NAN, 0.0]))


@settings(max_examples=40)
@given(
    script=st.lists(st.lists(numbers, min_size=3, max_size=3), min_size=1, max_size=6),
    name=st.sampled_from(sorted(set(OPTIMIZERS) - {"SGD momentum fused", "SGD nesterov fused", "SGD dampening fused"})),
    interval=st.integers(1, 3),
)
def test_any_sequence_of_gradients_leaves_what_torchs_scaler_leaves(script, name, interval):
    p, q = parameter(1.0, -2.0, 3.0), parameter(1.0, -2.0, 3.0)
    mine, theirs = OPTIMIZERS[name]([p]), OPTIMIZERS[name]([q])
    control = GradientControl(mine, scale=DynamicScale(init_scale=4.0, growth_interval=interval))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=interval)
    for gradient in script:
        outcome = take_step(control, (p, torch.tensor(gradient)))
        theirs.zero_grad()
        scaler.scale(loss_giving((q, torch.tensor(gradient)))).backward()
        scaler.step(theirs)
        scaler.update()
        assert outcome.skipped == (not all(map(math.isfinite, gradient)))
    assert_same(contents(mine)[0], contents(theirs)[0])


@pytest.mark.parametrize("name", MAKERS)
def test_the_default_device_does_not_matter(name, device):
    p = parameter(1.0, 2.0, device=device)
    optimizer = MAKERS[name]([p])
    control = GradientControl(optimizer, scale=4.0, clip=1.0, give_up_after=2)
    schedule = control.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 2))
    losses = [loss_giving((p, g)) for g in (1.0, NAN, 2.0)]
    with torch.device("meta" if device == "cpu" else device):
        for loss in losses:
            control.zero_grad()
            control.backward(loss)
            outcome = control.step()
            schedule.step()
    assert (outcome.step, outcome.skipped, outcome.norm) == (3, False, pytest.approx(2.0 * 2**0.5))
    assert bool((p < torch.tensor([1.0, 2.0], device=device)).all())
