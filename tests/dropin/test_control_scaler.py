"""`control.as_scaler()`: the calls that frameworks make of a scaler, and what the control does."""

from __future__ import annotations

import json
import math
import pickle

import pytest
import torch
from torch import nn

import gradilocks.optim
from gradilocks import DynamicScale, GradientControl, HeadroomScale, StaticScale, ZScoreClip
from gradilocks.errors import BadState

FAST = {"init_scale": 2.0**10, "growth_interval": 2}
FACTORS = [1.0, math.inf, 0.5, 2.0, math.nan, 1.0, 1.0]
MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.05, fused=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, factor=1.0):
    return (model(torch.linspace(-1, 1, 9).view(3, 3)) * factor).square().mean()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def plainly(scaler, model, optimizer, factor):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, factor)).backward()
    scaler.step(optimizer)
    scaler.update()


def unscaling(scaler, model, optimizer, factor):
    optimizer.zero_grad()
    scaler.scale(loss_of(model, factor)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    scaler.step(optimizer)
    scaler.update()


def accumulating(scaler, model, optimizer, factor):
    optimizer.zero_grad()
    for share in (0.25, 0.75):
        scaler.scale(loss_of(model, factor) * share).backward()
    scaler.step(optimizer, None)  # As Accelerate hands on a closure that is not there.
    scaler.update()


def looking(scaler, model, optimizer, factor):
    before = scaler.get_scale()
    plainly(scaler, model, optimizer, factor)
    assert (scaler.get_scale() < before) == (not math.isfinite(factor))


@each_maker
@pytest.mark.parametrize("loop", [plainly, unscaling, accumulating, looking])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_a_loop_over_torchs_scaler_runs_the_same_over_a_control(make, loop, bound):
    results = []
    for ours in (False, True):
        model = network()
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", **FAST)
        if ours:
            control = GradientControl(*[optimizer] * bound, scale=DynamicScale(**FAST), model=model)
            scaler = control.as_scaler()
            assert isinstance(scaler, torch.amp.GradScaler)
            assert scaler.is_enabled()
        for factor in FACTORS:
            loop(scaler, model, optimizer, factor)
        results.append((weights(model), scaler.get_scale()))
    (expected, scale), (found, of_control) = results
    assert of_control == scale
    assert same(found, expected)


def test_an_inf_that_is_written_over_after_unscaling_skips_the_step_all_the_same():
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    control = GradientControl(optimizer, model=model, scale=DynamicScale(**FAST))
    scaler = control.as_scaler()
    scaler.scale(loss_of(model)).backward()
    model[2].weight.grad[0, 1] = math.inf
    before = weights(model)
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert same(weights(model), before)
    assert control.outcome.skipped
    assert control.outcome.culprits == ("2.weight",)
    assert scaler.get_scale() == FAST["init_scale"] / 2
    plainly(scaler, model, optimizer, 1.0)
    assert not control.outcome.skipped


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_two_optimizers_in_one_iteration_move_the_scale_once(bound):
    results = []
    for ours in (False, True):
        models = nn.ModuleDict({"a": network(), "b": network()})
        pair = [MAKERS["sgd"](model.parameters()) for model in models.values()]
        scaler = torch.amp.GradScaler("cpu", **FAST)
        if ours:
            control = GradientControl(*pair[:bound], scale=DynamicScale(**FAST), model=models)
            if bound == 1:  # It may get others: who has bound it by hand says all that it has.
                with pytest.raises(ValueError, match="only= must be one of"):
                    control.step(only=pair[1])
                return
            scaler = control.as_scaler()
        scales = []
        for factor in FACTORS:
            models.zero_grad()
            loss = loss_of(models["a"], factor) + loss_of(models["b"])
            scaler.scale(loss).backward()
            scaler.unscale_(pair[0])
            scaler.step(pair[0])
            scaler.step(pair[1])
            scaler.update()
            scales.append(scaler.get_scale())
        results.append((weights(models), scales))
    assert results[0][1] == results[1][1]
    assert same(results[0][0], results[1][0])


def test_it_clips_records_and_skips_as_the_control_does(tmp_path):
    results = []
    for by_scaler in (False, True):
        model = network()
        optimizer = MAKERS["sgd"](model.parameters())
        control = GradientControl(optimizer, model=model, clip=0.1)
        scaler = control.as_scaler()
        told = []
        for factor in FACTORS:
            if by_scaler:
                plainly(scaler, model, optimizer, factor)
            else:
                control.zero_grad()
                control.backward(loss_of(model, factor))
                control.step()
            outcome = control.outcome
            told.append((outcome.step, outcome.skipped, outcome.clipped, outcome.culprits))
        results.append((weights(model), told))
    assert results[0][1] == results[1][1]
    assert any(clipped for _, _, clipped, _ in results[0][1])
    assert same(results[0][0], results[1][0])


def test_without_a_scale_it_is_there_all_the_same():
    model = network()
    optimizer = MAKERS["fused"](model.parameters())
    control = GradientControl(scale=None, clip=0.1)
    scaler = control.as_scaler()
    loss = loss_of(model)
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert control.outcome.clipped
    assert scaler.get_scale() == 1.0
    fresh = torch.amp.GradScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    assert fresh.get_scale() == 1.0


def test_calls_out_of_order_are_refused_as_torchs_refuses_them():
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    scaler = GradientControl(optimizer).as_scaler()
    scaler.scale(loss_of(model)).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\) has already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="step\\(\\) has already been called"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="after step"):
        scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="Closure use"):
        scaler.step(optimizer, lambda: None)
    with pytest.raises(ValueError, match="got int"):
        scaler.scale(3)
    with pytest.raises(RuntimeError, match="does not change"):
        scaler.set_growth_factor(3.0)


