"""What GradScaler(policy=, clip=) saves, and whose states it goes on with."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
)
from gradilocks.errors import BadState

MEGATRON = {
    "scale": torch.tensor([4096.0]),
    "growth_tracker": 7,
    "hysteresis_tracker": 1,
}
DEEPSPEED = {
    "cur_scale": 512.0,
    "cur_iter": 12,
    "last_overflow_iter": 9,
    "scale_factor": 4.0,
    "scale_window": 50,
    "cur_hysteresis": 1,
}
FAIRSEQ = {"loss_scale": 64.0}
APEX = {"loss_scaler0": {"loss_scale": 2048.0, "unskipped": 3}}


def two_models():
    torch.manual_seed(0)
    return nn.Linear(3, 5), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def stepped(scaler, optimizers, models, *, first=0, last=6):
    for number in range(first, last):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(model(torch.full((2, 3), 0.3 + number)).square().mean()).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def sgd(models):
    return [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]


@pytest.mark.parametrize(
    ("saved", "expected"),
    [
        (MEGATRON, (4096.0, 7)),
        (DEEPSPEED, (512.0, 2)),
        (FAIRSEQ, (64.0, 0)),
        (APEX, (2048.0, 3)),
    ],
)
@pytest.mark.parametrize("policy", [None, DynamicScale()])
def test_states_of_other_systems_are_taken(saved, expected, policy):
    scaler = GradScaler("cpu", policy=policy)
    scaler.load_state_dict(dict(saved))
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == expected
    assert scaler.get_scale() == expected[0]
    if saved is DEEPSPEED:
        kept = scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()
        assert kept == (4.0, 0.25, 50)
    if saved in (MEGATRON, DEEPSPEED) and policy is not None:
        assert state["gradilocks_scaler"]["scale"]["hysteresis"] == 1


def test_a_headroom_scale_does_not_go_on_from_another_systems_rule():
    scaler = GradScaler("cpu", policy=HeadroomScale())
    with pytest.raises(BadState, match=r"Megatron-LM's scaler and needs a DynamicScale"):
        scaler.load_state_dict(dict(MEGATRON))
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ({"scale_window": 0}, "scale_window in the state_dict must be a whole number, got 0"),
        ({"scale_factor": 1.0}, "scale_factor in the state_dict must be above 1, got 1.0"),
        ({"cur_scale": 0.0}, "positive and finite, got 0.0"),
        ({"cur_iter": 3}, "cur_iter must be after last_overflow_iter"),
    ],
)
def test_a_bad_state_of_another_system_is_refused(spoil, words):
    scaler = GradScaler("cpu")
    with pytest.raises(BadState, match=words):
        scaler.load_state_dict({**DEEPSPEED, **spoil})
    assert scaler.get_scale() == 2.0**16


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"policy": HeadroomScale()},
            r"with policy=HeadroomScale\(...\), this scaler has none",
        ),
        ({"clip": ZScoreClip()}, r"saved with clip=ZScoreClip\(...\), this scaler has none"),
    ],
)
def test_a_state_of_policies_is_refused_by_a_scaler_without_them(settings, words):
    saved = GradScaler("cpu", **settings).state_dict()
    scaler = GradScaler("cpu", init_scale=8.0)
    with pytest.raises(BadState, match=words):
        scaler.load_state_dict(saved)
    assert scaler.get_scale() == 8.0


def test_settings_come_from_the_state():
    scaler = GradScaler("cpu", policy=HeadroomScale(margin=2), clip=QuantileClip(0.5, window=8))
    models = two_models()
    stepped(scaler, sgd(models), models)
    other = GradScaler("cpu", policy=HeadroomScale(margin=7), clip=QuantileClip(0.1, window=100))
    other.load_state_dict(scaler.state_dict())
    assert other.state_dict() == scaler.state_dict()
    kept = other.state_dict()["gradilocks_scaler"]
    assert kept["scale"]["policy"]["config"]["margin"] == 2
    assert kept["clip"]["policy"]["config"] == {"quantile": 0.5, "window": 8, "warmup": 0}


def states_in(saved):
    """What a checkpoint holds of each optimizer, which it lists as pairs of a name and a value."""
    states = map(dict, saved["gradilocks_scaler"]["clip"]["states"])
    return [{**state, "memory": dict(state["memory"])} for state in states]


def test_optimizers_find_what_was_learned_of_them_whatever_their_order():
    models = two_models()
    scaler = GradScaler("cpu", clip=AdaGC(warmup=2))
    optimizers = sgd(models)
    stepped(scaler, optimizers, models)
    saved = scaler.state_dict()
    json.loads(json.dumps(saved, allow_nan=False))
    by_size = {tuple(s["sizes"]): s["memory"] for s in states_in(saved)}
    other = GradScaler("cpu", clip=AdaGC(warmup=2))
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    for optimizer, model in list(zip(optimizers, models, strict=True))[::-1]:
        optimizer.zero_grad()
        other.scale(model(torch.ones(2, 3)).square().mean() * float("nan")).backward()
        other.step(optimizer)  # A skipped step teaches nothing.
    other.update()
    learned = states_in(other.state_dict())
    assert [len(state["names"]) for state in learned] == [2, 4]  # In the order of the first run.
    assert {tuple(s["sizes"]): s["memory"] for s in learned} == by_size


@pytest.mark.parametrize("clip", [AdaGC(warmup=2), QuantileClip(0.5, window=8)])
def test_an_optimizer_that_is_new_starts_afresh_and_takes_nobodys_memory(clip, caplog):
    models = two_models()
    optimizers = sgd(models)
    scaler = GradScaler("cpu", clip=clip)
    stepped(scaler, optimizers[:1], models[:1])
    other = GradScaler("cpu", clip=clip)
    other.load_state_dict(scaler.state_dict())
    before = states_in(scaler.state_dict())[0]["memory"]
    stepped(other, optimizers[1:], models[1:], last=1)
    assert "starts afresh for an optimizer of 4 parameters" in caplog.text
    learned = states_in(other.state_dict())
    assert [state["memory"]["count"] for state in learned] == [6, 1]
    assert learned[0]["memory"] == before


def test_two_of_a_size_are_told_apart_by_their_names():
    pair = {name: nn.Linear(3, 2) for name in ("a", "b")}
    optimizers = sgd(pair.values())
    scaler = GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=pair)
    stepped(scaler, optimizers[:1], list(pair.values())[:1], last=2)
    stepped(scaler, optimizers, list(pair.values()), last=3)
    other = GradScaler("cpu", clip=QuantileClip(0.5, window=8), model=pair)
    other.load_state_dict(scaler.state_dict())
    stepped(other, optimizers[1:], list(pair.values())[1:], last=1)
    learned = {
        state["names"][0]: state["memory"]["count"] for state in states_in(other.state_dict())
    }
    assert learned == {"a.weight": 5, "b.weight": 4}


def test_names_go_along_with_a_deep_copy():
    model = nn.Sequential(nn.Linear(3, 2))
    (optimizer,) = sgd([model])
    scaler = GradScaler("cpu", clip=ClipPerGroup({"0.*": 1e-3}), model=model)
    for net, stepper, each in (
        (model, optimizer, scaler),
        copy.deepcopy((model, optimizer, scaler)),
    ):
        stepper.zero_grad()
        each.scale(net(torch.ones(2, 3)).sum()).backward()
        each.step(stepper)
        each.update()
        norms = [param.grad.norm() for param in net.parameters()]
        assert torch.stack(norms).norm() == pytest.approx(1e-3, rel=1e-4)
    alone = copy.deepcopy(GradScaler("cpu", clip=ClipPerGroup({"0.*": 1e-3}), model=model))
    assert alone._model is model


def test_a_rejection_does_not_hide_an_overflow_beside_it():
    params = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([param], lr=0.0) for param in params]
    scaler = GradScaler("cpu", init_scale=1024.0, clip=SkipSpikes(window=4, at_least=2))
    for number in range(6):
        factors = (1.0, 1.0) if number < 4 else (1e5, 1e38)
        for optimizer in optimizers:
            optimizer.zero_grad()
        terms = [(p * f).sum() for p, f in zip(params, factors, strict=True)]
        for term in terms:
            scaler.scale(term).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 256.0


@pytest.mark.parametrize(
    ("make", "saved", "words"),
    [
        (
            lambda: GradientControl(one(), clip=ZScoreClip()),
            lambda: a_scalers(clip=ZScoreClip()),
            "GradScaler whose clip policy ZScoreClip has learned.*policies='control'",
        ),
        (
            lambda: GradientControl(one()),
            lambda: GradScaler("cpu", policy=HeadroomScale()).state_dict(),
            "saved with the scale policy HeadroomScale, this control has DynamicScale",
        ),
        (
            lambda: GradientControl(one()),
            lambda: GradScaler("cpu", clip=1.0).state_dict(),
            "saved with the clip policy ClipByNorm, this control has NoClip",
        ),
        (
            lambda: GradScaler("cpu", clip=1.0),
            lambda: GradientControl(one(), clip=ClipByValue(1.0)).state_dict(),
            "saved with the clip policy ClipByValue, this scaler has ClipByNorm",
        ),
        (
            lambda: GradScaler("cpu", policy=HeadroomScale()),
            lambda: GradientControl(one(), scale=DynamicScale.megatron()).state_dict(),
            "saved with the scale policy DynamicScale, this scaler has HeadroomScale",
        ),
        (
            lambda: GradScaler("cpu"),
            lambda: GradientControl(one(), scale=HeadroomScale()).state_dict(),
            r"the scale policy HeadroomScale; .*policy=HeadroomScale\(.*policies='scaler'",
        ),
        (
            lambda: GradScaler("cpu"),
            lambda: GradientControl(one(), scale=None).state_dict(),
            "takes one with a DynamicScale. Go on with this scaler's own",
        ),
        (
            lambda: GradScaler("cpu", clip=AdaGC()),
            lambda: one_step(GradientControl(one(), clip=ZScoreClip())).state_dict(),
            "whose clip policy ZScoreClip has learned something",
        ),
        (
            lambda: GradScaler("cpu", clip=ZScoreClip()),
            lambda: a_parts(clip=ZScoreClip()),
            "whose clip policy ZScoreClip has learned something",
        ),
        (
            lambda: GradScaler("cpu", policy=HeadroomScale()),
            lambda: torch.amp.GradScaler("cpu").state_dict(),
            "torch's GradScaler and needs a DynamicScale",
        ),
    ],
)
def test_what_would_be_lost_between_the_two_objects_is_refused(make, saved, words):
    loading = make()
    before = loading.state_dict()
    with pytest.raises(BadState, match=words):
        loading.load_state_dict(saved())
    assert loading.state_dict() == before


SAME = {
    "a number": {"clip": 1.0},
    "an order": {"clip": ClipByNorm(1.0, order=3.0)},
    "a chain": {"clip": chain(ClipByNorm(2.0), ClipByValue(1.0))},
    "a policy": {"scale": HeadroomScale(margin=3), "clip": 1.0},
    "a policy alone": {"scale": HeadroomScale(margin=3)},
    "a dynamic one": {"scale": DynamicScale.megatron(init_scale=2.0**9), "clip": 1.0},
    "nothing learned yet": {"clip": QuantileClip(0.5)},
}


def with_policies(scale=None, clip=None):
    return GradScaler("cpu", policy=scale, clip=clip)


@pytest.mark.parametrize("case", SAME)
def test_a_control_and_a_scaler_with_the_same_policies_read_each_other(case, caplog):
    options, optimizer, other = SAME[case], one(), one()
    control = GradientControl(optimizer, **options)
    if case != "nothing learned yet":
        one_step(control)
    scaler = with_policies(**options)
    scaler.load_state_dict(json.loads(json.dumps(control.state_dict())))
    assert scaler.get_scale() == control.scale
    again = GradientControl(other, **options)
    again.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    assert again.scale == control.scale
    for name in ("scale_policy", "scale_state", "hysteresis", "clip_policy"):
        assert again.state_dict()["gradilocks"][name] == control.state_dict()["gradilocks"][name]
    waiting = GradientControl(**options)
    waiting.load_state_dict(scaler.state_dict())
    waiting.bind(one())
    assert waiting.scale == control.scale
    behind = GradientControl(one(), **options).as_scaler()
    behind.load_state_dict(scaler.state_dict())
    assert behind.get_scale() == control.scale
    assert not caplog.records


def test_settings_of_the_other_object_count_and_are_told_of(caplog):
    GradientControl(one(), clip=0.5).load_state_dict(GradScaler("cpu", clip=1.0).state_dict())
    assert "max_norm of ClipByNorm from 0.5 to 1.0" in caplog.messages[-1]
    scaler = GradScaler("cpu", clip=0.5)
    scaler.load_state_dict(GradientControl(one(), clip=1.0).state_dict())
    assert "max_norm of ClipByNorm from 0.5 to 1.0" in caplog.messages[-1]
    assert scaler.state_dict()["gradilocks_scaler"]["clip"]["policy"]["config"]["max_norm"] == 1.0


def test_a_scaler_that_does_not_clip_tells_of_a_control_that_did(caplog):
    GradScaler("cpu").load_state_dict(GradientControl(one(), clip=1.0).state_dict())
    (text,) = caplog.messages
    assert "GradientControl that clips by ClipByNorm, and this GradScaler does not clip" in text


@pytest.mark.parametrize(
    "part",
    [3, {}, {"scale": None}, {"scale": None, "clip": 1}, {"scale": 1, "clip": None},
     {"scale": None, "clip": {"policy": None, "states": 3}},
     {"scale": None, "clip": {"policy": None, "states": ()}}],
)  # fmt: skip
def test_a_scalers_state_that_makes_no_sense_is_refused_by_a_control(part):
    control = GradientControl(one(), clip=1.0)
    before = control.state_dict()
    with pytest.raises(BadState):
        control.load_state_dict({**GradScaler("cpu").state_dict(), "gradilocks_scaler": part})
    assert control.state_dict() == before


def a_scalers(**options):
    """The state of a scaler that has stepped."""
    scaler, (model,) = GradScaler("cpu", **options), two_models()[:1]
    optimizers = sgd([model])
    stepped(scaler, optimizers, [model], last=1)
    return scaler.state_dict()


def a_parts(**options):
    """The state of a control that has stepped an optimizer alone."""
    optimizers = one(), one()
    control = GradientControl(*optimizers, **options)
    control.backward(sum(param.sum() for param in control._all_parameters()))
    control.step(only=optimizers[0])
    return control.state_dict()


def test_a_controls_scale_goes_on_in_a_scaler():
    scaler = GradScaler("cpu")
    scaler.load_state_dict(GradientControl(one(), scale=DynamicScale(init_scale=8.0)).state_dict())
    assert scaler.get_scale() == 8.0


def one():
    return torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)


def one_step(control):
    control.backward(sum(param.sum() for param in control._all_parameters()))
    control.step()
    return control


@pytest.mark.parametrize("kind", ["control", "scaler"])
def test_what_another_setting_kept_is_not_kept_on(kind):
    def made(policy):
        if kind == "control":
            return GradientControl(one(), scale=policy)
        scaler = GradScaler("cpu", policy=policy)
        scaler.scale(torch.ones(()))
        return scaler

    tolerant = made(DynamicScale.fairseq(tolerance=0.2))
    tolerant.load_state_dict(made(DynamicScale()).state_dict())
    made(DynamicScale()).load_state_dict(tolerant.state_dict())
    patient = made(DynamicScale.deepspeed())
    strict = made(DynamicScale())
    strict.load_state_dict(patient.state_dict())
    assert strict.state_dict()["_growth_tracker"] == -1


def test_torchs_settings_are_followed_and_kept_within_bounds():
    theirs = torch.amp.GradScaler("cpu", init_scale=8.0, growth_factor=4.0, growth_interval=5)
    theirs.scale(torch.ones(()))
    scaler = GradScaler("cpu", policy=DynamicScale(growth_interval=3))
    scaler.load_state_dict(theirs.state_dict())
    policy = scaler.state_dict()["gradilocks_scaler"]["scale"]["policy"]
    followed = DynamicScale(growth_factor=4.0, growth_interval=5)
    assert policy == {"name": "DynamicScale", "config": dataclasses.asdict(followed)}
    optimizer = one()
    scales = []
    for _ in range(6):
        optimizer.zero_grad()
        scaler.scale(optimizer.param_groups[0]["params"][0].sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [8.0, 8.0, 8.0, 8.0, 32.0, 32.0]
    high = torch.amp.GradScaler("cpu", init_scale=2.0**40)
    high.scale(torch.ones(()))
    scaler.load_state_dict(high.state_dict())
    assert scaler.get_scale() == 2.0**32


def test_a_state_without_a_clip_forgets_what_was_learned():
    models = two_models()
    optimizers = sgd(models)
    scaler = GradScaler("cpu", clip=QuantileClip(0.5, window=8))
    stepped(scaler, optimizers, models)
    scaler.load_state_dict(torch.amp.GradScaler("cpu").state_dict())
    assert scaler.state_dict()["gradilocks_scaler"]["clip"]["states"] == ()


def test_patterns_of_a_state_that_fit_nothing_are_refused():
    model = nn.Sequential(nn.Linear(3, 2))
    saved = GradScaler("cpu", clip=ClipPerGroup({"embed.*": 1.0})).state_dict()
    scaler = GradScaler("cpu", clip=ClipPerGroup({"0.*": 1.0}), model=model)
    before = scaler.state_dict()
    with pytest.raises(BadState, match=r"limits\['embed.\*'\] fits no parameter"):
        scaler.load_state_dict(saved)
    assert scaler.state_dict() == before


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_a_nan_that_the_clip_policy_sees_is_not_stepped(enabled, fused):
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0, fused=fused)
    scaler = GradScaler("cpu", enabled=enabled, clip=SkipSpikes(window=4, at_least=2))
    for number in range(5):
        optimizer.zero_grad()
        scaler.scale(param.sum()).backward()
        scaler.unscale_(optimizer)
        if number == 4:
            param.grad[0] = float("nan")
        scaler.step(optimizer)
        scaler.update()
    assert param.tolist() == [-4.0, -4.0]
    assert scaler.outcome.skipped
    assert not scaler.outcome.rejected


def test_a_disabled_scaler_tells_what_the_clip_has_rejected():
    param = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler = GradScaler("cpu", enabled=False, clip=SkipSpikes(window=4, at_least=2))
    for factor in (1.0, 1.0, 1.0, 1e5):
        optimizer.zero_grad()
        (param.sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.outcome.rejected
    assert param.tolist() == [-3.0, -3.0]
    with pytest.raises(RuntimeError, match=r"clip= cannot reach gradients that a closure makes"):
        scaler.step(optimizer, lambda: 0.0)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_group_that_fits_nothing_is_warned_of_also_when_disabled(enabled):
    models = two_models()[:1]
    scaler = GradScaler("cpu", enabled=enabled, clip=ClipPerGroup({"nope": 1.0}))
    with pytest.warns(UserWarning, match=r"limits\['nope'\] fits no parameter"):
        stepped(scaler, sgd(models), models)


def test_losses_from_a_generator_are_looked_at_too():
    scaler = GradScaler("cpu", policy=HeadroomScale())
    param = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.0)
    (scaled,) = scaler.scale(loss for loss in [(param * float("nan")).sum()])
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 256.0


def test_patterns_may_be_meant_for_the_second_optimizer():
    models = two_models()
    named = {"d": models[0], "g": models[1]}
    clip = ClipPerGroup({"d.*": 0.1, "g.*": 0.2})
    scaler = GradScaler("cpu", clip=clip, model=named)
    stepped(scaler, sgd(models), models)


def test_a_group_that_no_optimizer_has_is_warned_of_once():
    models = two_models()
    optimizers = [
        torch.optim.SGD([{"params": list(m.parameters()), "name": name}], lr=0.01)
        for m, name in zip(models, ("critic", "actor"), strict=True)
    ]
    stepped(GradScaler("cpu", clip=ClipPerGroup({"actor": 0.1})), optimizers, models)
    scaler = GradScaler("cpu", clip=ClipPerGroup({"aktor": 0.1}))
    with pytest.warns(UserWarning, match=r"limits\['aktor'\] fits no parameter.*'actor'") as caught:
        stepped(scaler, optimizers, models)
    assert len(caught) == 1
