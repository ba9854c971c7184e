"""`only=` and `as_scaler()` where the device settles steps by itself, and nothing may wait."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import gradilocks.optim
from gradilocks import DynamicScale, GradientControl, HeadroomScale, ZScoreClip

pytestmark = pytest.mark.gpu
FAST = {"init_scale": 2.0**10, "growth_interval": 2}
STEPS = [(1.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (2.0, 0.5), (1.0, 1.0), (0.5, 2.0)]
MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: gradilocks.optim.AdamW(params, lr=0.1),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def pair(make):
    torch.manual_seed(1)
    models = nn.ModuleDict({"d": nn.Linear(300, 20), "g": nn.Linear(300, 20)}).cuda()
    return models, make(models["d"].parameters()), make(models["g"].parameters())


def loss_of(model, factor=1.0):
    rows = torch.linspace(-1, 1, 600, device="cuda").view(2, 300)
    return (model(rows) * factor).square().mean()


def weights(models):
    return [param.detach().clone() for param in models.parameters()]


def one_by_one(models, d, g, step, update, scale):
    for of_d, of_g in STEPS:
        scale(loss_of(models["d"], of_d) + loss_of(models["g"], of_g)).backward()
        step(d)
        step(g)
        update()
        models.zero_grad()
    for of_d, of_g in STEPS:
        for optimizer, model, factor in ((d, models["d"], of_d), (g, models["g"], of_g)):
            optimizer.zero_grad()
            scale(loss_of(model, factor)).backward()
            step(optimizer)
            update()
    return weights(models)


@each_maker
@pytest.mark.parametrize("how", ["only", "scaler", "unbound"])
def test_two_optimizers_stepped_apart_are_those_of_torchs_scaler(make, how):
    models, d, g = pair(make)
    scaler = torch.amp.GradScaler("cuda", **FAST)
    expected = one_by_one(models, d, g, scaler.step, scaler.update, scaler.scale)
    models, d, g = pair(make)
    bound = () if how == "unbound" else (d, g)
    control = GradientControl(*bound, model=models, scale=DynamicScale(**FAST))
    mine = control.as_scaler()
    if how == "only":

        def step(optimizer):
            control.step(only=optimizer)

        found = one_by_one(models, d, g, step, lambda: None, control.scale_loss)
    else:
        found = one_by_one(models, d, g, mine.step, mine.update, mine.scale)
    assert control.scale == scaler.get_scale()
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("scale", [DynamicScale(**FAST), HeadroomScale(), None])
@pytest.mark.parametrize("clip", [None, 0.5, ZScoreClip(warmup=2)])
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_step_of_one_waits_for_the_device(scale, clip):
    models, d, g = pair(MAKERS["ours"])
    control = GradientControl(d, g, model=models, scale=scale, clip=clip, give_up_after=None)
    rows = torch.linspace(-1, 1, 600, device="cuda").view(2, 300)

    def iteration():
        norms = []
        for optimizer, model in ((d, models["d"]), (g, models["g"])):
            optimizer.zero_grad()
            control.backward(model(rows).square().mean())
            norms.append(control.norm(only=optimizer))
            outcome = control.step(only=optimizer)
            norms.append(outcome.tensors["norm"])
        return norms

    for _ in range(3):
        iteration()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [iteration() for _ in range(4)]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for before_d, after_d, before_g, after_g in found:
        assert before_d.item() == pytest.approx(after_d.item(), rel=1e-6)
        assert before_g.item() == pytest.approx(after_g.item(), rel=1e-6)


def test_an_inf_that_is_written_over_after_unscaling_skips_the_step_all_the_same():
    models, d, _ = pair(MAKERS["fused"])
    control = GradientControl(d, model=models)
    scaler = control.as_scaler()
    for spoilt in (False, True, False):
        d.zero_grad()
        scaler.scale(loss_of(models["d"])).backward()
        if spoilt:
            models["d"].weight.grad[0, 1] = math.inf
        before = weights(models["d"])
        scaler.unscale_(d)
        torch.nn.utils.clip_grad_value_(models["d"].parameters(), 1.0)
        scaler.step(d)
        scaler.update()
        assert control.outcome.skipped == spoilt
        same = all(torch.equal(a, b) for a, b in zip(before, weights(models["d"]), strict=True))
        assert same == spoilt
        assert control.outcome.culprits == (("d.weight",) if spoilt else ())