def test_iterables_and_losses_that_are_not_trained_are_scaled_too():
    model = network()
    scaler = GradientControl(MAKERS["sgd"](model.parameters()), scale=4.0).as_scaler()
    loss = loss_of(model)
    first, second = scaler.scale([loss, loss.detach()])
    assert first.item() == second.item() == pytest.approx(4.0 * loss.item())
    (third,) = list(scaler.scale(iter([loss])))
    assert third.item() == first.item()


@pytest.mark.parametrize("scale", [DynamicScale(**FAST), HeadroomScale(), StaticScale(8.0), None])
def test_its_state_is_the_controls_and_torchs_too(scale):
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    control = GradientControl(optimizer, model=model, scale=scale, clip=ZScoreClip(warmup=2))
    scaler = control.as_scaler()
    for factor in FACTORS[:4]:
        plainly(scaler, model, optimizer, factor)
    saved = json.loads(json.dumps(scaler.state_dict()))
    bare = torch.amp.GradScaler("cpu")
    bare.load_state_dict(saved)
    assert bare.get_scale() == control.scale
    other = GradientControl(optimizer, model=model, scale=scale, clip=ZScoreClip(warmup=2))
    other.as_scaler().load_state_dict(saved)
    assert other.state_dict() == control.state_dict()
    later = GradientControl(model=model, scale=scale, clip=ZScoreClip(warmup=2))
    later.as_scaler().load_state_dict(saved)
    later.as_scaler()._meet(optimizer)
    assert later.state_dict() == control.state_dict()


@pytest.mark.parametrize("scale", [DynamicScale(**FAST), HeadroomScale(), None])
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_a_state_of_torchs_scaler_brings_its_scale(scale, bound):
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    native = torch.amp.GradScaler("cpu", init_scale=2.0**7)
    plainly(native, model, optimizer, 1.0)
    control = GradientControl(*[optimizer] * bound, scale=scale)
    control.as_scaler().load_state_dict(native.state_dict())
    assert control.scale == (1.0 if scale is None else 2.0**7)
    control.as_scaler().load_state_dict({})  # Of a scaler that was not enabled.
    assert control.scale == (1.0 if scale is None else 2.0**7)
    if scale is not None:
        with pytest.raises(BadState):
            control.as_scaler().load_state_dict({**native.state_dict(), "scale": 0.0})


