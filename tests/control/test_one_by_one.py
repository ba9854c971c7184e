"""`only=`: several optimizers under one scale, stepped at different times, as those of a GAN."""

from __future__ import annotations

import copy
import json
import math

import pytest
import torch
from torch import nn

import gradilocks.optim
from gradilocks import (
    ClipByNorm,
    ClipPerGroup,
    DynamicScale,
    GradientControl,
    HeadroomScale,
    StaticScale,
    ZScoreClip,
)
from gradilocks.errors import ScaleMisuse
from gradilocks.runfile import read_run

MAKERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
    "ours": lambda params: gradilocks.optim.AdamW(params, lr=0.1),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
FAST = {"init_scale": 2.0**10, "growth_interval": 2}
STEPS = [(1.0, 1.0), (math.inf, 1.0), (1.0, math.nan), (2.0, 0.5), (1.0, 1.0), (0.5, 2.0)]
"""What the losses of the one and of the other are multiplied by."""


def pair(make=MAKERS["sgd"]):
    torch.manual_seed(1)
    models = nn.ModuleDict({"d": nn.Linear(3, 2), "g": nn.Linear(3, 2)})
    return models, make(models["d"].parameters()), make(models["g"].parameters())


def loss_of(model, factor=1.0):
    return (model(torch.linspace(-1, 1, 6).view(2, 3)) * factor).square().mean()


