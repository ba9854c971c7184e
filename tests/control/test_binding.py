"""Optimizers that come after the control, and others in the place of those that it had."""

from __future__ import annotations

import gc
import math
import pickle
import weakref

import pytest
import torch
from torch import nn

from gradilocks import AdaGC, ClipPerGroup, DynamicScale, GradientControl, ZScoreClip, read_run
from gradilocks.errors import BadState
from gradilocks.optim import AdamW


def network():
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model, factor=1.0):
    return (model(torch.linspace(-1, 1, 9).view(3, 3)) * factor).square().mean()


def weights(model):
    return [param.detach().clone() for param in model.parameters()]


def train(control, model, factors):
    for factor in factors:
        control.backward(loss_of(model, factor))
        control.step()
        control.zero_grad()
    return weights(model)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


FACTORS = [1.0, 3.0, math.inf, 0.5, 40.0, 1.0, 2.0]


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05)


def test_a_control_bound_later_is_the_same_as_one_that_had_its_optimizer_at_once():
    model = network()
    expected = train(GradientControl(sgd(model), model=model, clip=1.0), model, FACTORS)
    model = network()
    control = GradientControl(clip=1.0)
    assert repr(control).startswith("GradientControl(no optimizer yet, ")
    assert control.optimizers == ()
    optimizer = sgd(model)
    control.bind(optimizer, model=model)
    assert control.optimizers == (optimizer,)
    assert same(train(control, model, FACTORS), expected)


def test_a_loss_is_scaled_before_the_optimizer_is_known():
    model = network()
    control = GradientControl(scale=64.0)
    scaled = control.scale_loss(loss_of(model))
    assert scaled.item() == pytest.approx(64.0 * loss_of(model).item())
    scaled.backward()
    control.bind(sgd(model), model=model)
    outcome = control.step()
    assert not outcome.skipped
    truth = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    assert outcome.norm == pytest.approx(truth, rel=1e-6)  # SGD: unscaled in place by now.


def test_a_step_without_an_optimizer_says_the_way_out():
    control = GradientControl()
    control.scale_loss(loss_of(network())).backward()
    with pytest.raises(ValueError, match=r"no optimizer yet.*control\.bind\(optimizer\)"):
        control.step()
    with pytest.raises(TypeError, match="got none"):
        control.bind()
    with pytest.raises(TypeError, match="got 'Sequential'"):
        control.bind(network())


@pytest.mark.parametrize("clip", [ZScoreClip(warmup=2), AdaGC(warmup=2)])
def test_an_optimizer_made_anew_goes_on_where_the_one_before_was(clip):
    def made():
        model = network()
        return model, GradientControl(sgd(model), model=model, clip=clip)

    model, control = made()
    expected = train(control, model, FACTORS)
    model, control = made()
    train(control, model, FACTORS[:5])
    control.bind(sgd(model))  # Plain SGD has no state of its own.
    assert same(train(control, model, FACTORS[5:]), expected)
    assert control.outcome.step == len(FACTORS)


def test_binding_to_other_parameters_than_were_learned_of_changes_nothing():
    model = network()
    control = GradientControl(sgd(model), model=model, clip=AdaGC(warmup=2))
    train(control, model, FACTORS[:5])
    twin = network()
    expected = train(GradientControl(sgd(twin), model=twin, clip=AdaGC(warmup=2)), twin, FACTORS)
    other = nn.Linear(2, 2)
    with pytest.raises(BadState, match="AdaGC"):
        control.bind(sgd(other), model=other)
    assert same(train(control, model, FACTORS[5:]), expected)


def test_a_state_that_is_loaded_before_the_optimizer_comes_counts_from_then_on():
    model = network()
    settings = {
        "scale": DynamicScale(init_scale=32.0, growth_interval=2),
        "clip": AdaGC(warmup=2),
    }
    first = GradientControl(sgd(model), model=model, **settings)
    train(first, model, FACTORS[:5])
    saved, kept = first.state_dict(), weights(model)
    expected = train(first, model, FACTORS[5:])
    model = network()
    with torch.no_grad():
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)
    second = GradientControl(**settings)
    second.load_state_dict(saved)
    assert second.scale == saved["scale"] != 32.0
    assert second.state_dict() == saved
    second.bind(sgd(model), model=model)
    assert second.state_dict() == saved
    assert same(train(second, model, FACTORS[5:]), expected)


