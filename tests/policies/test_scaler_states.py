"""What GradScaler(policy=, clip=) saves, and whose states it goes on with."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    ClipPerGroup,
    DynamicScale,
    GradScaler,
    HeadroomScale,
    QuantileClip,
    ZScoreClip,
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
    if saved is MEGATRON and policy is not None:
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
    assert other._governed.policy == HeadroomScale(margin=2)
    assert other._clips.policy == QuantileClip(0.5, window=8)


def test_optimizers_find_what_was_learned_of_them_whatever_their_order():
    models = two_models()
    scaler = GradScaler("cpu", clip=AdaGC(warmup=2))
    optimizers = sgd(models)
    stepped(scaler, optimizers, models)
    saved = scaler.state_dict()
    json.loads(json.dumps(saved, allow_nan=False))
    by_size = {tuple(s["sizes"]): s["memory"] for s in saved["gradilocks_scaler"]["clip"]["states"]}
    other = GradScaler("cpu", clip=AdaGC(warmup=2))
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    for optimizer, model in list(zip(optimizers, models, strict=True))[::-1]:
        optimizer.zero_grad()
        other.scale(model(torch.ones(2, 3)).square().mean() * float("nan")).backward()
        other.step(optimizer)  # A skipped step teaches nothing.
    other.update()
    learned = other.state_dict()["gradilocks_scaler"]["clip"]["states"]
    assert [len(state["names"]) for state in learned] == [4, 2]
    assert {tuple(s["sizes"]): s["memory"] for s in learned} == by_size


def test_what_was_learned_of_other_parameters_is_refused_at_the_step():
    models = two_models()
    scaler = GradScaler("cpu", clip=AdaGC(warmup=2))
    optimizers = sgd(models[:1])
    stepped(scaler, optimizers, models[:1])
    other = GradScaler("cpu", clip=AdaGC(warmup=2))
    other.load_state_dict(scaler.state_dict())
    with pytest.raises(BadState, match=r"learned of optimizers with 2 parameters; this one has 4"):
        stepped(other, sgd(models[1:]), models[1:])


def test_a_norm_of_all_is_remembered_also_if_the_model_has_grown():
    models = two_models()
    scaler = GradScaler("cpu", clip=QuantileClip(0.5, window=8))
    optimizers = sgd(models[:1])
    stepped(scaler, optimizers, models[:1], last=3)
    other = GradScaler("cpu", clip=QuantileClip(0.5, window=8))
    other.load_state_dict(scaler.state_dict())
    optimizers = sgd(models[1:])
    stepped(other, optimizers, models[1:], last=1)
    (learned,) = other.state_dict()["gradilocks_scaler"]["clip"]["states"]
    assert learned["memory"]["count"] == 4


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
