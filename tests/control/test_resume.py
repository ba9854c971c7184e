"""state_dict: a resumed run is the same run, torch's fits too, and a bad one changes nothing."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradilocks
from gradilocks import (
    ClipByNorm,
    ClipByValue,
    DynamicScale,
    GradientControl,
    NoClip,
    NoScale,
    StaticScale,
)
from gradilocks.errors import BadState, GradilocksError, MissingKey, NeverFinite
from tests.control.gradient_scripts import INF, NAN, assert_same, contents, control_step, parameter

UNUSUAL = DynamicScale(
    init_scale=2.0**10,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=3,
    min_scale=2.0**-3,
    max_scale=2.0**18,
    hysteresis=3,
)
"""No field at its default."""

SCRIPT = [1.0, INF, 2.0, 3.0, NAN, 1.0, 1.0, 1.0, INF, INF, INF, INF, 4.0, 0.5, INF, 1.0, 1.0, 1.0]


def setting(name="AdamW", *, scale=UNUSUAL, clip=None, give_up_after=5):
    p, q = parameter(1.0, -2.0), parameter(0.5)
    make = getattr(torch.optim, name)
    optimizer = make([p, q], lr=0.1, **({"momentum": 0.9} if name == "SGD" else {}), fused=True)
    clip = ClipByNorm(0.7, order=3.0) if clip is None else clip
    control = GradientControl(optimizer, scale=scale, clip=clip, give_up_after=give_up_after)
    return p, q, optimizer, control


def through_a_file(state):
    """As a training script keeps it: torch.save, then torch.load with weights_only."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def run(p, q, control, script):
    told = []
    for gradient in script:
        outcome = control_step(control, (p, torch.tensor([gradient, 1.0])), (q, 0.25))
        told.append((outcome.step, outcome.skipped, outcome.clipped, outcome.scale, control.scale))
    return told


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
@pytest.mark.parametrize("at", range(1, len(SCRIPT)))
def test_a_run_resumed_anywhere_is_bit_for_bit_the_uninterrupted_one(name, at):
    p, q, optimizer, control = setting(name)
    told = run(p, q, control, SCRIPT)

    a, b, first, before = setting(name)
    start = run(a, b, before, SCRIPT[:at])
    saved = through_a_file(
        {"params": [a.data, b.data], "optimizer": first.state_dict(), "c": before.state_dict()}
    )
    c, d, second, after = setting(name, scale="dynamic", clip=1.0)
    with torch.no_grad():
        c.copy_(saved["params"][0])
        d.copy_(saved["params"][1])
    second.load_state_dict(saved["optimizer"])
    after.load_state_dict(saved["c"])
    rest = run(c, d, after, SCRIPT[at:])

    assert start + rest == told
    assert_same(contents(second), contents(optimizer))
    assert after.state_dict() == control.state_dict()


def test_a_checkpoint_with_no_field_at_its_default_comes_back_whole():
    p, q, _, control = setting()
    run(p, q, control, [1.0, 1.0, 1.0, 1.0, INF, INF])
    saved = control.state_dict()
    assert saved["scale"] == 2.0**12
    assert saved["_growth_tracker"] == 0
    assert saved["gradilocks"]["hysteresis"] == 1
    assert saved["gradilocks"]["streak"] == 2
    assert saved["gradilocks"]["steps"] == 6
    run(p, q, control, [1.0, 1.0])
    assert control.state_dict()["_growth_tracker"] == 2

    _, _, _, fresh = setting(scale=DynamicScale(), clip=ClipByNorm(9.0))
    fresh.load_state_dict(saved)
    assert fresh.state_dict() == saved


def test_a_streak_and_a_partly_spent_hysteresis_resume_together():
    p, q, _, control = setting(give_up_after=4)
    run(p, q, control, [1.0, INF, INF])
    r, s, _, resumed = setting(give_up_after=4)
    resumed.load_state_dict(through_a_file(control.state_dict()))
    assert resumed.scale == 2.0**10
    run(r, s, resumed, [INF])
    assert resumed.scale == 2.0**8
    with pytest.raises(NeverFinite):
        run(r, s, resumed, [INF])


def test_the_checkpoint_is_plain_data():
    p, q, _, control = setting()
    run(p, q, control, SCRIPT[:5])

    def check(value):
        if isinstance(value, dict):
            for key, inner in value.items():
                assert type(key) is str
                check(inner)
        elif isinstance(value, list):
            for inner in value:
                check(inner)
        else:
            assert type(value) in (int, float, str, bool, type(None)), value

    check(control.state_dict())


