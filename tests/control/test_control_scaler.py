"""`control.as_scaler()` behaves as torch.amp.GradScaler for code that takes a scaler."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from control.given_gradients import (
    MAKERS,
    NAN,
    assert_same,
    batches,
    contents,
    loss_giving,
    loss_of,
    parameter,
    small_model,
)
from gradilocks import DynamicScale, GradientControl, HeadroomScale, StaticScale

FAST = {"init_scale": 2.0**10, "growth_interval": 3}


HABITS = ("plain", "clips", "accumulates", "discards bad batches", "looks at the flags")


def iteration(habit, scaler, optimizer, model, batch):
    x, y, factor = batch
    parts = 2 if habit == "accumulates" else 1
    for part in range(parts):
        scaler.scale(loss_of(model, x[part::parts], y[part::parts], factor) / parts).backward()
    if habit not in ("plain", "accumulates"):
        scaler.unscale_(optimizer)
    if habit == "clips":
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    if habit == "looks at the flags":
        found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        assert sum(flag.item() for flag in found) in (0.0, 1.0)
        scaler.step(optimizer, None)
    elif habit != "discards bad batches" or all(bool(p.grad.isfinite().all()) for p in model.parameters()):
        scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=habit != "clips")


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("name", MAKERS)
def test_a_loop_over_torchs_scaler_runs_the_same_over_a_control(name, habit):
    mine = small_model()
    theirs = copy.deepcopy(mine)
    optimizer, other = (MAKERS[name](model.parameters()) for model in (mine, theirs))
    control = GradientControl(optimizer, model=mine, scale=DynamicScale(**FAST))
    scaler, torchs = control.as_scaler(), torch.amp.GradScaler("cpu", **FAST)
    for batch in batches(12, {4, 5, 9}):
        iteration(habit, scaler, optimizer, mine, batch)
        iteration(habit, torchs, other, theirs, batch)
        assert scaler.get_scale() == torchs.get_scale()
        assert scaler._get_growth_tracker() == torchs._get_growth_tracker()
    assert_same(contents(optimizer), contents(other))


def test_it_clips_and_reports_as_the_control_does():
    p = parameter(0.0, 0.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer, clip=1.0)
    records = []
    control.subscribe(records.append)
    scaler = control.as_scaler()
    scaler.scale(loss_giving((p, torch.tensor([3.0, 4.0])), value=2.0)).backward()
    assert scaler.step(optimizer) is None
    scaler.update()
    assert control.outcome.clipped
    assert records[0].loss.item() == 2.0
    assert p.tolist() == pytest.approx([-0.6, -0.8])


def test_without_a_scale_it_still_skips_and_clips():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradientControl(optimizer, scale=None, clip=0.5).as_scaler()
    assert scaler.is_enabled()
    assert scaler.get_scale() == 1.0
    for gradient in (8.0, NAN):
        optimizer.zero_grad()
        scaler.scale(loss_giving((p, gradient))).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert p.item() == pytest.approx(0.5)


def test_calls_out_of_order_raise_as_torchs_do():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradientControl(optimizer).as_scaler()
    with pytest.raises(RuntimeError):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError):
        scaler.update()
    scaler.scale(p.sum()).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called on this optimizer"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\) has already been called since the last update\(\)"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) is being called after step\(\)"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(RuntimeError, match="Closure use is not currently supported"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(ValueError, match="not an optimizer of the control"):
        scaler.step(torch.optim.SGD([parameter(1.0)], lr=1.0))


def test_iterables_and_losses_that_are_not_trained_are_scaled_too():
    p = parameter(1.0)
    scaler = GradientControl(torch.optim.SGD([p], lr=1.0), scale=4.0).as_scaler()
    pair = scaler.scale([p.sum(), (p.sum() * 2, torch.ones(()))])
    assert isinstance(pair, list)
    assert isinstance(pair[1], tuple)
    assert [pair[0].item(), pair[1][0].item(), pair[1][1].item()] == [4.0, 8.0, 4.0]
    assert [x.item() for x in scaler.scale(x for x in (p.sum(), p.sum()))] == [4.0, 4.0]
    with pytest.raises(ValueError, match="outputs must be a Tensor or an iterable of Tensors"):
        scaler.scale(3.0)


@pytest.mark.parametrize("scale", [DynamicScale(**FAST), HeadroomScale(), StaticScale(8.0), None])
def test_its_state_is_the_controls_and_torchs(scale):
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    control = GradientControl(optimizer, scale=scale)
    scaler = control.as_scaler()
    assert scaler.state_dict() == control.state_dict()
    torchs = torch.amp.GradScaler("cpu")
    torchs.load_state_dict(scaler.state_dict())
    assert torchs.get_scale() == scaler.get_scale()
    scaler.load_state_dict(torch.amp.GradScaler("cpu", init_scale=512.0).state_dict())
    assert control.scale == {DynamicScale: 512.0, HeadroomScale: 512.0, StaticScale: 8.0}.get(type(scale), 1.0)
    with pytest.raises(RuntimeError, match="source state dict is empty"):
        scaler.load_state_dict({})


def test_what_frameworks_read_is_there():
    p = parameter(1.0)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scaler = GradientControl(optimizer, scale=DynamicScale(**FAST)).as_scaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert bool(scaler)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 3)
    scaler.scale(p.sum()).backward()
    assert scaler._scale.item() == 2.0**10
    assert scaler._growth_tracker.item() == 0
    scaler.step(optimizer)
    (flag,) = scaler._found_inf_per_device(optimizer).values()
    assert flag.item() == 0.0
    scaler.update()
    scaler.scale(p.sum())
    scaler.update(4.0)
    assert scaler.get_scale() == 4.0
    for setter, name in (
        (scaler.set_growth_factor, "growth_factor"),
        (scaler.set_backoff_factor, "backoff_factor"),
        (scaler.set_growth_interval, "growth_interval"),
    ):
        with pytest.raises(RuntimeError, match=f"{name} cannot be changed"):
            setter(3)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(scaler)
    assert "as_scaler()" in repr(scaler)