def weights(models):
    return [param.detach().clone() for param in models.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def by_torch(make, *, together):
    models, d, g = pair(make)
    scaler = torch.amp.GradScaler("cpu", **FAST)
    for of_d, of_g in STEPS:
        if together:
            scaler.scale(loss_of(models["d"], of_d) + loss_of(models["g"], of_g)).backward()
            scaler.step(d)
            scaler.step(g)
            scaler.update()
        else:
            for optimizer, model, factor in ((d, models["d"], of_d), (g, models["g"], of_g)):
                scaler.scale(loss_of(model, factor)).backward()
                scaler.step(optimizer)
                scaler.update()
        models.zero_grad()
    return weights(models), scaler.get_scale()


def by_control(make, *, together, set_to_none=True, **settings):
    models, d, g = pair(make)
    control = GradientControl(d, g, model=models, scale=DynamicScale(**FAST), **settings)
    for of_d, of_g in STEPS:
        if together:
            factors = (of_d, of_g)
            control.backward(loss_of(models["d"], of_d) + loss_of(models["g"], of_g))
            outcomes = control.step(only=d), control.step(only=g)
        else:
            factors = (of_d, of_g)
            d.zero_grad(set_to_none)
            control.backward(loss_of(models["d"], of_d))
            first = control.step(only=d)
            g.zero_grad(set_to_none)
            control.backward(loss_of(models["g"], of_g))
            outcomes = first, control.step(only=g)
        control.zero_grad(set_to_none)
        assert [each.skipped for each in outcomes] == [not math.isfinite(f) for f in factors]
    return weights(models), control.scale


@each_maker
@pytest.mark.parametrize("together", [True, False], ids=["one loss", "a loss each"])
def test_two_optimizers_stepped_apart_are_those_of_torchs_scaler(make, together):
    if make is MAKERS["ours"]:
        expected = by_torch(MAKERS["fused"], together=together)
    else:
        expected = by_torch(make, together=together)
    found = by_control(make, together=together)
    assert found[1] == expected[1]
    pairs = found[0], expected[0]
    close = [torch.allclose(a, b, rtol=1e-6, atol=1e-7) for a, b in zip(*pairs, strict=True)]
    assert all(close)
    if make is not MAKERS["ours"]:
        assert same(found[0], expected[0])


def test_gradients_that_are_zeroed_in_place_count_as_cleared():
    assert same(
        by_control(MAKERS["sgd"], together=False, set_to_none=False)[0],
        by_control(MAKERS["sgd"], together=False)[0],
    )


def test_each_has_a_norm_a_limit_and_a_decision_of_its_own():
    models, d, g = pair()
    control = GradientControl(d, g, model=models, clip=0.5)
    control.backward(loss_of(models["d"], 20.0) + loss_of(models["g"], 0.01))
    truth = [
        torch.cat([p.grad.flatten() / control.scale for p in m.parameters()]).norm().item()
        for m in (models["d"], models["g"])
    ]
    outcomes = control.step(only=d), control.step(only=g)
    assert [each.norm for each in outcomes] == pytest.approx(truth, rel=1e-6)
    assert [each.clipped for each in outcomes] == [True, False]
    assert [each.step for each in outcomes] == [1, 1]
    assert control.outcome is outcomes[1]


def test_gradients_that_wait_move_with_the_scale():
    models, d, g = pair()
    control = GradientControl(d, g, scale=DynamicScale(init_scale=64.0, growth_interval=1))
    control.backward(loss_of(models["g"]))
    truth = [param.grad / 64.0 for param in models["g"].parameters()]
    control.backward(loss_of(models["d"]))
    control.step(only=d)
    assert control.scale == 128.0
    d.zero_grad()
    control.backward(loss_of(models["d"], 3.0))  # The scale moves; g still waits.
    assert all(
        torch.equal(p.grad, t * 128.0) for p, t in zip(models["g"].parameters(), truth, strict=True)
    )
    before = weights(models["g"])
    assert not control.step(only=g).skipped
    for param, old, gradient in zip(models["g"].parameters(), before, truth, strict=True):
        assert torch.allclose(param, old - 0.1 * gradient, rtol=1e-6)


def test_what_waits_unscaled_stays_as_it_is_when_the_scale_moves():
    models, d, g = pair()
    control = GradientControl(d, g, scale=DynamicScale(init_scale=64.0, growth_interval=1))
    control.backward(loss_of(models["g"]) + loss_of(models["d"]))
    control.unscale_(only=g)
    truth = [param.grad.clone() for param in models["g"].parameters()]
    control.step(only=d)
    assert control.scale == 128.0
    grads = [param.grad for param in models["g"].parameters()]
    assert same(grads, truth)
    assert control.norm(only=g).item() == pytest.approx(
        torch.cat([t.flatten() for t in truth]).norm().item(), rel=1e-6
    )
    assert not control.step(only=g).skipped


def test_gradients_of_the_last_step_that_are_added_to_are_refused():
    models, d, g = pair()
    control = GradientControl(d, g)
    for _ in range(2):
        control.backward(loss_of(models["d"]))
        if _ == 0:
            control.step(only=d)
    with pytest.raises(ScaleMisuse, match="zero_grad\\(only=optimizer\\)"):
        control.step(only=d)


def test_a_step_of_all_after_a_step_of_one_is_refused():
    models, d, g = pair()
    control = GradientControl(d, g)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    control.step(only=d)
    before = weights(models)
    with pytest.raises(ScaleMisuse, match="SGD has stepped on its gradients already"):
        control.step()
    control.zero_grad(only=d)
    assert not control.step().skipped
    assert same(weights(models["d"]), before[:2])
    assert not same(weights(models["g"]), before[2:])


def test_an_unscaled_part_is_not_stepped_with_the_rest():
    models, d, g = pair()
    control = GradientControl(d, g)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    control.unscale_(only=d)
    with pytest.raises(ScaleMisuse, match="alone are unscaled"):
        control.step()
    control.step(only=d)
    control.step(only=g)


def test_unscaling_all_unscales_for_steps_of_one():
    models, d, g = pair()
    control = GradientControl(d, g)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    control.step(only=d)
    control.zero_grad()
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    truth = torch.cat([p.grad.flatten() for p in models["d"].parameters()]).norm() / control.scale
    control.unscale_()
    assert control.unscaled
    assert control.step(only=d).norm == pytest.approx(truth.item(), rel=1e-6)


def test_another_optimizer_is_refused_by_name():
    models, d, g = pair()
    control = GradientControl(d)
    control.backward(loss_of(models["d"]))
    with pytest.raises(ValueError, match=r"only= must be one of .*\(SGD\), got another SGD"):
        control.step(only=g)
    with pytest.raises(ValueError, match="got another int"):
        control.step(only=3)


def test_the_only_optimizer_there_is_is_the_whole():
    models, d, _ = pair()
    control = GradientControl(d, scale=DynamicScale(init_scale=8.0, growth_interval=1))
    control.backward(loss_of(models["d"]))
    control.step(only=d)
    assert control.scale == 16.0


@pytest.mark.parametrize("scale", [DynamicScale(**FAST), HeadroomScale(), StaticScale(8.0), None])
def test_a_checkpoint_goes_on_bit_for_bit(scale):
    def train(models, d, g, control, steps):
        for of_d, of_g in steps:
            for optimizer, model, factor in ((d, models["d"], of_d), (g, models["g"], of_g)):
                optimizer.zero_grad()
                control.backward(loss_of(model, factor))
                control.step(only=optimizer)
        return weights(models)

    def made():
        models, d, g = pair()
        return (
            models,
            d,
            g,
            GradientControl(
                d, g, model=models, scale=scale, clip=ZScoreClip(warmup=2), give_up_after=None
            ),
        )

    whole = train(*made(), STEPS)
    first = made()
    train(*first, STEPS[:3])
    saved = json.loads(json.dumps(first[3].state_dict()))
    copied, second = copy.deepcopy(first), made()
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    second[2].load_state_dict(first[2].state_dict())
    second[3].load_state_dict(saved)
    assert same(train(*second, STEPS[3:]), whole)
    assert second[3].outcome.step == len(STEPS)
    assert same(train(*copied, STEPS[3:]), whole)


def test_a_schedule_waits_for_its_own_optimizer_alone():
    models, d, g = pair()
    control = GradientControl(d, g)
    schedules = [
        control.scheduler(torch.optim.lr_scheduler.ExponentialLR(each, gamma=0.5))
        for each in (d, g)
    ]
    for of_d, of_g in [(math.inf, 1.0), (1.0, math.nan), (1.0, 1.0)]:
        control.backward(loss_of(models["d"], of_d) + loss_of(models["g"], of_g))
        control.step(only=d)
        control.step(only=g)
        control.zero_grad()
        for schedule in schedules:
            schedule.step()
    # A NaN loss of the one, in the sum, does not reach the other's weights.
    assert [each.param_groups[0]["lr"] for each in (d, g)] == [0.1 * 0.25, 0.1 * 0.25]


def test_both_are_recorded_with_their_own_steps_and_losses(tmp_path):
    models, d, g = pair()
    control = GradientControl(d, g, model=models, record=tmp_path / "a.jsonl", clip=ClipByNorm(1.0))
    told = []
    for factor in (1.0, 2.0, 3.0):
        for optimizer, name in ((d, "d"), (d, "d"), (g, "g")):  # Two steps of d to one of g.
            optimizer.zero_grad()
            loss = loss_of(models[name], factor)
            control.backward(loss)
            outcome = control.step(only=optimizer)
            told.append((name == "g", outcome.step, loss.item(), outcome.norm))
    control.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [(s.optimizer == 1, s.step, s.loss, s.norm) for s in run.steps] == [
        (which, step, pytest.approx(loss), pytest.approx(norm)) for which, step, loss, norm in told
    ]
    assert [sorted(each.names) for each in run.optimizers] == [
        ["d.bias", "d.weight"],
        ["g.bias", "g.weight"],
    ]


def test_one_loss_of_two_steps_is_recorded_for_both(tmp_path):
    models, d, g = pair()
    control = GradientControl(d, g, record=tmp_path / "a.jsonl")
    loss = loss_of(models["d"]) + loss_of(models["g"])
    control.backward(loss)
    control.step(only=d)
    control.step(only=g)
    control.recorder.close()
    steps = read_run(tmp_path / "a.jsonl").steps
    assert [step.loss for step in steps] == [pytest.approx(loss.item())] * 2


def test_the_norm_is_there_before_and_after_the_step():
    models, d, g = pair()
    control = GradientControl(d, g, model=models, clip=0.1)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    before = control.norm(), control.norm(only=d)
    assert all(each.shape == () and each.dtype is torch.float32 for each in before)
    outcome = control.step()
    assert before[0].item() == outcome.norm
    assert control.norm().item() == outcome.norm
    control.zero_grad()
    assert control.norm().item() == outcome.norm
    control.backward(loss_of(models["d"], 5.0))
    assert control.norm().item() > outcome.norm
    assert before[1].item() < before[0].item()


def test_optimizers_made_anew_go_on_each_with_what_is_known_of_it():
    def train(control, models, steps):
        for of_d, of_g in steps:
            for optimizer, model, factor in zip(
                control.optimizers, models.values(), (of_d, of_g), strict=True
            ):
                optimizer.zero_grad()
                control.backward(loss_of(model, factor))
                control.step(only=optimizer)
        return weights(models)

    def made():
        models, *_ = pair(plain)
        pairs = [plain(model.parameters()) for model in models.values()]
        return models, GradientControl(*pairs, model=models, clip=ZScoreClip(warmup=2))

    def plain(params):
        return torch.optim.SGD(params, lr=0.1)

    models, control = made()
    expected = train(control, models, STEPS)
    models, control = made()
    train(control, models, STEPS[:4])
    control.bind(*(plain(model.parameters()) for model in models.values()))
    assert same(train(control, models, STEPS[4:]), expected)
    assert control.outcome.step == len(STEPS)


def test_reading_the_scale_between_two_steps_moves_nothing():
    found = []
    for reads in (False, True):
        models, d, g = pair()
        control = GradientControl(d, g, model=models, scale=DynamicScale(**FAST))
        for of_d, of_g in STEPS:
            control.backward(loss_of(models["d"], of_d) + loss_of(models["g"], of_g))
            control.step(only=d)
            if reads:
                ahead = control.scale
                assert control.scale == ahead == control.state_dict()["scale"]
                copy.deepcopy((models, d, g, control))
            control.step(only=g)
            control.zero_grad()
        found.append((weights(models), control.scale))
    assert found[0][1] == found[1][1]
    assert same(found[0][0], found[1][0])


@pytest.mark.parametrize("clears", ["none", "zeros", "control"])
def test_gradients_unscaled_for_a_step_that_never_came_do_not_vouch_for_later_ones(clears):
    models, d, g = pair()
    control = GradientControl(d, g, model=models, scale=256.0)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    control.unscale_(only=d)
    control.unscale_(only=g)
    control.step(only=d)
    if clears == "control":
        control.zero_grad(only=g)
    else:
        g.zero_grad(set_to_none=clears == "none")
    control.backward(loss_of(models["g"], 2.0))
    truth = torch.cat([p.grad.flatten() for p in models["g"].parameters()]).norm().item() / 256.0
    assert control.norm(only=g).item() == pytest.approx(truth, rel=1e-6)
    assert control.step(only=g).norm == pytest.approx(truth, rel=1e-6)


def test_scaled_gradients_added_to_unscaled_ones_are_refused():
    models, d, g = pair()
    control = GradientControl(d, g)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    control.unscale_(only=g)
    control.step(only=d)
    d.zero_grad()
    control.backward(loss_of(models["g"]))
    with pytest.raises(ScaleMisuse, match="added scaled ones to them"):
        control.step(only=g)


def test_unscaling_the_rest_leaves_what_is_unscaled_alone():
    models, d, g = pair()
    control = GradientControl(d, g, scale=256.0)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    truth = [param.grad / 256.0 for param in models.parameters()]
    whole = torch.cat([t.flatten() for t in truth]).norm().item()
    control.unscale_(only=d)
    assert control.norm().item() == pytest.approx(whole, rel=1e-6)
    control.unscale_()
    assert same([param.grad for param in models.parameters()], truth)
    assert control.step().norm == pytest.approx(whole, rel=1e-6)


def test_all_unscaled_one_by_one_may_be_stepped_together():
    models, d, g = pair()
    control = GradientControl(d, g, scale=256.0)
    control.backward(loss_of(models["d"]) + loss_of(models["g"]))
    whole = torch.cat([p.grad.flatten() / 256.0 for p in models.parameters()]).norm().item()
    control.unscale_(only=d)
    control.unscale_(only=g)
    assert control.step().norm == pytest.approx(whole, rel=1e-6)


def test_groups_have_the_same_numbers_alone_and_together():
    def made():
        torch.manual_seed(1)
        models = nn.ModuleDict({"d": nn.Linear(3, 2), "g": nn.Linear(3, 2)})
        optimizers = [
            torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias]}], lr=0.1)
            for model in models.values()
        ]
        limits = ClipPerGroup({0: 1e-1, 1: 1e-2, 2: 1e-3, 3: 1e-4})
        return models, optimizers, GradientControl(*optimizers, model=models, clip=limits)

    norms = []
    for alone in (False, True):
        models, optimizers, control = made()
        control.backward(loss_of(models["d"], 50.0) + loss_of(models["g"], 50.0))
        before = weights(models)
        for only in optimizers if alone else [None]:
            control.step(only=only)
        moved = zip(weights(models), before, strict=True)
        norms.append([((now - old).norm() / 0.1).item() for now, old in moved])
    assert norms[1] == pytest.approx(norms[0], rel=1e-3)
    # As far as weights of float32 tell what was taken from them.
    assert norms[0] == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4], rel=1e-3)