def test_a_checkpoint_does_not_move_with_the_run_it_was_taken_from():
    p, q, _, control = setting()
    saved = control.state_dict()
    kept = copy.deepcopy(saved)
    run(p, q, control, SCRIPT[:6])
    assert saved == kept


@pytest.mark.parametrize(
    "scale", [NoScale(), StaticScale(128.0), DynamicScale(init_scale=4.0)], ids=repr
)
@pytest.mark.parametrize("clip", [NoClip(), ClipByNorm(2.0), ClipByValue(0.5)], ids=repr)
def test_every_pair_of_policies_goes_through_a_checkpoint(scale, clip):
    p, q, _, control = setting(scale=scale, clip=clip)
    run(p, q, control, [1.0, INF])
    saved = through_a_file(control.state_dict())
    _, _, _, other = setting(scale=scale, clip=clip)
    other.load_state_dict(saved)
    assert other.state_dict() == saved
    assert other.scale == control.scale


@settings(deadline=None, max_examples=40)
@given(
    flags=st.lists(st.booleans(), min_size=1, max_size=25),
    at=st.integers(0, 25),
    hysteresis=st.integers(1, 3),
    interval=st.integers(1, 5),
)
def test_any_interrupted_run_has_the_same_scale_path(flags, at, hysteresis, interval):
    policy = DynamicScale(
        init_scale=256.0, growth_interval=interval, hysteresis=hysteresis, max_scale=4096.0
    )
    script = [INF if flag else 1.0 for flag in flags]
    p, q, _, control = setting(scale=policy, give_up_after=None)
    told = run(p, q, control, script)
    a, b, _, first = setting(scale=policy, give_up_after=None)
    start = run(a, b, first, script[:at])
    c, d, _, second = setting(scale=policy, give_up_after=None)
    second.load_state_dict(first.state_dict())
    assert start + run(c, d, second, script[at:]) == told


def drive_scaler(scaler, script):
    """torch's (or our drop-in) scaler over the same script; returns the scale after each step."""
    p = parameter(0.0)
    optimizer = torch.optim.SGD([p], lr=0.0)
    path = []
    for gradient in script:
        scaler.scale(torch.ones(()))
        p.grad = torch.tensor([gradient])
        scaler.step(optimizer)
        scaler.update()
        path.append(scaler.get_scale())
    return path


def drive_control(control, p, script):
    path = []
    for gradient in script:
        control_step(control, (p, gradient))
        path.append(control.scale)
    return path


@pytest.mark.parametrize("make", [torch.amp.GradScaler, gradilocks.GradScaler])
def test_a_scalers_checkpoint_goes_on_in_a_control(make):
    scaler = make(
        "cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
    )
    drive_scaler(scaler, [1.0, 1.0, INF, 1.0, 1.0])
    saved = through_a_file(scaler.state_dict())
    p = parameter(0.0)
    control = GradientControl(torch.optim.SGD([p], lr=0.1))
    control.load_state_dict(saved)
    script = [1.0, INF, 1.0, 1.0, 1.0, INF, INF]
    assert drive_control(control, p, script) == drive_scaler(scaler, script)
    state = control.state_dict()
    assert {key: state[key] for key in saved} == scaler.state_dict()


@pytest.mark.parametrize("make", [torch.amp.GradScaler, gradilocks.GradScaler])
def test_a_controls_checkpoint_goes_on_in_a_scaler(make):
    p = parameter(0.0)
    control = GradientControl(
        torch.optim.SGD([p], lr=0.1),
        scale=DynamicScale(
            init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
        ),
    )
    drive_control(control, p, [1.0, 1.0, INF, 1.0, 1.0])
    scaler = make("cpu")
    scaler.load_state_dict(through_a_file(control.state_dict()))
    script = [1.0, INF, 1.0, 1.0, 1.0, INF, INF]
    assert drive_scaler(scaler, script) == drive_control(control, p, script)


def test_a_torch_checkpoint_keeps_the_controls_own_floor_ceiling_and_hysteresis():
    p = parameter(0.0)
    policy = DynamicScale(init_scale=64.0, min_scale=16.0, max_scale=256.0, hysteresis=2)
    control = GradientControl(torch.optim.SGD([p], lr=0.1), scale=policy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=1)
    control.load_state_dict(scaler.state_dict())
    assert control.scale == 256.0
    assert drive_control(control, p, [1.0, INF, INF, INF, INF, INF, INF]) == [
        256.0,
        256.0,
        128.0,
        64.0,
        32.0,
        16.0,
        16.0,
    ]


