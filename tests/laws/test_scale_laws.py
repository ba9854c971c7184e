"""What every scale policy keeps, whatever the gradients do. A new policy joins by being listed."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gradilocks
from gradilocks import DynamicScale, GradientControl, HeadroomScale, NoScale, StaticScale
from tests.laws.examples import each_of

POLICIES = {
    "NoScale": NoScale(),
    "StaticScale": StaticScale(1024.0),
    "StaticScale smallest": StaticScale(2.0**-126),
    "StaticScale largest": StaticScale(float(torch.finfo(torch.float32).max)),
    "DynamicScale": DynamicScale(),
    "DynamicScale eager": DynamicScale(init_scale=1.0, growth_interval=1),
    "DynamicScale patient": DynamicScale(init_scale=1024.0, growth_interval=3, hysteresis=2),
    "DynamicScale narrow": DynamicScale(
        init_scale=8.0, growth_interval=2, min_scale=4.0, max_scale=16.0
    ),
    "DynamicScale pinned": DynamicScale(
        init_scale=8.0, growth_interval=1, min_scale=8.0, max_scale=8.0
    ),
    "DynamicScale odd factors": DynamicScale(
        init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, min_scale=0.1
    ),
    "DynamicScale of torch": DynamicScale.torch(),
    "DynamicScale of Megatron": DynamicScale.megatron(growth_interval=3),
    "DynamicScale of DeepSpeed": DynamicScale.deepspeed(growth_interval=3),
    "DynamicScale of fairseq": DynamicScale.fairseq(growth_interval=3, tolerance=0.3),
    "HeadroomScale": HeadroomScale(),
    "HeadroomScale eager": HeadroomScale(init_scale=1.0, growth_interval=1, margin=0),
    "DynamicScale whole range": DynamicScale(
        init_scale=1.0,
        growth_factor=2.0**40,
        backoff_factor=2.0**-40,
        growth_interval=1,
        min_scale=2.0**-126,
        max_scale=float(torch.finfo(torch.float32).max),
    ),
}

CPU = torch.device("cpu")
flag_lists = st.lists(st.booleans(), max_size=60)
every_policy = pytest.mark.parametrize("name", POLICIES)


def flag(skipped):
    return torch.tensor(1.0 if skipped else 0.0)


def path(policy, flags, state=None):
    """The scale before the first step and after each."""
    state = policy.start(CPU) if state is None else state
    scales = [state.scale.item()]
    for skipped in flags:
        policy.advance(state, flag(skipped))
        scales.append(state.scale.item())
    return scales


def in_float32(value):
    return torch.tensor(value, dtype=torch.float32).item()


@every_policy
@each_of(30, flags=flag_lists)
def test_the_scale_stays_inside_its_bounds(name, flags):
    policy = POLICIES[name]
    lowest, highest = (in_float32(bound) for bound in policy.bounds())
    for scale in path(policy, flags):
        assert lowest <= scale <= highest


@every_policy
@each_of(30, flags=flag_lists)
def test_the_scale_and_its_reciprocal_are_positive_and_finite(name, flags):
    for scale in path(POLICIES[name], flags):
        assert math.isfinite(scale)
        assert scale > 0.0
        reciprocal = torch.reciprocal(torch.tensor(scale)).item()
        assert math.isfinite(reciprocal)
        assert reciprocal > 0.0


@every_policy
@pytest.mark.parametrize("skipped", [False, True])
def test_five_hundred_steps_one_way_end_at_a_usable_scale(name, skipped):
    policy = POLICIES[name]
    scales = path(policy, [skipped] * 500)
    lowest, highest = (in_float32(bound) for bound in policy.bounds())
    assert lowest <= scales[-1] <= highest
    assert math.isfinite(1.0 / scales[-1])
    assert scales[-1] == scales[-2]


@every_policy
@each_of(30, flags=flag_lists)
def test_a_skip_never_raises_the_scale(name, flags):
    scales = path(POLICIES[name], flags)
    for skipped, before, after in zip(flags, scales, scales[1:], strict=False):
        if skipped:
            assert after <= before


@every_policy
@each_of(30, flags=flag_lists)
def test_a_finite_step_never_lowers_the_scale(name, flags):
    scales = path(POLICIES[name], flags)
    for skipped, before, after in zip(flags, scales, scales[1:], strict=False):
        if not skipped:
            assert after >= before


@every_policy
@each_of(20, flags=flag_lists)
def test_the_same_flags_make_the_same_path(name, flags):
    assert path(POLICIES[name], flags) == path(POLICIES[name], flags)


@every_policy
def test_the_state_is_updated_in_place(name):
    policy = POLICIES[name]
    state = policy.start(CPU)
    places = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    places = {**{k: t for k, t in places.items() if k != "more"}, **places["more"]}
    pointers = {key: tensor.data_ptr() for key, tensor in places.items()}
    for skipped in [False, True, True, False, False, False, True]:
        policy.advance(state, flag(skipped))
    for key, tensor in places.items():
        assert (state.more[key] if key in state.more else getattr(state, key)) is tensor
        assert tensor.data_ptr() == pointers[key]


@every_policy
def test_the_state_is_small_and_of_torchs_types(name):
    state = POLICIES[name].start(CPU)
    assert (state.scale.dtype, state.scale.shape) == (torch.float32, ())
    assert (state.growth_tracker.dtype, state.growth_tracker.shape) == (torch.int32, ())
    assert (state.hysteresis.dtype, state.hysteresis.shape) == (torch.int32, ())


@every_policy
def test_two_starts_share_nothing(name):
    policy = POLICIES[name]
    one, two = policy.start(CPU), policy.start(CPU)
    before = two.scale.item()
    for _ in range(10):
        policy.advance(one, flag(True))
    assert two.scale.item() == before


@every_policy
def test_a_policy_is_a_frozen_value_that_compares_by_its_settings(name):
    policy = POLICIES[name]
    assert policy == type(policy)(**dataclasses.asdict(policy))
    assert hash(policy) == hash(type(policy)(**dataclasses.asdict(policy)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


def control_with(policy):
    p = torch.nn.Parameter(torch.zeros(1))
    return p, GradientControl(torch.optim.SGD([p], lr=0.0), scale=policy, give_up_after=None)


def drive(p, control, flags):
    scales = []
    for skipped in flags:
        control.zero_grad()
        control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)
        p.grad = torch.tensor([math.inf if skipped else 0.0])
        control.step()
        scales.append(control.scale)
    return scales


@every_policy
@each_of(15, flags=st.lists(st.booleans(), max_size=20), at=st.integers(0, 20))
def test_a_checkpoint_in_between_changes_nothing(name, flags, at):
    whole = drive(*control_with(POLICIES[name]), flags)
    p, control = control_with(POLICIES[name])
    start = drive(p, control, flags[:at])
    q, resumed = control_with(POLICIES[name])
    resumed.load_state_dict(control.state_dict())
    assert resumed.state_dict() == control.state_dict()
    assert start + drive(q, resumed, flags[at:]) == whole


@every_policy
def test_the_first_loss_is_multiplied_by_the_starting_scale(name):
    policy = POLICIES[name]
    _, control = control_with(policy)
    loss = torch.tensor(1.0, requires_grad=True) * 1.0
    assert control.scale_loss(loss).item() == policy.start(CPU).scale.item() == control.scale


# What is particular to DynamicScale, in numbers that other projects agree on.


def test_megatrons_sequence():
    policy = DynamicScale(init_scale=1024.0, growth_interval=3, hysteresis=2)
    flags = [1, 0, 1, 1, 0, 0, 0, 1, 1]
    assert path(policy, flags)[1:] == [1024, 1024, 512, 256, 256, 256, 512, 512, 256]


def test_a_window_of_four_grows_at_4_8_and_12():
    policy = DynamicScale(init_scale=1.0, growth_interval=4)
    scales = path(policy, [False] * 13)
    grown = [step for step in range(1, 14) if scales[step] > scales[step - 1]]
    assert grown == [4, 8, 12]


def test_a_skip_starts_the_window_again():
    policy = DynamicScale(init_scale=8.0, growth_interval=3)
    assert path(policy, [0, 0, 1, 0, 0, 0]) == [8, 8, 8, 4, 4, 4, 8]


def test_hysteresis_is_refilled_only_by_growth():
    policy = DynamicScale(init_scale=64.0, growth_interval=2, hysteresis=3)
    assert path(policy, [1, 1, 0, 1]) == [64, 64, 64, 64, 32]
    assert path(policy, [1, 1, 0, 0, 1, 1, 1]) == [64, 64, 64, 64, 128, 128, 128, 64]


def test_growth_past_the_ceiling_is_not_taken_and_the_window_starts_again():
    policy = DynamicScale(init_scale=48.0, growth_interval=2, max_scale=100.0)
    state = policy.start(CPU)
    assert path(policy, [0] * 6, state) == [48, 48, 96, 96, 96, 96, 96]
    assert state.growth_tracker.item() == 0


def test_the_floor_holds_where_torchs_scale_reaches_zero():
    scales = path(DynamicScale(), [True] * 166)
    assert scales[-1] == 2.0**-24
    assert 1.0 / scales[-1] == 2.0**24


def test_a_window_made_shorter_than_the_tracker_still_grows():
    state = DynamicScale(init_scale=8.0, growth_interval=100).start(CPU)
    path(DynamicScale(init_scale=8.0, growth_interval=100), [False] * 50, state)
    shorter = DynamicScale(init_scale=8.0, growth_interval=10)
    assert path(shorter, [False], state) == [8.0, 16.0]


@settings(max_examples=40)
@given(flags=flag_lists, interval=st.integers(1, 5))
def test_with_hysteresis_one_it_is_torchs_rule(flags, interval):
    policy = DynamicScale(init_scale=256.0, growth_interval=interval, max_scale=2.0**100)
    scale, tracker = torch.tensor(256.0), torch.tensor(0, dtype=torch.int32)
    for skipped, ours in zip(flags, path(policy, flags)[1:], strict=True):
        torch._amp_update_scale_(scale, tracker, flag(skipped), 2.0, 0.5, interval)
        assert ours == scale.item()


def test_every_public_policy_is_listed_here():
    public = {name for name in gradilocks.__all__ if "Scale" in name} - {"GradScaler"}
    assert {type(policy).__name__ for policy in POLICIES.values()} == public
