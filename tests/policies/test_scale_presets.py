"""The scales of other systems, step by step, and what they have saved."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from gradilocks import DynamicScale, GradientControl, GradScaler, HeadroomScale
from gradilocks.errors import BadState, NeverFinite

CPU = torch.device("cpu")


def sequence(policy, flags):
    state = policy.start(CPU)
    found = []
    for flag in flags:
        policy.advance(state, torch.tensor(float(flag)))
        found.append(state.scale.item())
    return found


def growths(policy, steps):
    """The numbers of the finite steps after which the scale has grown."""
    scales = [policy.init_scale, *sequence(policy, [0] * steps)]
    return [k for k in range(1, steps + 1) if scales[k] > scales[k - 1]]


def test_megatrons_rule():
    policy = DynamicScale.megatron(init_scale=1024.0, growth_interval=3)
    found = sequence(policy, [1, 0, 1, 1, 0, 0, 0, 1, 1])
    assert found == [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


def test_when_they_grow():
    assert growths(DynamicScale(growth_interval=4), 13) == [4, 8, 12]
    assert growths(DynamicScale.fairseq(growth_interval=4), 13) == [4, 8, 12]
    assert growths(DynamicScale.deepspeed(growth_interval=4), 13) == [5, 9, 13]
    assert growths(DynamicScale.deepspeed(), 1001) == [1001]
    assert growths(DynamicScale.megatron(), 1001) == [1000]


def test_deepspeed_waits_one_step_more_after_an_overflow_too():
    policy = DynamicScale.deepspeed(init_scale=64.0, growth_interval=2, hysteresis=1)
    assert sequence(policy, [1, 0, 0, 0, 0, 0]) == [32, 32, 32, 64, 64, 128]


class DeepSpeed:
    """The rule of DeepSpeed's DynamicLossScaler as it is written there, in our own words."""

    def __init__(self, scale, window, *, floor=1.0, shift=2, consecutive=False):
        self.cur_scale, self.scale_window, self.scale_factor = scale, window, 2.0
        self.min_scale, self.delayed_shift, self.cur_hysteresis = floor, shift, shift
        self.consecutive_hysteresis = consecutive
        self.cur_iter, self.last_overflow_iter = 0, -1
        self.raise_error_at_min_scale, self.dynamic, self.dtype = True, True, torch.half

    def step(self, overflow):
        if overflow:
            if self.delayed_shift == 1 or self.cur_hysteresis == 1:
                # Where it is at the floor already, DeepSpeed ends the run.
                self.cur_scale = max(self.cur_scale / self.scale_factor, self.min_scale)
            else:
                self.cur_hysteresis -= 1
            self.last_overflow_iter = self.cur_iter
        else:
            if self.consecutive_hysteresis:
                self.cur_hysteresis = self.delayed_shift
            finite = self.cur_iter - self.last_overflow_iter - 1
            if finite > 0 and finite % self.scale_window == 0:
                self.cur_hysteresis = self.delayed_shift
                self.cur_scale *= self.scale_factor
        self.cur_iter += 1
        return self.cur_scale


def overflows(seed, count=120, share=0.25):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(count, generator=generator) < share).int().tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("shift", [1, 2, 3])
@pytest.mark.parametrize("consecutive", [False, True])
def test_deepspeeds_rule(consecutive, shift, seed):
    settings = {"hysteresis": shift, "consecutive_hysteresis": consecutive}
    policy = DynamicScale.deepspeed(growth_interval=4, **settings)
    there = DeepSpeed(2.0**16, 4, shift=shift, consecutive=consecutive)
    flags = overflows(seed)
    assert sequence(policy, flags) == [there.step(flag) for flag in flags]


def test_hysteresis_that_every_finite_step_refills_is_used_up_by_overflows_in_a_row_alone():
    flags = [1, 0, 1, 0, 1, 1]
    found = {
        refills: sequence(DynamicScale(64.0, hysteresis=2, consecutive_hysteresis=refills), flags)
        for refills in (False, True)
    }
    assert found == {False: [64, 64, 32, 32, 16, 8], True: [64, 64, 64, 64, 64, 32]}
    assert DynamicScale(consecutive_hysteresis=True).rules() is None  # No device follows it.