def test_a_new_scale_can_be_set_by_update():
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    scaler = GradientControl(optimizer).as_scaler()
    plainly(scaler, model, optimizer, 1.0)
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    scaler.update(torch.tensor(16.0))
    assert scaler.get_scale() == 16.0


def test_what_frameworks_read_of_torchs_attributes_is_there():
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    scaler = GradientControl(optimizer, scale=DynamicScale(**FAST)).as_scaler()
    scaler._lazy_init_scale_growth_tracker(torch.device("cpu"))
    assert scaler._scale.item() == scaler.get_scale() == FAST["init_scale"]
    assert scaler.get_growth_interval() == FAST["growth_interval"]
    scaler.scale(loss_of(model, math.inf)).backward()
    scaler.step(optimizer)
    assert max(float(v) for v in scaler._found_inf_per_device(optimizer).values()) == 1.0


def test_an_optimizer_that_asks_its_scaler_to_be_stepped_is_stepped_once():
    class Asking:
        """As Accelerate's wrapper: `step` is the scaler's."""

        def __init__(self, inner):
            self.optimizer, self.scaler, self.calls = inner, None, 0

        param_groups = property(lambda self: self.optimizer.param_groups)

        def step(self):
            self.calls += 1
            self.scaler.step(self.optimizer)

    results = []
    for wraps in (False, True):
        model = network()
        optimizer = MAKERS["sgd"](model.parameters())
        outer = Asking(optimizer) if wraps else optimizer
        control = GradientControl(outer, model=model)
        if wraps:
            outer.scaler = control.as_scaler()
        for factor in FACTORS:
            control.zero_grad()
            control.backward(loss_of(model, factor))
            control.step()
        results.append(weights(model))
    assert outer.calls == sum(map(math.isfinite, FACTORS))
    assert same(*results)


def test_it_is_pickled_with_its_control():
    model = network()
    optimizer = gradilocks.optim.AdamW(model.parameters(), lr=0.01)
    scaler = GradientControl(optimizer, model=model, scale=64.0).as_scaler()
    again = pickle.loads(pickle.dumps(scaler))
    assert again.get_scale() == 64.0
    assert again.control.optimizers[0] is not optimizer


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_the_scale_is_that_of_the_iteration_until_update(bound):
    told = []
    for ours in (False, True):
        model = network()
        optimizer = MAKERS["sgd"](model.parameters())
        scaler = torch.amp.GradScaler("cpu", **FAST)
        if ours:
            control = GradientControl(*[optimizer] * bound, scale=DynamicScale(**FAST), model=model)
            scaler = control.as_scaler()
        seen = []
        for factor in FACTORS:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, factor)).backward()
            scaler.unscale_(optimizer)
            found = [float(flag) for flag in scaler._found_inf_per_device(optimizer).values()]
            scaler.step(optimizer)
            before = scaler.get_scale()
            scaler.update()
            seen.append((before, scaler.get_scale(), found))
        told.append(seen)
    assert told[0] == told[1]


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_another_optimizer_over_the_same_parameters_takes_the_place_of_the_first(bound):
    results = []
    for ours in (False, True):
        model = network()
        first = torch.optim.SGD(model[0].parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", **FAST)
        if ours:
            control = GradientControl(*[first] * bound, scale=DynamicScale(**FAST), model=model)
            scaler = control.as_scaler()
        plainly(scaler, model, first, 1.0)
        second = torch.optim.Adam(model.parameters(), lr=0.05)
        for factor in FACTORS:
            plainly(scaler, model, second, factor)
        results.append((weights(model), scaler.get_scale()))
    assert results[0][1] == results[1][1]
    assert same(results[0][0], results[1][0])
    assert control.optimizers == (second,)


def test_what_unscaling_found_counts_at_update_though_nobody_steps():
    model = network()
    optimizer = MAKERS["sgd"](model.parameters())
    control = GradientControl(optimizer, scale=DynamicScale(**FAST))
    scaler = control.as_scaler()
    scaler.scale(loss_of(model, math.inf)).backward()
    scaler.unscale_(optimizer)
    scaler.update()
    assert scaler.get_scale() == FAST["init_scale"] / 2