def test_a_recorder_waits_for_the_optimizer(tmp_path):
    model = network()
    control = GradientControl(record=tmp_path / "a.jsonl")
    control.bind(sgd(model), model=model)
    train(control, model, FACTORS)
    control.bind(sgd(model))
    train(control, model, [1.0])
    control.recorder.close()
    run = read_run(tmp_path / "a.jsonl")
    assert [step.skipped for step in run.steps] == [not math.isfinite(f) for f in FACTORS] + [False]
    assert [step.step for step in run.steps][: len(FACTORS)] == list(range(1, len(FACTORS) + 1))
    assert "0.weight" in run.optimizers[0].names


def test_another_clip_holds_from_the_next_step_on():
    model = network()
    control = GradientControl(sgd(model), model=model)
    control.backward(loss_of(model, 30.0))
    assert not control.step().clipped
    control.zero_grad()
    control.set_clip(0.01)
    control.backward(loss_of(model, 30.0))
    outcome = control.step()
    assert outcome.clipped
    assert outcome.limit == pytest.approx(0.01)
    control.zero_grad()
    control.set_clip(None)
    control.backward(loss_of(model, 30.0))
    assert control.step().limit == math.inf
    with pytest.raises(ValueError, match="nowhere"):
        control.set_clip(ClipPerGroup({"nowhere.*": 1.0}))


def test_gradients_that_somebody_else_has_unscaled_are_not_unscaled_again():
    model = network()
    control = GradientControl(sgd(model), model=model, scale=256.0)
    control.backward(loss_of(model))
    assert not control.unscaled
    for param in model.parameters():
        param.grad /= 256.0
    truth = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    control.assume_unscaled()
    assert control.unscaled
    assert control.norm().item() == pytest.approx(truth, rel=1e-6)
    assert control.step().norm == pytest.approx(truth, rel=1e-6)
    assert not control.unscaled


def test_a_first_optimizer_that_does_not_fit_the_loaded_state_leaves_it_waiting():
    model = network()
    first = GradientControl(sgd(model), model=model, clip=AdaGC(warmup=2))
    train(first, model, FACTORS[:5])
    second = GradientControl(clip=AdaGC(warmup=2))
    second.load_state_dict(first.state_dict())
    other = nn.Linear(2, 2)
    with pytest.raises(BadState, match="AdaGC"):
        second.bind(sgd(other), model=other)
    assert second.optimizers == ()
    second.bind(sgd(model), model=model)
    assert second.state_dict() == first.state_dict()


@pytest.mark.parametrize("kind", ["ours", "torch's"])
def test_the_controls_own_policies_may_stay_when_a_state_is_loaded(kind):
    model = network()
    if kind == "ours":
        before = GradientControl(sgd(model), model=model, scale=DynamicScale(2.0**7), clip=1.0)
        train(before, model, FACTORS[:2])
        saved = before.state_dict()
    else:
        saved = torch.amp.GradScaler("cpu", init_scale=2.0**7).state_dict()
    own = DynamicScale(2.0**10, growth_interval=3)
    for clip in (0.25, ZScoreClip(), None):
        after = GradientControl(sgd(model), model=model, scale=own, clip=clip)
        limits = after.state_dict()["gradilocks"]["clip_policy"]
        after.load_state_dict(saved, policies="control")
        assert after.scale == 2.0**7
        told = after.state_dict()
        assert told["growth_interval"] == 3
        assert told["gradilocks"]["clip_policy"] == limits
        assert told["gradilocks"]["steps"] == (2 if kind == "ours" else 0)
    fixed = GradientControl(sgd(model), scale=None)
    fixed.load_state_dict(saved, policies="control")
    assert fixed.scale == 1.0
    with pytest.raises(ValueError, match="'checkpoint' or 'control', got 'mine'"):
        fixed.load_state_dict(saved, policies="mine")