def used_control(**kwargs):
    p, q, _, control = setting(**kwargs)
    run(p, q, control, [1.0, INF, 1.0, 1.0])
    return p, control


def without(path):
    def change(saved):
        *outer, last = path
        place = saved
        for key in outer:
            place = place[key]
        del place[last]

    return change


def in_a_streak(steps):
    """Three non-finite steps in a row, of which `steps` are told."""
    return lambda saved: saved[OURS].update(streak=3, streak_steps=steps)


def setting_to(path, value):
    def change(saved):
        *outer, last = path
        place = saved
        for key in outer:
            place = place[key]
        place[last] = value

    return change


OURS = "gradilocks"
BROKEN = {
    "a newer version": (setting_to([OURS, "version"], 99), BadState, "version 99"),
    "no version": (without([OURS, "version"]), BadState, "version"),
    "no scale": (without(["scale"]), MissingKey, "'scale'"),
    "no tracker": (without(["_growth_tracker"]), MissingKey, "'_growth_tracker'"),
    "no scale policy": (without([OURS, "scale_policy"]), MissingKey, "'scale_policy'"),
    "no clip policy": (without([OURS, "clip_policy"]), MissingKey, "'clip_policy'"),
    "no hysteresis": (without([OURS, "hysteresis"]), MissingKey, "'hysteresis'"),
    "no steps": (without([OURS, "steps"]), MissingKey, "'steps'"),
    "no streak": (without([OURS, "streak"]), MissingKey, "'streak'"),
    "no policy name": (without([OURS, "scale_policy", "name"]), BadState, "scale policy"),
    "no policy settings": (without([OURS, "scale_policy", "config"]), BadState, "does not fit"),
    "scale 0": (setting_to(["scale"], 0.0), BadState, "scale"),
    "scale negative": (setting_to(["scale"], -2.0), BadState, "scale"),
    "scale inf": (setting_to(["scale"], INF), BadState, "scale"),
    "scale nan": (setting_to(["scale"], NAN), BadState, "scale"),
    "scale a text": (setting_to(["scale"], "65536"), BadState, "scale"),
    "scale None": (setting_to(["scale"], None), BadState, "scale"),
    "scale True": (setting_to(["scale"], True), BadState, "scale"),
    "scale above its ceiling": (setting_to(["scale"], 2.0**30), BadState, "scale"),
    "scale below its floor": (setting_to(["scale"], 2.0**-9), BadState, "scale"),
    "tracker 1.5": (setting_to(["_growth_tracker"], 1.5), BadState, "_growth_tracker"),
    "tracker negative": (setting_to(["_growth_tracker"], -1), BadState, "_growth_tracker"),
    "tracker huge": (setting_to(["_growth_tracker"], 2**40), BadState, "_growth_tracker"),
    "steps negative": (setting_to([OURS, "steps"], -1), BadState, "steps"),
    "steps None": (setting_to([OURS, "steps"], None), BadState, "steps"),
    "streak a text": (setting_to([OURS, "streak"], "3"), BadState, "streak"),
    "more steps than the streak": (in_a_streak([[8.0, 1, 0, False]] * 4), BadState, "at most 3"),
    "streak steps a text": (in_a_streak("8"), BadState, "streak_steps"),
    "a streak step without a loss": (in_a_streak([[8.0, 1, 0]]), BadState, "streak_steps"),
    "a streak step of scale 0": (in_a_streak([[0.0, 1, 0, False]]), BadState, "scale"),
    "a streak step of -1 NaN": (in_a_streak([[8.0, -1, 0, None]]), BadState, "count NaN and Inf"),
    "hysteresis True": (setting_to([OURS, "hysteresis"], True), BadState, "hysteresis"),
    "ours a list": (setting_to([OURS], [1]), BadState, "must be a dict"),
    "ours None": (setting_to([OURS], None), BadState, "must be a dict"),
    "policy a text": (setting_to([OURS, "scale_policy"], "DynamicScale"), BadState, "scale policy"),
    "settings a list": (setting_to([OURS, "scale_policy", "config"], [1]), BadState, "not fit"),
    "an impossible setting": (
        setting_to([OURS, "scale_policy", "config", "growth_factor"], 0.5),
        BadState,
        "growth_factor",
    ),
    "an unknown setting": (
        setting_to([OURS, "scale_policy", "config", "colour"], 1),
        BadState,
        "colour",
    ),
    "a negative max_norm": (
        setting_to([OURS, "clip_policy", "config", "max_norm"], -1.0),
        BadState,
        "max_norm",
    ),
    "another clip policy": (
        setting_to([OURS, "clip_policy", "name"], "NoClip"),
        BadState,
        "NoClip",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_bad_checkpoint_says_what_is_wrong_and_changes_nothing(case):
    change, kind, words = BROKEN[case]
    p, control = used_control()
    _, source = used_control()
    saved = source.state_dict()
    change(saved)
    before = control.state_dict()
    with pytest.raises(kind) as caught:
        control.load_state_dict(saved)
    assert words in str(caught.value)
    assert isinstance(caught.value, GradilocksError)
    assert isinstance(caught.value, ValueError)
    assert control.state_dict() == before
    assert not control_step(control, (p, 1.0)).skipped


TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


@pytest.mark.parametrize("key", TORCH_KEYS)
def test_a_torch_checkpoint_without_a_key_is_refused_by_that_key(key):
    _, control = used_control()
    before = control.state_dict()
    saved = torch.amp.GradScaler("cpu", init_scale=32.0).state_dict()
    del saved[key]
    with pytest.raises(MissingKey, match=key):
        control.load_state_dict(saved)
    assert control.state_dict() == before


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale", 0.0),
        ("scale", INF),
        ("scale", NAN),
        ("growth_factor", 1.0),
        ("growth_factor", "2"),
        ("backoff_factor", 1.5),
        ("backoff_factor", NAN),
        ("growth_interval", 0),
        ("growth_interval", 2.5),
        ("_growth_tracker", "1"),
        ("_growth_tracker", None),
    ],
)
def test_a_torch_checkpoint_with_an_impossible_value_is_refused(key, value):
    _, control = used_control()
    before = control.state_dict()
    saved = torch.amp.GradScaler("cpu", init_scale=32.0).state_dict()
    saved[key] = value
    with pytest.raises(BadState, match=key):
        control.load_state_dict(saved)
    assert control.state_dict() == before


