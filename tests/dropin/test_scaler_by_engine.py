"""GradScaler with `policy=` and `clip=`: what goes through the engine keeps torch's contract."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gradilocks import GradientControl, GradScaler, HeadroomScale

INF = float("inf")
SETTINGS = {"clip": {"clip": 100.0}, "policy": {"policy": HeadroomScale()}}
each_setting = pytest.mark.parametrize("setting", SETTINGS)
fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["unfused", "fused"])


def made(fused=False, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    return model, optimizer, GradScaler("cpu", model=model, **settings)


def backward(model, scaler, factor=1.0):
    scaler.scale(model(torch.ones(2, 3)).sum() * factor).backward()


@fused_or_not
@each_setting
def test_a_subclass_that_finds_an_overflow_is_heard(setting, fused):
    class Forced(GradScaler):
        def _unscale_grads_(self, *args, **kwargs):
            found = super()._unscale_grads_(*args, **kwargs)
            return {device: torch.ones_like(flag) for device, flag in found.items()}

    model, optimizer, _ = made(fused)
    scaler = Forced("cpu", **SETTINGS[setting])
    before = copy.deepcopy(model.state_dict())
    backward(model, scaler)
    scale = scaler.get_scale()
    scaler.step(optimizer)
    scaler.update()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert scaler.get_scale() == scale / 2
    assert scaler.outcome.skipped


@each_setting
def test_a_subclass_that_steps_by_itself_is_asked_to(setting):
    steps = []

    class Stepping(GradScaler):
        def _maybe_opt_step(self, optimizer, state, *args, **kwargs):
            steps.append(optimizer)
            return super()._maybe_opt_step(optimizer, state, *args, **kwargs)

    model, optimizer, _ = made()
    scaler = Stepping("cpu", **SETTINGS[setting])
    backward(model, scaler)
    scaler.step(optimizer)
    assert steps == [optimizer]


@fused_or_not
@each_setting
def test_an_overflow_that_somebody_has_cleaned_up_since_is_told_with_its_culprit(setting, fused):
    model, optimizer, scaler = made(fused, **SETTINGS[setting])
    backward(model, scaler)
    model.weight.grad[0, 1] = INF
    scaler.unscale_(optimizer)
    model.weight.grad.nan_to_num_(posinf=0.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome.skipped
    assert scaler.outcome.culprits == ("weight",)


def test_after_unscale_a_policy_without_a_clip_does_not_look_again_as_torch_does_not():
    model, optimizer, scaler = made(policy=HeadroomScale())
    before = model.weight.detach().clone()
    backward(model, scaler)
    scaler.unscale_(optimizer)
    model.weight.grad[0, 1] = float("nan")
    scaler.step(optimizer)
    assert not torch.equal(model.weight, before)
    assert not scaler.outcome.skipped


def test_a_checkpoint_does_not_grow_from_one_resume_to_the_next():
    model, optimizer, scaler = made(clip=1.0)
    sizes = []
    for _ in range(4):
        backward(model, scaler)
        scaler.step(optimizer)
        scaler.update()
        saved = scaler.state_dict()
        sizes.append(len(saved["gradilocks_scaler"]["clip"]["states"]) if saved else 0)
        scaler = GradScaler("cpu", clip=1.0)
        scaler.load_state_dict(saved)
    assert sizes == [1] * 4


@pytest.mark.parametrize("by", ["control", "scaler"])
def test_a_fused_sgd_whose_gradients_are_clipped_to_nothing_starts_its_buffers_clean(by):
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)
    driver = GradientControl(optimizer, clip=0.0) if by == "control" else None
    scaler = GradScaler("cpu", clip=0.0)
    for some in (params[:1], params):  # The second gets its first gradient later.
        optimizer.zero_grad()
        loss = sum(param.sum() for param in some)
        if driver is not None:
            driver.backward(loss)
            driver.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.equal(param, torch.ones(2)) for param in params)


@pytest.mark.parametrize("setting", [{}, *SETTINGS.values()], ids=["plain", *SETTINGS])
@pytest.mark.parametrize("gone", ["nothing", "scaler", "optimizer", "memory"])
def test_a_kept_outcome_knows_its_culprit(setting, gone):
    model, optimizer, scaler = made(**setting)
    backward(model, scaler)
    model.weight.grad[0, 1] = INF
    scaler.step(optimizer)
    scaler.update()
    outcome = scaler.outcome
    model.weight.requires_grad_(False)  # Another set of gradients follows.
    optimizer.zero_grad()
    backward(model, scaler)
    scaler.step(optimizer)
    scaler.update()
    if gone == "memory":
        scaler.load_state_dict(scaler.state_dict())
    if gone == "scaler":
        del scaler
    if gone == "optimizer":
        del optimizer
    assert outcome.culprits == ("weight",)


def test_a_controls_outcome_knows_a_culprit_that_has_no_gradient_any_more():
    model, optimizer, _ = made()
    control = GradientControl(optimizer, model=model)
    control.backward(model(torch.ones(2, 3)).sum())
    model.weight.grad[0, 1] = INF
    outcome = control.step()
    control.zero_grad()
    model.weight.requires_grad_(False)
    control.backward(model(torch.ones(2, 3)).sum())
    control.step()
    assert outcome.culprits == ("weight",)


def test_a_loss_whose_backward_raises_is_not_counted_among_those_of_the_step():
    model, optimizer, _ = made()
    control = GradientControl(optimizer, model=model, scale=HeadroomScale())

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value * float("nan")

        @staticmethod
        def backward(ctx, grad):
            raise MemoryError("no room")

    with pytest.raises(MemoryError):
        control.backward(Failing.apply(model(torch.ones(2, 3)).sum()))
    control.backward(model(torch.ones(2, 3)).sum())
    model.weight.grad[0, 1] = INF
    assert control.step().describe() == "Inf in weight"
    assert control.scale == 128.0