# --- let go ---------------------------------------------------------------------------------------


def gone(*models):
    """References to whatever of the models takes memory."""
    return [weakref.ref(each) for m in models for each in (*m.modules(), *m.parameters())]


@pytest.mark.parametrize("clip", [1.0, ZScoreClip(warmup=1), AdaGC(warmup=1)])
@pytest.mark.parametrize("optimizer", [sgd, lambda model: AdamW(model.parameters(), lr=0.05)])
def test_a_control_that_is_released_holds_nothing_and_goes_on_as_if_bound_again(clip, optimizer):
    expected_model, model = network(), network()
    expected = GradientControl(optimizer(expected_model), model=expected_model, clip=clip)
    train(expected, expected_model, FACTORS)
    expected.bind(optimizer(fresh := network()), model=fresh)
    control = GradientControl(optimizer(model), model=model, clip=clip)
    train(control, model, FACTORS[:3])
    assert control.outcome.skipped
    train(control, model, FACTORS[3:])
    held = gone(model)
    control.release()
    control.release()  # There is nothing left to do.
    del model
    gc.collect()
    assert not any(ref() for ref in held)
    assert control.optimizers == ()
    assert control.state_dict()["scale"] == control.scale == expected.scale
    control.bind(optimizer(again := network()), model=again)
    assert same(train(control, again, FACTORS), train(expected, fresh, FACTORS))
    assert control.state_dict() == expected.state_dict()
    assert control.outcome.step == expected.outcome.step == 2 * len(FACTORS)


def test_the_last_outcome_keeps_the_names_of_its_culprits():
    model = network()
    control = GradientControl(sgd(model), model=model)
    control.backward(loss_of(model))
    model[0].weight.grad[0] = math.nan
    control.step()
    control.release()
    assert control.outcome.culprits == ("0.weight",)


def test_what_each_of_several_has_learned_alone_goes_on_in_its_place(tmp_path):
    def stepped(control, models, optimizers):
        for model, optimizer in zip(models, optimizers, strict=True):
            control.backward(loss_of(model))
            control.step(only=optimizer)
            control.zero_grad(only=optimizer)

    def run(release):
        path = tmp_path / f"{release}.jsonl"
        control = GradientControl(clip=ZScoreClip(warmup=1), record=path)
        held = []
        for _ in range(2):
            models = [network(), nn.Linear(3, 1)]
            optimizers = [sgd(model) for model in models]
            control.bind(*optimizers, model=dict(zip("ab", models, strict=True)))
            stepped(control, models, optimizers)
            stepped(control, models, optimizers)
            if release:
                held += gone(*models)
                del models, optimizers
                control.release()
                gc.collect()
                assert not any(ref() for ref in held)
        saved = control.state_dict()
        control.detach().close()
        return saved, [(step.optimizer, step.step, step.norm) for step in read_run(path).steps]

    assert run(release=True) == run(release=False)


def test_a_state_that_is_loaded_after_the_release_counts():
    model = network()
    other = GradientControl(sgd(model), model=model, scale=DynamicScale(init_scale=32.0))
    train(other, model, [1.0, 2.0])
    control = GradientControl(sgd(model), model=model, scale=DynamicScale(init_scale=64.0))
    train(control, model, [1.0])
    control.release()
    control.load_state_dict(other.state_dict())
    assert control.scale == 32.0
    control.bind(sgd(model), model=model)
    train(control, model, [1.0])
    assert control.outcome.step == 3


def test_a_released_control_says_that_it_has_no_optimizer():
    model = network()
    control = GradientControl(sgd(model), model=model)
    control.release()
    with pytest.raises(ValueError, match="has no optimizer yet"):
        control.step()
    assert pickle.loads(pickle.dumps(control)).scale == control.scale