def test_at_the_floor_the_scale_stays_and_the_control_gives_up():
    """Where DeepSpeed and fairseq end the run at once."""
    for policy, lowest in ((DynamicScale.deepspeed(), 1.0), (DynamicScale.fairseq(), 2.0**-13)):
        param = nn.Parameter(torch.zeros(1))
        control = GradientControl(torch.optim.SGD([param], lr=0.1), scale=policy, give_up_after=40)
        scales = []
        for _ in range(39):
            step(control, 1)
            scales.append(control.scale)
        assert scales[-1] == lowest
        with pytest.raises(NeverFinite):
            step(control, 1)


class Fairseq:
    """fairseq's rule as it is written there, in our own words: the share of overflows counts."""

    def __init__(self, scale, window, tolerance):
        self.scale, self.window, self.tolerance = scale, window, tolerance
        self.iter, self.last_overflow, self.last_rescale, self.overflows = 0, -1, -1, 0

    def step(self, overflow):
        if overflow:
            since = self.iter - self.last_rescale
            self.last_overflow = self.iter
            self.overflows += 1
            if self.overflows / since >= self.tolerance:
                self.scale /= 2
                self.last_rescale, self.overflows = self.iter, 0
        elif (self.iter - self.last_overflow) % self.window == 0:
            self.scale *= 2
            self.last_rescale = self.iter
        self.iter += 1
        return self.scale


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tolerance", [0.0, 0.2, 0.5])
def test_fairseqs_rule(tolerance, seed):
    generator = torch.Generator().manual_seed(seed)
    flags = (torch.rand(60, generator=generator) < 0.25).int().tolist()
    there = Fairseq(2.0**7, 4, tolerance)
    expected = [there.step(flag) for flag in flags]
    assert sequence(DynamicScale.fairseq(growth_interval=4, tolerance=tolerance), flags) == expected


def test_every_preset_has_its_start_and_its_floor():
    found = {
        name: (p.init_scale, p.min_scale)
        for name in ("torch", "megatron", "deepspeed", "fairseq")
        for p in [getattr(DynamicScale, name)()]
    }
    assert found == {
        "torch": (2.0**16, 2.0**-126),
        "megatron": (2.0**32, 1.0),
        "deepspeed": (2.0**16, 1.0),
        "fairseq": (2.0**7, 2.0**-13),
    }
    assert sequence(DynamicScale.megatron(init_scale=2.0), [1] * 5)[-1] == 1.0


@pytest.mark.parametrize(("start", "lowest"), [(100.0, 100 / 2**19), (2.0**7, 2.0**-13)])
def test_fairseqs_floor_is_the_last_scale_above_its_least(start, lowest):
    assert DynamicScale.fairseq(init_scale=start).min_scale == lowest
    assert lowest > 1e-4 >= lowest / 2
    assert DynamicScale.fairseq(init_scale=start, min_loss_scale=start).min_scale == start
    assert DynamicScale.fairseq(min_loss_scale=1e-300).min_scale == 2.0**-126


def test_torchs_preset_takes_torchs_numbers():
    settings = {
        "init_scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
    }
    theirs = torch.amp.GradScaler("cpu", **settings)
    control = control_with(DynamicScale.torch(**settings))
    (param,) = control._all_parameters()
    optimizer = torch.optim.SGD([param], lr=0.1)
    for flag in overflows(1, count=30, share=0.2):
        step(control, flag)
        theirs.scale(torch.ones(()))
        param.grad = torch.tensor([float("inf") if flag else 0.0])
        theirs.step(optimizer)
        theirs.update()
        assert control.scale == theirs.get_scale()
    with pytest.raises(ValueError, match=r"growth_factor must be greater than 1, got 0\.5"):
        DynamicScale.torch(growth_factor=0.5)


@pytest.mark.parametrize("start", [2.0**120, 3.0 * 2.0**118])
def test_torchs_preset_grows_as_far_as_torchs_scaler(start):
    policy = DynamicScale.torch(init_scale=start, growth_interval=1)
    theirs = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=1)
    theirs.scale(torch.ones(()))
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    for found in sequence(policy, [0] * 12):
        param.grad = torch.zeros(1)
        theirs.step(optimizer)
        theirs.update()
        assert found == theirs.get_scale()


def control_with(policy):
    return GradientControl(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), scale=policy)


