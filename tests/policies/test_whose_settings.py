"""Settings of the constructor and of the checkpoint: which count, what is said, what is kept."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    DynamicScale,
    GradientControl,
    GradScaler,
    HeadroomScale,
    NoClip,
    QuantileClip,
    SkipSpikes,
    StaticScale,
    ZScoreClip,
    chain,
)
from gradilocks.errors import BadState
from gradilocks.scale import ScalePolicy
from gradilocks.scale.scale_policy import new_state


def model():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def control(net, **options):
    return GradientControl(torch.optim.SGD(net.parameters(), lr=0.01), model=net, **options)


def scaler(net, *, scale="dynamic", clip=None, **options):
    return GradScaler("cpu", policy=scale, clip=clip, model=net, **options)


MAKERS = {"control": control, "scaler": scaler}
each_object = pytest.mark.parametrize("kind", MAKERS)


def trained(made, net, count=5):
    # Alive as long as the model: what is learned of one that is gone is gone.
    net.stepper = optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    for number in range(count):
        loss = net(torch.full((2, 3), 1.0 + number)).square().mean()
        if isinstance(made, GradScaler):
            optimizer.zero_grad()
            made.scale(loss).backward()
            made.step(optimizer)
            made.update()
        else:
            made.zero_grad()
            made.backward(loss)
            made.step()
    return made


def policies_of(made):
    if isinstance(made, GradScaler):
        return made._policy, made._engines.clip
    return made._engine.scale_policy, made._engine.clip_policy


def memory_of(made):
    saved = made.state_dict()
    if isinstance(made, GradScaler):
        states = saved["gradilocks_scaler"]["clip"]["states"]
        return [state["memory"] for state in states]
    return [saved["gradilocks"]["clip_state"]]


# --- the checkpoint's settings, said once ---------------------------------------------------------


@each_object
def test_what_a_checkpoint_replaces_is_said_once_with_the_old_and_the_new(kind, caplog):
    net = model()
    make = MAKERS[kind]
    saved = make(net, clip=1.0, scale=DynamicScale(growth_interval=7)).state_dict()
    made = make(net, clip=0.1, scale=DynamicScale(init_scale=2.0**9))
    for _ in range(3):
        made.load_state_dict(saved)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("gradilocks", logging.WARNING)
    text = record.getMessage()
    assert "max_norm of ClipByNorm from 0.1 to 1.0" in text
    assert "growth_interval of DynamicScale from 2000 to 7" in text
    assert f'policies="{kind}" keeps its own' in text
    assert "init_scale" not in text  # It has had its time.
    assert policies_of(made)[1] == ClipByNorm(1.0)
    made.load_state_dict(saved, policies=kind)  # Those that it was made with, still.
    own = MAKERS[kind](net, clip=0.1, scale=DynamicScale(init_scale=2.0**9))
    assert policies_of(made) == policies_of(own)
    assert len(caplog.records) == 1


@each_object
def test_nothing_is_said_where_nothing_is_replaced(kind, caplog):
    net = model()
    for clip in (None, 1.0, chain(SkipSpikes(), 1.0), ClipPerGroup({"weight": math.inf})):
        if (kind, clip) == ("scaler", None):
            continue
        made = MAKERS[kind](net, clip=clip, scale=HeadroomScale())
        made.load_state_dict(json.loads(json.dumps(made.state_dict())))
    assert not caplog.records


@each_object
def test_of_a_chain_the_setting_of_each_part_is_said(kind, caplog):
    net = model()
    saved = MAKERS[kind](net, clip=chain(SkipSpikes(sigmas=5.0), 1.0)).state_dict()
    MAKERS[kind](net, clip=chain(SkipSpikes(), 0.5)).load_state_dict(saved)
    assert "sigmas of SkipSpikes from 6.0 to 5.0" in caplog.text
    assert "max_norm of ClipByNorm from 0.5 to 1.0" in caplog.text


@pytest.mark.parametrize("make", [torch.amp.GradScaler, GradScaler])
def test_of_a_scaler_torchs_own_numbers_are_said_too(make, caplog):
    saved = make("cpu", growth_interval=5).state_dict()
    GradScaler("cpu", growth_interval=9).load_state_dict(saved)
    assert "growth_interval of GradScaler from 9 to 5" in caplog.text


def test_it_is_said_where_a_control_has_no_optimizer_yet_and_behind_a_scaler(caplog):
    net = model()
    saved = control(net, clip=1.0).state_dict()
    made = GradientControl(clip=0.1)
    made.as_scaler().load_state_dict(saved)
    made.bind(torch.optim.SGD(net.parameters(), lr=0.1))
    assert caplog.text.count("max_norm of ClipByNorm from 0.1 to 1.0") == 1
    kept = GradientControl(clip=0.1)
    kept.as_scaler(policies="control").load_state_dict(saved)
    assert policies_of(kept)[1] == ClipByNorm(0.1)
    assert len(caplog.records) == 1


# --- the constructor's settings, kept -------------------------------------------------------------

KEPT = {
    "a number": (1.0, 0.1),
    "z-score": (ZScoreClip(alpha=0.9), ZScoreClip(alpha=0.5, warmup=2)),
    "AdaGC": (AdaGC(warmup=2), AdaGC(ratio=1.5, warmup=2)),
    "chain": (
        chain(SkipSpikes(sigmas=5.0, window=8, at_least=2), ClipByNorm(1.0)),
        chain(SkipSpikes(sigmas=7.0, window=8, at_least=2), ClipByNorm(0.5)),
    ),
}


@each_object
@pytest.mark.parametrize("clips", KEPT.values(), ids=KEPT)
def test_settings_may_be_kept_and_what_was_learned_goes_on(kind, clips, caplog):
    net, (before, own) = model(), clips
    make, policy = MAKERS[kind], DynamicScale(growth_interval=3)
    first = trained(make(net, clip=before, scale=DynamicScale(init_scale=2.0**9)), net)
    made = make(net, clip=own, scale=policy)
    made.load_state_dict(first.state_dict(), policies=kind)
    assert policies_of(made) == policies_of(make(net, clip=own, scale=policy))
    assert memory_of(made) == memory_of(first)
    assert len(memory_of(made)) == 1
    assert made.state_dict()["scale"] == 2.0**9
    assert not caplog.records
    trained(made, net, count=2)


@each_object
@pytest.mark.parametrize(
    ("before", "own"),
    [
        (QuantileClip(window=8), QuantileClip(window=30)),
        (
            chain(SkipSpikes(window=8, at_least=2), 1.0),
            chain(SkipSpikes(window=9, at_least=2), 1.0),
        ),
    ],
)
def test_what_was_learned_of_another_window_is_left_out_and_it_is_said(kind, before, own, caplog):
    net = model()
    first = trained(MAKERS[kind](net, clip=before), net)
    made = MAKERS[kind](net, clip=own)
    made.load_state_dict(first.state_dict(), policies=kind)
    assert "starts afresh" in caplog.text
    trained(made, net, count=1)
    (memory,) = memory_of(made)
    assert memory[next(name for name in memory if name.endswith("count"))] == 1


@each_object
@pytest.mark.parametrize(
    ("before", "own"),
    [
        (ZScoreClip(), 1.0),
        (chain(SkipSpikes(), 1.0), chain(1.0, SkipSpikes())),
        (1.0, QuantileClip()),
    ],
)
def test_another_clip_goes_on_with_the_scale_alone(kind, before, own):
    net = model()
    first = trained(MAKERS[kind](net, clip=before, scale=DynamicScale(2.0**9)), net)
    made = MAKERS[kind](net, clip=own)
    with pytest.raises(BadState, match="clip policy"):
        made.load_state_dict(first.state_dict())
    made.load_state_dict(first.state_dict(), policies=kind)
    assert policies_of(made)[1] == policies_of(MAKERS[kind](net, clip=own))[1]
    assert made.state_dict()["scale"] == 2.0**9
    trained(made, net, count=2)


LESSONS = {
    "another": (ZScoreClip(), QuantileClip(), "what ZScoreClip of", "QuantileClip, which starts"),
    "one that learns nothing": (
        QuantileClip(),
        1.0,
        "what QuantileClip of",
        "clips by ClipByNorm.",
    ),
    "a chain": (
        chain(SkipSpikes(), 1.0),
        chain(1.0, SkipSpikes()),
        "what chain(SkipSpikes, ClipByNorm) of",
        "clips by chain(ClipByNorm, SkipSpikes), which starts afresh.",
    ),
    "none": (QuantileClip(), None, "what QuantileClip of", "does not clip."),
}


@each_object
@pytest.mark.parametrize(("before", "own", "dropped", "instead"), LESSONS.values(), ids=LESSONS)
def test_what_another_clip_has_learned_is_dropped_and_the_log_tells_once(
    kind, before, own, dropped, instead, caplog
):
    net = model()
    first = trained(MAKERS[kind](net, clip=before), net)
    made = MAKERS[kind](net, clip=own)
    made.load_state_dict(first.state_dict(), policies=kind)
    (text,) = caplog.messages
    assert f"has dropped {dropped}" in text
    assert instead in text


def test_of_several_optimizers_it_is_told_once_too(caplog):
    nets = model(), model()
    steppers = [torch.optim.SGD(net.parameters(), lr=0.0) for net in nets]
    first = GradientControl(
        *steppers, clip=QuantileClip(), model=dict(zip("ab", nets, strict=True))
    )
    for stepper, net in zip(steppers, nets, strict=True):
        first.backward(net(torch.ones(2, 3)).sum())
        first.step(only=stepper)
    made = GradientControl(*steppers, clip=1.0)
    made.load_state_dict(first.state_dict(), policies="control")
    assert len(caplog.messages) == 1


@each_object
def test_where_nothing_was_learned_nothing_is_said(kind, caplog):
    net = model()
    for before, own in ((1.0, QuantileClip()), (QuantileClip(), ZScoreClip())):
        saved = MAKERS[kind](net, clip=before).state_dict()
        MAKERS[kind](net, clip=own).load_state_dict(saved, policies=kind)
    assert not caplog.records


def test_what_the_other_object_has_learned_is_dropped_and_told_of(caplog):
    net = model()
    saved = trained(scaler(net, clip=QuantileClip()), net).state_dict()
    control(net, clip=QuantileClip()).load_state_dict(saved, policies="control")
    assert "what QuantileClip of the checkpoint's GradScaler has learned" in caplog.messages[-1]
    saved = trained(control(net, clip=QuantileClip()), net).state_dict()
    scaler(net, clip=QuantileClip()).load_state_dict(saved, policies="scaler")
    assert "what QuantileClip of the checkpoint's GradientControl has" in caplog.messages[-1]
    assert len(caplog.messages) == 2


SCALES = {
    "deepspeed": DynamicScale.deepspeed(init_scale=2.0**9, growth_interval=4),
    "fairseq": DynamicScale.fairseq(tolerance=0.5),
    "dynamic": DynamicScale(init_scale=2.0**9, max_scale=2.0**10, hysteresis=1),
    "headroom": HeadroomScale(max_scale=2.0**40),
    "smaller headroom": HeadroomScale(max_scale=2.0**9),
}


@each_object
@pytest.mark.parametrize("own", SCALES)
@pytest.mark.parametrize("before", SCALES)
def test_any_scale_policy_goes_on_from_any_other(kind, before, own):
    net = model()
    first = trained(MAKERS[kind](net, scale=SCALES[before], clip=1.0), net, count=2)
    made = MAKERS[kind](net, scale=SCALES[own], clip=1.0)
    made.load_state_dict(json.loads(json.dumps(first.state_dict())), policies=kind)
    assert policies_of(made)[0] == SCALES[own]
    lowest, highest = SCALES[own].bounds()
    expected = min(max(first.state_dict()["scale"], lowest), highest)
    assert made.state_dict()["scale"] == expected
    trained(made, net, count=6)


@each_object
@pytest.mark.parametrize("steps", [0, 8])
@pytest.mark.parametrize("before", [2.0**6, 2.0**20])
def test_a_higher_bound_of_its_own_is_a_higher_ceiling(kind, before, steps):
    """These gradients have room for a scale of 2^9 or more: the one bound is in the way."""
    net = model()
    bounded, own = (HeadroomScale(2.0**4, max_scale=most) for most in (before, 2.0**30))
    first = trained(MAKERS[kind](net, scale=bounded, clip=1.0), net, steps)
    made = MAKERS[kind](net, scale=own, clip=1.0)
    made.load_state_dict(json.loads(json.dumps(first.state_dict())), policies=kind)
    assert trained(made, net, count=4).state_dict()["scale"] >= 2.0**9


@each_object
def test_a_ceiling_that_an_overflow_has_set_is_kept_under_a_higher_bound(kind):
    net = model()
    first = MAKERS[kind](net, scale=HeadroomScale(max_scale=2.0**20), clip=1.0)
    saved = json.loads(json.dumps(trained(first, net, count=2).state_dict()))
    part = saved["gradilocks"] if kind == "control" else saved["gradilocks_scaler"]["scale"]
    part["scale_state" if kind == "control" else "state"]["ceiling"] = 2.0**6
    made = MAKERS[kind](net, scale=HeadroomScale(max_scale=2.0**30), clip=1.0)
    made.load_state_dict(saved, policies=kind)
    assert trained(made, net, count=4).state_dict()["scale"] == 2.0**6


# --- a scale outside the bounds of whoever loads it -----------------------------------------------

TIGHT = DynamicScale(init_scale=16.0, min_scale=4.0, max_scale=64.0)
BOUNDED = {
    "control": lambda: control(model(), scale=TIGHT),
    "scaler with a policy": lambda: scaler(model(), scale=TIGHT),
    "scaler": lambda: GradScaler("cpu", init_scale=16.0, min_scale=4.0, max_scale=64.0),
    "scaler of a control": lambda: control(model(), scale=TIGHT).as_scaler(),
}
each_bounded = pytest.mark.parametrize("kind", BOUNDED)


def torchs(scale):
    return torch.amp.GradScaler("cpu", init_scale=scale).state_dict()


@each_bounded
@pytest.mark.parametrize(("saved", "loaded"), [(2.0**10, 64.0), (0.5, 4.0), (32.0, 32.0)])
@pytest.mark.parametrize("policies", ["checkpoint", "own"])
def test_bounds_of_its_own_hold_for_torchs_scale_and_the_log_tells(
    kind, saved, loaded, policies, caplog
):
    made = BOUNDED[kind]()
    if policies == "own" and kind == "scaler of a control":
        made = made.control.as_scaler(policies="control")
    own = {"policies": kind.split()[0]} if policies == "own" and " of " not in kind else {}
    made.load_state_dict(torchs(saved), **own)
    assert made.state_dict()["scale"] == loaded
    told = [text for text in caplog.messages if "the scale of the checkpoint" in text]
    assert len(told) == (saved != loaded)
    assert all(f"{saved:g}, to {loaded:g}: " in text for text in told)
    assert all("keeps it between 4 and 64." in text for text in told)


@each_object
def test_tighter_bounds_of_its_own_move_the_scale_of_a_checkpoint_and_the_log_tells(kind, caplog):
    net = model()
    saved = MAKERS[kind](net, scale=DynamicScale(), clip=1.0).state_dict()
    made = MAKERS[kind](net, scale=TIGHT, clip=1.0)
    made.load_state_dict(saved, policies=kind)
    assert made.state_dict()["scale"] == 64.0
    (text,) = caplog.messages
    assert "the scale of the checkpoint, 65536, to 64: DynamicScale of this Grad" in text
    fixed = MAKERS[kind](net, scale=StaticScale(8.0), clip=1.0)
    fixed.load_state_dict(saved, policies=kind)
    assert "StaticScale of this Grad" in caplog.messages[-1]
    assert "keeps it at that." in caplog.messages[-1]


def test_a_control_that_does_not_scale_says_nothing_of_a_scale(caplog):
    net = model()
    control(net, scale=None).load_state_dict(control(net).state_dict(), policies="control")
    control(net).load_state_dict(control(net, scale=None).state_dict(), policies="control")
    assert not caplog.records


@each_object
@pytest.mark.parametrize("scale", [2.0, 128.0])
def test_a_scale_outside_the_bounds_of_its_own_checkpoint_is_a_bad_state(kind, scale):
    made = MAKERS[kind](model(), scale=TIGHT, clip=1.0)
    before = made.state_dict()
    with pytest.raises(BadState, match=r"in \[4, 64\], as its own policy DynamicScale says, got"):
        made.load_state_dict({**before, "scale": scale})
    assert made.state_dict() == before


OTHERS = {
    "torch": torch.amp.GradScaler("cpu", init_scale=2.0**9, growth_interval=9).state_dict(),
    "megatron": {"scale": torch.tensor([512.0]), "growth_tracker": 3, "hysteresis_tracker": 1},
    "deepspeed": {"cur_scale": 512.0, "cur_iter": 12, "last_overflow_iter": 9, "scale_window": 5},
    "apex": {"loss_scaler0": {"loss_scale": 512.0, "unskipped": 3}},
    "fairseq": {"loss_scale": 512.0},
}


@each_object
@pytest.mark.parametrize("own", [DynamicScale(growth_interval=3), HeadroomScale()])
@pytest.mark.parametrize("saved", OTHERS)
def test_of_another_system_the_scale_is_taken_and_the_settings_stay(kind, own, saved):
    net = model()
    made = MAKERS[kind](net, scale=own, clip=1.0)
    made.load_state_dict(dict(OTHERS[saved]), policies=kind)
    assert policies_of(made)[0] == own
    assert made.state_dict()["scale"] == 512.0
    trained(made, net, count=2)


def test_a_scaler_and_a_control_take_each_others_scale_where_they_keep_their_settings():
    net = model()
    first = trained(control(net, scale=HeadroomScale(), clip=ZScoreClip()), net)
    made = scaler(net, scale=DynamicScale(growth_interval=3), clip=QuantileClip())
    made.load_state_dict(first.state_dict(), policies="scaler")
    assert made.get_scale() == first.scale
    other = trained(scaler(net, scale=DynamicScale(2.0**9), clip=ZScoreClip()), net)
    back = control(net, clip=1.0)
    back.load_state_dict(other.state_dict(), policies="control")
    assert back.scale == 2.0**9
    plain = GradScaler("cpu", growth_interval=4)
    plain.load_state_dict(other.state_dict(), policies="scaler")
    assert (plain.get_scale(), plain.get_growth_interval()) == (2.0**9, 4)
    unscaled = control(net, scale=None).state_dict()
    made.load_state_dict(unscaled, policies="scaler")
    assert made.get_scale() == 2.0**16  # It had none.


def test_a_disabled_scaler_keeps_its_clip_too():
    net = model()
    first = trained(scaler(net, scale=None, clip=ZScoreClip(), enabled=False), net)
    made = scaler(net, scale=None, clip=ZScoreClip(alpha=0.5), enabled=False)
    made.load_state_dict(first.state_dict(), policies="scaler")
    assert policies_of(made)[1] == ZScoreClip(alpha=0.5)
    assert memory_of(made) == memory_of(first)


@pytest.mark.parametrize("policies", ["control", "mine", None])
def test_a_scaler_says_whose_settings_there_are(policies):
    made = GradScaler("cpu")
    with pytest.raises(ValueError, match="'checkpoint' or 'scaler', got"):
        made.load_state_dict(made.state_dict(), policies=policies)


@each_object
def test_what_is_no_scalers_state_is_refused_whatever_is_kept(kind):
    made = MAKERS[kind](model(), clip=1.0)
    before = made.state_dict()
    for nonsense in ({"foo": 1}, {"loss_scaler": None}, {"scale": "x"}):
        with pytest.raises(BadState, match="scale"):
            made.load_state_dict(nonsense, policies=kind)
    assert made.state_dict() == before


# --- groups and patterns --------------------------------------------------------------------------


def test_a_groups_name_may_have_a_dot_and_a_bracket():
    net = model()
    for name in ("head.decay", "layer[0]", "no.such.parameter"):
        made = GradScaler("cpu", clip=ClipPerGroup({name: 1e-3}), model=net)
        optimizer = torch.optim.SGD([{"params": list(net.parameters()), "name": name}], lr=0.0)
        made.scale(net(torch.ones(2, 3)).sum()).backward()
        made.step(optimizer)
        made.update()
        norms = torch.stack([param.grad.norm() for param in net.parameters()])
        assert norms.norm() == pytest.approx(1e-3, rel=1e-4)
        optimizer.zero_grad()
        again = GradScaler("cpu", clip=ClipPerGroup({name: 1.0}), model=net)
        again.load_state_dict(made.state_dict())


def test_a_name_with_a_dot_that_fits_nothing_is_warned_of():
    net = model()
    made = GradScaler("cpu", clip=ClipPerGroup({"hed.weight": 1.0}), model=net)
    with pytest.warns(UserWarning, match=r"limits\['hed.weight'\] fits no parameter"):
        trained(made, net, count=2)


@each_object
def test_a_pattern_with_a_star_is_still_refused_at_once(kind):
    with pytest.raises(ValueError, match=r"limits\['hed.\*'\] fits no parameter"):
        MAKERS[kind](model(), clip=ClipPerGroup({"hed.*": 1.0}))


@pytest.mark.parametrize(
    "clip",
    [
        ClipPerGroup({"0.*": 1.0}),
        ClipPerGroup({3: 1.0}),
        ClipPerGroup({"decay": 1.0}),
        AdaptiveClip(exclude=("0.*",)),
    ],
)
@pytest.mark.parametrize("bound", [True, False])
def test_a_clip_of_a_checkpoint_that_does_not_fit_is_a_bad_state(clip, bound):
    there = nn.Sequential(nn.Linear(3, 2))
    groups = [{"params": [p], "name": "decay"} for p in there.parameters()]
    groups += [{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    saved = GradientControl(torch.optim.SGD(groups, lr=0.1), model=there, clip=clip).state_dict()
    net = model()
    own = type(clip)({"weight": 1.0}) if isinstance(clip, ClipPerGroup) else AdaptiveClip()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    made = GradientControl(*([optimizer] if bound else []), model=net, clip=own)
    before = made.state_dict()

    def load():
        made.load_state_dict(saved)
        made.bind(optimizer)  # Where it had none, only here can it be known.

    with pytest.raises(BadState, match=r"fits no parameter.*policies='control'"):
        load()
    if bound:
        assert made.state_dict() == before
    assert made.optimizers == ((optimizer,) if bound else ())
    made.load_state_dict(saved, policies="control")
    made.bind(optimizer)
    assert policies_of(made)[1] == own


@pytest.mark.parametrize(
    ("kind", "spoil"),
    [
        ("control", lambda s: s["gradilocks"].update(parts=3)),
        ("control", lambda s: s["gradilocks"].update(parts=[1, 2])),
        ("control", lambda s: s["gradilocks"].update(parts=[(0, None)])),
        ("control", lambda s: s["gradilocks"].update(parts=[(0, {"gradilocks": {"steps": "x"}})])),
        (
            "control",
            lambda s: s["gradilocks"].update(
                parts=[(0, {"gradilocks": {"steps": 1, "optimizer": {"names": 1}}})]
            ),
        ),
        ("control", lambda s: s["gradilocks"].update(clip_policy=None)),
        ("control", lambda s: s["gradilocks"].update(scale_policy=7)),
        ("control", lambda s: s["gradilocks"].update(clip_state=[1])),
        ("control", lambda s: s["gradilocks"].update(scale_state=[1])),
        ("control", lambda s: s["gradilocks"]["clip_policy"].update(config=["float", "inf"])),
        (
            "scaler",
            lambda s: s["gradilocks_scaler"]["clip"].update(states=[{"names": 1, "memory": None}]),
        ),
        (
            "scaler",
            lambda s: s["gradilocks_scaler"]["clip"].update(
                states=[{"names": [1], "memory": None}]
            ),
        ),
        (
            "scaler",
            lambda s: s["gradilocks_scaler"]["clip"].update(
                states=[{"names": ["a"], "sizes": [1], "shapes": [1, 2], "memory": None}]
            ),
        ),
        (
            "scaler",
            lambda s: s["gradilocks_scaler"]["clip"].update(
                states=[{"names": ["a"], "sizes": [1], "groups": "x", "memory": None}]
            ),
        ),
        ("scaler", lambda s: s["gradilocks_scaler"]["clip"].update(policy=None)),
        ("scaler", lambda s: s["gradilocks_scaler"].update(scale=3)),
        ("scaler", lambda s: s["gradilocks_scaler"]["scale"].pop("state")),
    ],
)
def test_a_spoilt_state_is_a_bad_state_and_changes_nothing(kind, spoil):
    net = model()
    made = trained(MAKERS[kind](net, clip=ZScoreClip(), scale=HeadroomScale()), net)
    before = made.state_dict()
    saved = json.loads(json.dumps(before))
    spoil(saved)
    with pytest.raises(BadState):
        made.load_state_dict(saved)
    assert made.state_dict() == before


@each_object
@pytest.mark.parametrize("policies", ["checkpoint", "own"])
def test_settings_that_no_machine_holds_are_a_bad_state(kind, policies):
    net = model()
    make = MAKERS[kind]
    made = make(net, clip=QuantileClip(window=8), scale=DynamicScale.deepspeed())
    before = made.state_dict()
    for old, new in (("window", 10**30), ("delay", 10**30)):
        text = json.dumps(before)
        place = text.index(f'"{old}": ') + len(old) + 4
        end = min(text.index(mark, place) for mark in ",}")
        saved = json.loads(text[:place] + str(new) + text[end:])
        if policies == "checkpoint":
            with pytest.raises(BadState, match="cannot start"):
                made.load_state_dict(saved)
        else:
            made.load_state_dict(saved, policies=kind)
        assert made.state_dict() == before


# --- strict JSON ----------------------------------------------------------------------------------

INFINITE = {
    "order": ClipByNorm(1.0, order=math.inf),
    "max_norm": ClipByNorm(math.inf),
    "value": ClipByValue(math.inf),
    "each": ClipPerTensor(math.inf, order=math.inf),
    "groups": ClipPerGroup({0: math.inf, "bias": None}, otherwise=math.inf, order=math.inf),
    "warm-up": AdaGC(warmup_norm=math.inf),
    "chain": chain(ClipPerTensor(1.0, order=math.inf), ClipByNorm(math.inf, order=math.inf)),
}


@each_object
@pytest.mark.parametrize("clip", INFINITE.values(), ids=INFINITE)
def test_a_state_is_strict_json_whatever_is_infinite_in_it(kind, clip):
    net = model()
    made = trained(MAKERS[kind](net, clip=clip), net)
    text = json.dumps(made.state_dict(), allow_nan=False)
    again = MAKERS[kind](net, clip=clip)
    again.load_state_dict(json.loads(text))
    assert policies_of(again)[1] == clip
    assert json.dumps(again.state_dict(), allow_nan=False) == text


def as_before(state):
    """What was saved before infinity was written so that strict JSON has it."""
    if isinstance(state, dict):
        return {key: as_before(value) for key, value in state.items()}
    if not isinstance(state, (list, tuple)):
        return state
    return math.inf if list(state) == ["float", "inf"] else type(state)(map(as_before, state))


@each_object
@pytest.mark.parametrize("clip", INFINITE.values(), ids=INFINITE)
def test_a_state_of_before_with_infinity_in_it_loads(kind, clip):
    net = model()
    saved = trained(MAKERS[kind](net, clip=clip), net).state_dict()
    again = MAKERS[kind](net, clip=clip)
    again.load_state_dict(json.loads(json.dumps(as_before(saved))))
    assert "Infinity" in json.dumps(as_before(saved))
    assert policies_of(again)[1] == clip
    assert again.state_dict() == saved


@dataclass(frozen=True)
class Own(ScalePolicy):
    """A policy of the user's, with infinities and texts where ours have none."""

    bound: float = math.inf
    least: float = -math.inf
    several: tuple[float, ...] = (1.0, math.inf)
    text: str = "inf"

    def start(self, device):
        return new_state(device, scale=8.0)

    def bounds(self):
        return 1.0, 64.0


