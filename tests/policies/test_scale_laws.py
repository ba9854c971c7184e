"""Laws that every scale policy obeys, and the rule of DynamicScale in numbers. A new policy joins by being listed."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from gradilocks import scale as scale_module
from gradilocks.scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    DynamicScale,
    HeadroomScale,
    StaticScale,
    resolve_scale,
)
from gradilocks.step.state import StepState
from policies.drive import no_host_reads, scale_path
from policies.own_policies import Thirds

POLICIES = {
    "StaticScale": StaticScale(1024.0),
    "StaticScale smallest": StaticScale(SMALLEST_SCALE),
    "StaticScale largest": StaticScale(LARGEST_SCALE),
    "DynamicScale": DynamicScale(),
    "DynamicScale eager": DynamicScale(init_scale=1.0, growth_interval=1),
    "DynamicScale hysteresis": DynamicScale(init_scale=1024.0, growth_interval=3, hysteresis=2),
    "DynamicScale narrow": DynamicScale(init_scale=8.0, growth_interval=2, min_scale=4.0, max_scale=16.0),
    "DynamicScale pinned": DynamicScale(init_scale=8.0, growth_interval=1, min_scale=8.0, max_scale=8.0),
    "DynamicScale odd factors": DynamicScale(
        init_scale=1000.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=2, min_scale=0.1
    ),
    "DynamicScale whole range": DynamicScale(1.0, 2.0**40, 2.0**-40, 1, SMALLEST_SCALE, LARGEST_SCALE),
    "HeadroomScale": HeadroomScale(),
    "HeadroomScale eager": HeadroomScale(init_scale=1.0, growth_interval=1, margin=0),
    "own policy without a base class": Thirds(),
}
every_policy = pytest.mark.parametrize("name", POLICIES)

_random = random.Random(0)
FLAGS = [[_random.random() < share for _ in range(50)] for share in (0.0, 0.1, 0.3, 0.5, 0.9, 1.0)]


@every_policy
def test_the_scale_stays_within_its_bounds_and_has_a_finite_reciprocal(name):
    policy = POLICIES[name]
    lowest, highest = torch.tensor([policy.min_scale, policy.max_scale], dtype=torch.float32).tolist()
    for flags in FLAGS:
        for scale in scale_path(policy, flags):
            assert lowest <= scale <= highest
            reciprocal = torch.tensor(scale).reciprocal().item()
            assert 0.0 < reciprocal < math.inf


@every_policy
@pytest.mark.parametrize("largest", [0.0, 1e-300, 1.0, 65504.0, 1e300, math.inf, math.nan])
@pytest.mark.parametrize("overflow", [False, True])
def test_no_magnitude_makes_the_scale_unusable(name, largest, overflow):
    policy = POLICIES[name]
    lowest, highest = torch.tensor([policy.min_scale, policy.max_scale], dtype=torch.float32).tolist()
    assert all(lowest <= scale <= highest for scale in scale_path(policy, [overflow] * 8, largest=largest))


@every_policy
@pytest.mark.parametrize("overflow", [False, True])
def test_four_hundred_equal_steps_end_at_a_usable_scale(name, overflow):
    scales = scale_path(POLICIES[name], [overflow] * 400)
    assert scales[-1] == scales[-2]
    assert 0.0 < 1.0 / scales[-1] < math.inf


@every_policy
def test_an_overflow_never_raises_the_scale_and_a_finite_step_never_lowers_it(name):
    for flags in FLAGS:
        scales = scale_path(POLICIES[name], flags)
        for overflow, before, after in zip(flags, scales, scales[1:], strict=False):
            assert after <= before if overflow else after >= before


@every_policy
def test_update_is_pure_and_keeps_names_dtypes_and_shapes(name):
    policy = POLICIES[name]
    state = policy.init()
    copies = {key: tensor.clone() for key, tensor in state.items()}
    for overflow in (False, True):
        new = policy.update(state, torch.tensor(overflow), torch.tensor(3.0, dtype=torch.float64))
        assert all(torch.equal(state[key], copies[key]) for key in state)
        assert {key: (t.dtype, t.shape) for key, t in new.items()} == {k: (t.dtype, t.shape) for k, t in state.items()}


@pytest.mark.parametrize("name", [name for name in POLICIES if not name.startswith("own")])
def test_the_state_has_the_dtypes_of_torchs_scaler(name):
    state = POLICIES[name].init()
    found = {key: (state[key].dtype, state[key].ndim) for key in ("scale", "growth_tracker", "hysteresis")}
    assert found == {"scale": (torch.float32, 0), "growth_tracker": (torch.int32, 0), "hysteresis": (torch.int32, 0)}


@every_policy
def test_no_policy_reads_a_number_on_the_host(name):
    policy = POLICIES[name]
    state = {key: tensor.to("meta") for key, tensor in policy.init().items()}
    overflow = torch.zeros((), dtype=torch.bool, device="meta")
    with no_host_reads("meta"):
        policy.update(state, overflow, torch.zeros((), dtype=torch.float64, device="meta"))


@pytest.mark.gpu
@every_policy
@pytest.mark.parametrize("overflow", [False, True])
def test_on_cuda_a_policy_gives_the_same_numbers_captured_in_a_graph(name, overflow):
    policy = POLICIES[name]
    flag, largest = torch.tensor(overflow), torch.tensor(0.25, dtype=torch.float64)
    expected = policy.update(policy.init(), flag, largest)
    state = {key: tensor.cuda() for key, tensor in policy.init().items()}
    flag, largest = flag.cuda(), largest.cuda()
    policy.update(state, flag, largest)  # Loads the kernels.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = policy.update(state, flag, largest)
    graph.replay()
    assert {key: tensor.item() for key, tensor in new.items()} == {key: t.item() for key, t in expected.items()}


@every_policy
def test_a_policy_is_a_frozen_value_that_compares_by_its_settings(name):
    policy = POLICIES[name]
    assert policy == type(policy)(**dataclasses.asdict(policy))
    assert hash(policy) == hash(type(policy)(**dataclasses.asdict(policy)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


def test_every_public_policy_is_listed_here():
    public = {
        name
        for name in scale_module.__all__
        if isinstance(member := getattr(scale_module, name), type) and issubclass(member, scale_module.ScalePolicy)
    }
    assert public - {"ScalePolicy"} <= {type(policy).__name__ for policy in POLICIES.values()}
    assert all(resolve_scale(policy) is policy for policy in POLICIES.values())


# The rule of DynamicScale.


SEQUENCES = {
    "Megatron's": (
        DynamicScale(init_scale=1024.0, growth_interval=3, hysteresis=2),
        [1, 0, 1, 1, 0, 0, 0, 1, 1],
        [1024, 1024, 512, 256, 256, 256, 512, 512, 256],
    ),
    "an interval of four grows at 4 and 8": (
        DynamicScale(init_scale=1.0, growth_interval=4), [0] * 9, [1, 1, 1, 2, 2, 2, 2, 4, 4]
    ),
    "an overflow restarts the interval": (
        DynamicScale(init_scale=8.0, growth_interval=3), [0, 0, 1, 0, 0, 0], [8, 8, 4, 4, 4, 8]
    ),
    "only growth refills the hysteresis": (
        DynamicScale(init_scale=64.0, growth_interval=2, hysteresis=3),
        [1, 1, 0, 1, 0, 0, 1, 1, 1],
        [64, 64, 64, 32, 32, 64, 64, 64, 32],
    ),
    "growth beyond the ceiling is omitted and the interval restarts": (
        DynamicScale(init_scale=48.0, growth_interval=2, max_scale=100.0), [0] * 6, [48, 96, 96, 96, 96, 96]
    ),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "flags", "expected"), SEQUENCES.values(), ids=SEQUENCES)
def test_the_scale_after_each_step_of_a_sequence(policy, flags, expected):
    assert scale_path(policy, flags)[1:] == expected


def test_the_floor_holds_where_torchs_scale_reaches_zero():
    assert scale_path(DynamicScale(), [1] * 166)[-1] == 2.0**-24


def test_an_interval_shortened_below_the_tracker_still_grows():
    state = DynamicScale(init_scale=8.0, growth_interval=100).init()
    state["growth_tracker"].fill_(50)
    assert scale_path(DynamicScale(init_scale=8.0, growth_interval=10), [0], state=state) == [8.0, 16.0]


@pytest.mark.parametrize("interval", [1, 2, 3, 5])
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (1.7, 0.3)])
def test_with_hysteresis_one_it_is_torchs_rule(interval, growth, backoff):
    policy = DynamicScale(256.0, growth, backoff, interval, SMALLEST_SCALE, LARGEST_SCALE)
    for flags in FLAGS:
        scale, tracker = torch.tensor(256.0), torch.tensor(0, dtype=torch.int32)
        for overflow, ours in zip(flags, scale_path(policy, flags)[1:], strict=True):
            torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), growth, backoff, interval)
            assert ours == max(scale.item(), SMALLEST_SCALE)


def test_only_exact_classes_give_their_rule_in_plain_numbers():
    def moves_and_rules(policy):
        state = StepState(policy)
        return state.updates_scale, state.rules

    dynamic = DynamicScale(8.0, 3.0, 0.25, 7, 0.5, 64.0, 2)
    assert moves_and_rules(dynamic) == (True, dynamic)
    assert moves_and_rules(StaticScale(8.0))[0] is False
    assert moves_and_rules(None)[0] is False
    assert moves_and_rules(HeadroomScale()) == (True, None)

    class Derived(DynamicScale):
        pass

    class Constant(StaticScale):
        pass

    assert moves_and_rules(Derived()) == (True, None)
    assert moves_and_rules(Constant(8.0)) == (True, None)