def step(control, flag):
    """A step whose gradient is Inf if `flag`, else 0."""
    (param,) = control._all_parameters()
    control.zero_grad()
    control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)
    param.grad = torch.tensor([float("inf") if flag else 0.0])
    control.step()


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(DynamicScale.deepspeed(growth_interval=3), id="deepspeed"),
        pytest.param(DynamicScale.fairseq(tolerance=0.5), id="fairseq"),
        pytest.param(HeadroomScale(), id="headroom"),
    ],
)
def test_what_they_keep_goes_through_a_checkpoint(policy):
    control, other = control_with(policy), control_with(policy)
    for flag in (0, 0, 1, 0):
        step(control, flag)
    other.load_state_dict(control.state_dict())
    assert other.state_dict() == control.state_dict()
    spoilt = control.state_dict()
    spoilt["gradilocks"]["scale_state"] = {"nonsense": 1.0}
    before = other.state_dict()
    with pytest.raises(BadState, match="the state of the scale policy"):
        other.load_state_dict(spoilt)
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"delay": -1}, ValueError, "delay must be at least 0"),
        ({"delay": 1.0}, TypeError, "delay must be an int"),
        ({"tolerance": 1.5}, ValueError, "tolerance must lie between 0 and 1"),
        ({"tolerance": "x"}, TypeError, "tolerance must be a number"),
        ({"consecutive_hysteresis": 1}, TypeError, "consecutive_hysteresis must be True or False"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, words):
    with pytest.raises(error, match=words):
        DynamicScale(**settings)


@pytest.mark.parametrize("steps", [0, 1, 4, 5, 6, 9, 11])
def test_a_run_of_deepspeed_goes_on_here(steps):
    """Whose state is its count of iterations and the last one that overflowed."""
    policy = DynamicScale.deepspeed(init_scale=64.0, growth_interval=4, hysteresis=1)
    flags = [0, 1, *[0] * 20]
    whole = sequence(policy, flags)
    at = 2 + steps
    control = control_with(policy)
    control.load_state_dict({"cur_scale": whole[at - 1], "cur_iter": at, "last_overflow_iter": 1})
    found = []
    for flag in flags[at:]:
        step(control, flag)
        found.append(control.scale)
    assert found == whole[at:]


def test_a_run_of_megatron_goes_on_here():
    policy = DynamicScale.megatron(init_scale=1024.0, growth_interval=3)
    flags = [1, 0, 1, 1, 0, 0, 0, 1, 1]
    for at in range(1, len(flags)):
        state = policy.start(CPU)
        for flag in flags[:at]:
            policy.advance(state, torch.tensor(float(flag)))
        control = control_with(policy)
        control.load_state_dict(
            {
                "scale": state.scale.reshape(1),
                "growth_tracker": state.growth_tracker.item(),
                "hysteresis_tracker": state.hysteresis.item(),
            }
        )
        for flag in flags[at:]:
            step(control, flag)
        assert control.scale == 256.0


def test_runs_of_fairseq_and_apex_go_on_here():
    control = control_with(DynamicScale.fairseq())
    control.load_state_dict({"loss_scale": 32.0, "step": 7})
    assert control.scale == 32.0
    control = control_with(DynamicScale())
    control.load_state_dict({"loss_scaler0": {"loss_scale": 512.0, "unskipped": 17}})
    assert (control.scale, control.state_dict()["_growth_tracker"]) == (512.0, 17)


@pytest.mark.parametrize("at", [3, 7, 20, 41])
@pytest.mark.parametrize("as_saved", [lambda it: {"loss_scaler": it, "overflow": False}, vars])
def test_a_run_of_zero_goes_on_here_from_the_scaler_itself(as_saved, at):
    """ZeRO saves its scaler, an object; all of its rule is there."""
    there = DeepSpeed(2.0**10, 5, floor=4.0, shift=3, consecutive=True)
    flags = overflows(7, share=0.3)
    for flag in flags[:at]:
        there.step(flag)
    control = control_with(DynamicScale.deepspeed())
    control.load_state_dict(as_saved(there))
    for flag in flags[at:]:
        step(control, flag)
        assert control.scale == there.step(flag)


def test_a_scale_of_zeros_that_never_moves_is_said_to_be_one():
    static = type("LossScaler", (), {})()
    static.cur_scale, static.dynamic = 128.0, False
    for made in (control_with(DynamicScale.deepspeed()), GradScaler("cpu")):
        with pytest.raises(BadState, match=r"never moves, 128\.0.*") as caught:
            made.load_state_dict({"loss_scaler": static})
        assert "GradientControl(scale=128.0)" in str(caught.value)
        assert "GradScaler(policy=StaticScale(128.0))" in str(caught.value)