@each_object
def test_infinities_of_ones_own_policy_come_back_too(kind):
    net = model()
    made = trained(MAKERS[kind](net, scale=Own(), clip=1.0), net)
    again = MAKERS[kind](net, scale=Own(bound=2.0, least=0.0, several=(), text=""), clip=1.0)
    again.load_state_dict(json.loads(json.dumps(made.state_dict(), allow_nan=False)))
    own = policies_of(again)[0]
    assert (own.bound, own.least, tuple(own.several), own.text) == (
        math.inf,
        -math.inf,
        (1.0, math.inf),
        "inf",
    )


@pytest.mark.parametrize("scale", [None, StaticScale(8.0), DynamicScale.torch(), HeadroomScale()])
@pytest.mark.parametrize("clip", [NoClip(), QuantileClip(), SkipSpikes(), AdaptiveClip()])
def test_every_state_is_strict_json(scale, clip):
    net = model()
    made = trained(control(net, scale=scale, clip=clip), net)
    json.dumps(made.state_dict(), allow_nan=False)
    parts = GradientControl(clip=clip, scale=scale).as_scaler()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    optimizer.zero_grad()
    parts.scale(net(torch.ones(2, 3)).sum()).backward()
    parts.step(optimizer)
    parts.update()
    json.dumps(parts.state_dict(), allow_nan=False)