@pytest.mark.parametrize("scale", [None, 64.0])
def test_a_torch_checkpoint_needs_a_dynamic_scale(scale):
    _, control = used_control(scale=scale, clip=1.0)
    before = control.state_dict()
    with pytest.raises(BadState, match="dynamic"):
        control.load_state_dict(torch.amp.GradScaler("cpu", init_scale=32.0).state_dict())
    assert control.state_dict() == before


@pytest.mark.parametrize(("mine", "theirs"), [(None, "dynamic"), ("dynamic", 64.0), (64.0, None)])
def test_a_checkpoint_of_another_scale_policy_is_refused_by_both_names(mine, theirs):
    names = {None: "NoScale", "dynamic": "DynamicScale", 64.0: "StaticScale"}
    _, control = used_control(scale=mine, clip=1.0)
    _, source = used_control(scale=theirs, clip=1.0)
    before = control.state_dict()
    with pytest.raises(BadState) as caught:
        control.load_state_dict(source.state_dict())
    assert names[mine] in str(caught.value)
    assert names[theirs] in str(caught.value)
    assert control.state_dict() == before


def test_a_scale_that_is_not_its_static_policys_is_refused():
    _, control = used_control(scale=64.0, clip=1.0)
    saved = control.state_dict()
    saved["scale"] = 32.0
    with pytest.raises(BadState, match="scale"):
        control.load_state_dict(saved)
    assert control.scale == 64.0


def test_an_empty_checkpoint_is_told_to_come_from_a_disabled_scaler():
    _, control = used_control()
    before = control.state_dict()
    with pytest.raises(BadState, match="disabled"):
        control.load_state_dict(torch.amp.GradScaler("cpu", enabled=False).state_dict())
    assert control.state_dict() == before


@pytest.mark.parametrize("given", [None, [], "scale", 3, [("scale", 1.0)]])
def test_a_checkpoint_that_is_no_dict_is_a_type_error(given):
    _, control = used_control()
    before = control.state_dict()
    with pytest.raises(TypeError, match=r"state_dict must be a dict, got \w+"):
        control.load_state_dict(given)
    assert control.state_dict() == before


def test_loading_between_backward_and_step_asks_for_a_new_backward():
    p, control = used_control()
    control.zero_grad()
    control.backward((p * p).sum())
    control.load_state_dict(control.state_dict())
    with pytest.raises(gradilocks.errors.ScaleMisuse, match="backward"):
        control.step()


def test_loading_keeps_the_state_tensors_that_a_captured_graph_would_hold():
    _, control = used_control()
    place = control._engine.state.scale.data_ptr()
    control.load_state_dict(used_control()[1].state_dict())
    assert control._engine.state.scale.data_ptr() == place