@pytest.mark.parametrize(
    "policy", [None, DynamicScale.deepspeed()], ids=["torch's", "DynamicScale"]
)
def test_what_torchs_rule_cannot_keep_of_another_is_said(policy, caplog):
    saved = {"cur_scale": 1024.0, "cur_iter": 3, "last_overflow_iter": 1, "scale_window": 77}
    saved |= {"delayed_shift": 2, "consecutive_hysteresis": True, "min_scale": 1}
    GradScaler("cpu", policy=policy).load_state_dict(saved)
    (told,) = [each.getMessage() for each in caplog.records]
    lost = "has hysteresis=2, consecutive_hysteresis=True, min_scale=1.0 too"
    assert (lost in told) is (policy is None)
    assert "growth_interval" in told
    caplog.clear()
    plain = GradScaler("cpu", policy=policy)
    plain.load_state_dict(saved, policies="scaler")
    assert not caplog.records


@pytest.mark.parametrize("kind", ["control", "scaler"])
def test_of_several_losses_of_apex_the_smallest_scale_is_taken_and_it_is_said(kind, caplog):
    saved = {
        "loss_scaler0": {"loss_scale": 512.0, "unskipped": 17},
        "loss_scaler1": {"loss_scale": 64.0, "unskipped": 300},
        "loss_scaler2": {"loss_scale": 128.0, "unskipped": 4},
    }
    made = control_with(DynamicScale()) if kind == "control" else GradScaler("cpu")
    made.load_state_dict(saved)
    state = made.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (64.0, 4)
    assert "3 losses with a scale each (512, 64, 128)" in caplog.text
    assert "the smallest" in caplog.text
    saved["loss_scaler1"]["loss_scale"] = -1.0
    with pytest.raises(BadState, match="loss_scale in the state_dict must be positive"):
        made.load_state_dict(saved)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": 5}, "must be after"),
        (
            {"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": 0, "min_scale": 0.0},
            "min_scale in the state_dict must be positive",
        ),
        (
            {"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": 0, "delayed_shift": 0},
            "delayed_shift .* whole number",
        ),
        (
            {
                "cur_scale": 8.0,
                "cur_iter": 1,
                "last_overflow_iter": 0,
                "consecutive_hysteresis": "x",
            },
            "consecutive_hysteresis must be True or False",
        ),
        ({"cur_scale": -8.0, "cur_iter": 1, "last_overflow_iter": 0}, "positive and finite"),
        ({"cur_scale": 8.0, "cur_iter": "x", "last_overflow_iter": 0}, "cur_iter .* whole number"),
        ({"loss_scale": "x"}, "scale in the state_dict must be a number"),
        ({"loss_scaler0": {"loss_scale": 1.0, "unskipped": -1}}, "unskipped .* whole number"),
    ],
)
def test_a_spoilt_state_of_another_system_is_refused_and_changes_nothing(saved, words):
    control = control_with(DynamicScale.deepspeed())
    before = control.state_dict()
    with pytest.raises(BadState, match=words):
        control.load_state_dict(saved)
    assert control.state_dict() == before


def test_the_state_of_another_system_needs_a_scale_that_moves_as_theirs_does():
    with pytest.raises(BadState, match=r"DeepSpeed's scaler and needs a DynamicScale, .* Headroom"):
        control_with(HeadroomScale()).load_state_dict(
            {"cur_scale": 8.0, "cur_iter": 1, "last_overflow_iter": 0}
        )


@pytest.mark.parametrize("percent", range(1, 100, 7))
def test_fairseqs_tolerance_is_a_share_to_the_last_bit(percent):
    tolerance = percent / 100
    policy = DynamicScale.fairseq(tolerance=tolerance, growth_interval=10**6)
    state = policy.start(torch.device("cpu"))
    scale, since, overflows = 2.0**7, 0, 0
    generator = random.Random(percent)
    for _ in range(300):
        overflow = generator.random() < tolerance * 1.1
        since += 1
        overflows += overflow
        if overflow and overflows / since >= tolerance:
            scale, since, overflows = max(scale / 2, 2.0**-13), 0, 0
        policy.advance(state, torch.tensor(float(overflow)))
        assert float(state.scale) == scale