def test_what_is_known_of_one_optimizer_stays_known_beside_others_and_alone_again():
    def train(control, model, steps, only=None):
        for factor in steps:
            control.zero_grad()
            control.backward(loss_of(model, factor))
            control.step(only=only)
        return control.outcome

    factors = [1.0, 2.0, 3.0, 1.0, 2.0, 9.0, 1.0, 12.0]
    models, d, g = pair()
    alone = GradientControl(d, model=models, clip=ZScoreClip(warmup=2))
    expected = train(alone, models["d"], factors)
    models, d, g = pair()
    control = GradientControl(d, model=models, clip=ZScoreClip(warmup=2))
    train(control, models["d"], factors[:3])
    control.bind(g, d)
    train(control, models["d"], factors[3:6], only=d)
    control.bind(d)
    found = train(control, models["d"], factors[6:])
    assert (found.step, found.limit, found.norm) == (8, expected.limit, expected.norm)


def test_another_clip_keeps_the_counts_of_single_optimizers():
    models, d, g = pair()
    control = GradientControl(d, g, model=models, clip=1.0)
    control.backward(loss_of(models["d"]))
    control.step(only=d)
    other = GradientControl(d, g, model=models, clip=1.0)
    other.load_state_dict(control.state_dict())
    other.set_clip(0.5)
    other.zero_grad()
    other.backward(loss_of(models["d"], 30.0))
    outcome = other.step(only=d)
    assert (outcome.step, outcome.limit) == (2, 0.5)
