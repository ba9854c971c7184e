"""Optimizers of every kind receive unscaled gradients: fused ones by arguments, others in place."""

from __future__ import annotations

from functools import partial, wraps

import pytest
import torch

import gradilocks
from control.given_gradients import INF, NAN, OPTIMIZERS, OWN_OPTIMIZERS, loss_giving, parameter, take_step
from gradilocks import GradientControl, kernels


class Plain:
    """Not a torch optimizer: `param_groups`, `zero_grad` and `step`."""

    def __init__(self, params):
        self.param_groups = [{"params": list(params), "lr": 1.0}]
        self.steps = 0

    def zero_grad(self, set_to_none=True):
        for p in self.param_groups[0]["params"]:
            p.grad = None

    def step(self):
        self.steps += 1
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= p.grad


class Delegating:
    """Attributes set on it, such as `grad_scale`, do not reach the optimizer whose methods it has."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)


class Amsgrad(torch.optim.Adam):
    """A subclass of a fused optimizer with a step of its own, which ignores `grad_scale`."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


class TakesScaler(torch.optim.Optimizer):
    """The older contract of apex: `step` takes the scaler."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1.0})
        self._step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure=None, grad_scaler=None):
        assert grad_scaler is None
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad


def partly_fused(params):
    """One of the groups is not fused."""
    return torch.optim.SGD([{"params": params, "fused": True}, {"params": [torch.zeros_like(params[0])]}], lr=1.0)


WITH_OWN_STEP = {
    "Plain": Plain,
    "Amsgrad": lambda ps: Amsgrad(ps, lr=1.0, fused=True),
    "TakesScaler": TakesScaler,
    "partly fused": partly_fused,
    "delegates to fused": lambda ps: Delegating(torch.optim.SGD(ps, lr=1.0, fused=True)),
    "delegates to ours": lambda ps: Delegating(gradilocks.optim.SGD(ps, lr=1.0)),
}


@pytest.mark.parametrize("make", WITH_OWN_STEP.values(), ids=WITH_OWN_STEP)
@pytest.mark.parametrize("bad", [False, True])
def test_a_step_of_its_own_gets_unscaled_clipped_gradients_and_is_not_called_for_a_skip(make, bad, device):
    p = parameter(0.0, 0.0, device=device)
    control = GradientControl(make([p]), clip=1.0)
    take_step(control, (p, torch.tensor([3.0, INF if bad else 4.0])))
    assert (-p).tolist() == pytest.approx([0.0, 0.0] if bad else [0.6, 0.8], rel=1e-6)


def with_schedule(params):
    """torch's schedulers wrap `step`."""
    optimizer = OPTIMIZERS["AdamW fused"](params)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer


def fused_in_groups(kind):
    """As torchtitan does. torch sets its flag `_step_supports_amp_scaling` only for `fused=True` in the constructor."""
    return lambda params: kind([{"params": params, "fused": True}], lr=0.1)


FUSED = {
    **{name: make for name, make in (OPTIMIZERS | OWN_OPTIMIZERS).items() if "fused" in name or name.startswith("own")},
    "with a scheduler": with_schedule,
    **{f"{name} groups": fused_in_groups(getattr(torch.optim, name)) for name in ("Adam", "AdamW", "SGD")},
}


@pytest.mark.parametrize("name", FUSED)
def test_a_fused_optimizer_unscales_and_clips_by_itself(name, device, monkeypatch):
    p = parameter(1.0, 2.0, device=device)
    control = GradientControl(FUSED[name]([p]), clip=1.0)
    take_step(control, (p, 1.0))  # torch creates momentum buffers in the first step.
    monkeypatch.setattr(kernels, "multiply_", lambda *_: pytest.fail("the gradients were multiplied in place"))
    assert take_step(control, (p, 3.0)).clipped
    before = p.detach().clone()
    assert take_step(control, (p, NAN)).skipped
    assert torch.equal(p, before)


@pytest.mark.parametrize("name", ["Adam fused", "SGD", "SGD momentum fused"])
def test_nothing_stays_behind_on_the_optimizer(name, device):
    p = parameter(0.0, device=device)
    optimizer = OPTIMIZERS[name]([p])
    before = set(vars(optimizer))
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    take_step(control, (p, NAN))
    assert set(vars(optimizer)) <= before | {"_opt_called"}


def test_nothing_stays_behind_when_a_fused_step_raises(device):
    p = parameter(1.0, device=device)
    optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    control.zero_grad()
    optimizer.param_groups[0]["betas"] = "broken"
    control.backward(loss_giving((p, 1.0)))
    with pytest.raises((ValueError, TypeError)):
        control.step()
    assert not {"grad_scale", "found_inf"} & set(vars(optimizer))
    optimizer.param_groups[0]["betas"] = (0.9, 0.999)
    assert not take_step(control, (p, 1.0)).skipped


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, fused=True), gradilocks.optim.SGD])
def test_a_grad_scale_that_the_user_has_set_is_multiplied_in_and_kept(make, device):
    p = parameter(0.0, device=device)
    optimizer = make([p], lr=1.0)
    optimizer.grad_scale = preset = torch.tensor(2.0, device=device)
    take_step(GradientControl(optimizer, scale=4.0), (p, 1.0))
    assert p.item() == -0.5
    assert optimizer.grad_scale is preset


def test_a_replaced_step_is_called(device):
    p = parameter(0.0, device=device)
    for optimizer in (
        torch.optim.SGD([p], lr=1.0, fused=True),
        gradilocks.optim.SGD([p], lr=1.0),
    ):
        control = GradientControl(optimizer)
        calls, original = [], optimizer.step

        @wraps(original)  # A control looks through wrappers of torch, not through those of others.
        def step(closure=None, calls=calls, original=original):
            calls.append(closure)
            return original()

        take_step(control, (p, 1.0))
        optimizer.step = step
        take_step(control, (p, 1.0))
        assert calls == [None]
    assert p.item() == -4.0


@pytest.mark.parametrize("make", [torch.optim.SGD, gradilocks.optim.SGD])
def test_step_hooks_of_others_are_called_for_taken_steps(make, device):
    p = parameter(0.0, device=device)
    optimizer = make([p], lr=1.0)
    control = GradientControl(optimizer)
    take_step(control, (p, 1.0))
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    take_step(control, (p, 1.0))
    assert calls == ["before", "after"]
    assert p.item() == -2.0


def test_the_learning_rate_may_change_between_steps(device):
    p = parameter(0.0, device=device)
    for optimizer in (torch.optim.SGD([p], lr=1.0, fused=True), gradilocks.optim.SGD([p], lr=1.0)):
        with torch.no_grad():
            p.zero_()
        control = GradientControl(optimizer)
        for rate in (1.0, 0.5, 0.25):
            optimizer.param_groups[0]["lr"] = rate
            take_step(control, (p, 1.0))
        assert p.item() == -1.75
