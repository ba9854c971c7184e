"""Laws that every clip policy obeys, for any gradients. A new policy joins by being listed."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from gradilocks import clip as clip_module
from gradilocks.clip import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
    resolve_clip,
)
from policies.drive import Driver, no_host_reads, p_norm
from policies.own_policies import ClipPerTensor, NotAboveTheLast

INF = math.inf

BY_NORM = {
    "ClipByNorm 1": ClipByNorm(1.0),
    "ClipByNorm 0.01": ClipByNorm(0.01),
    "ClipByNorm 1e6": ClipByNorm(1e6),
    "ClipByNorm p=1": ClipByNorm(1.0, order=1.0),
    "ClipByNorm p=3": ClipByNorm(2.0, order=3.0),
    "ClipByNorm p=inf": ClipByNorm(0.5, order=INF),
    "ClipByNorm inf": ClipByNorm(INF),
}
"""Policies that multiply all gradients by one factor."""

ZEROING = {"ClipByNorm 0": ClipByNorm(0.0), "ClipByValue 0": ClipByValue(0.0)}
"""Policies with a limit of zero, the only reason to turn a finite gradient into zero."""

SINGLE = {
    **BY_NORM,
    **ZEROING,
    "ClipByValue 0.5": ClipByValue(0.5),
    "ClipByValue inf": ClipByValue(INF),
    "ClipPerGroup": ClipPerGroup({0: 0.5}),
    "ClipPerGroup p=inf": ClipPerGroup({"layer.0": 0.5, "layer.*": None}, otherwise=1.0, order=INF),
    "AdaptiveClip": AdaptiveClip(0.01),
    "QuantileClip": QuantileClip(0.5, window=4),
    "ZScoreClip": ZScoreClip(warmup=2),
    "AdaGC": AdaGC(warmup=2),
    "SkipSpikes": SkipSpikes(window=4),
    "SkipSpikes max_norm": SkipSpikes(window=4, max_norm=1e300),
    "own policy without a base class": NotAboveTheLast(),
    "own policy per tensor": ClipPerTensor(0.5),
}
CHAINS = {
    "chain": chain(SkipSpikes(window=4), ClipByNorm(1.0), ClipByValue(0.25)),
    "chain of parts": chain(AdaptiveClip(0.1), ClipPerTensor(0.5), AdaGC(warmup=2), ClipByNorm(0.7)),
}
POLICIES = {**SINGLE, **CHAINS}

SMALL_LIMITS = {*ZEROING, "ClipByNorm 0.01", "AdaptiveClip", "chain of parts"}
"""Policies whose limit for weights of zero is below 0.1."""

every_policy = pytest.mark.parametrize("name", POLICIES)
every_single = pytest.mark.parametrize("name", SINGLE)
every_norm_policy = pytest.mark.parametrize("name", BY_NORM)


def gradient_lists(count, seed):
    """Lists of gradients of magnitudes from 2^-60 to 2^100, some of them zero."""
    generator = random.Random(seed)

    def element():
        if generator.random() < 0.15:
            return 0.0
        return generator.choice([-1.0, 1.0]) * generator.uniform(1.0, 2.0) * 2.0 ** generator.randint(-60, 99)

    def gradient():
        return [element() for _ in range(generator.randint(1, 6))]

    return [[gradient() for _ in range(generator.randint(1, 4))] for _ in range(count)]


def state_and_norms(policy, device="cpu", seed=0, steps=0):
    """A state after some steps, and the arguments of the next."""
    generator = torch.Generator().manual_seed(seed)
    per = getattr(policy, "per", "model")
    count = {"model": 1, "tensor": 3, "row": 5}.get(per) or policy.count
    state = dict(policy.init())
    for step in range(steps + 1):
        norms = torch.rand(count, generator=generator, dtype=torch.float64) + 0.5
        total = norms[0].clone() if per == "model" else p_norm(norms, getattr(policy, "order", 2.0))
        given = {**state, "weight_norms": torch.ones_like(norms)} if per == "row" else state
        if step < steps:
            state = policy.update(norms, total, policy.limit(norms, total, given), state)
    given = {name: tensor.to(device) for name, tensor in given.items()}
    return given, norms.to(device), total.to(device)


@every_policy
def test_factors_lie_between_zero_and_one(name):
    driver = Driver(POLICIES[name])
    for gradients in gradient_lists(12, seed=1):
        driver.states = [dict(policy.init()) for policy in driver.policies]
        step = driver.step(*gradients)
        assert not step.skipped
        for limit in step.limits:
            assert ((limit.factor >= 0.0) & (limit.factor <= 1.0)).all()
            assert limit.bound.shape == limit.reject.shape == ()
            assert limit.reject.dtype == torch.bool
            assert limit.bound >= 0.0


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ZEROING])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e20, 3e38])
def test_a_finite_gradient_is_never_zeroed(name, size):
    driver = Driver(POLICIES[name])
    for _ in range(4):
        step = driver.step([size, -size, size])
        (found,) = step.gradients
        assert not step.skipped
        assert found.isfinite().all()
        assert found.sign().tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("name", ZEROING)
@pytest.mark.parametrize("size", [1e-6, 1.0, 3e38])
def test_a_limit_of_zero_leaves_exactly_zero(name, size):
    (found,) = Driver(POLICIES[name]).step([size, -size]).gradients
    assert found.abs().tolist() == [0.0, 0.0]


@every_norm_policy
def test_the_direction_is_kept_and_the_norm_is_at_most_the_limit(name):
    policy = POLICIES[name]
    for gradients in gradient_lists(12, seed=2):
        step = Driver(policy).step(*gradients)
        before = torch.cat([torch.tensor(row, dtype=torch.float64) for row in gradients])
        after = torch.cat(step.gradients)
        torch.testing.assert_close(after, before * step.limits[0].factor, rtol=1e-14, atol=0.0)
        assert p_norm(after, policy.order) <= policy.max_norm * (1 + 1e-12)


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in SMALL_LIMITS])
def test_gradients_within_the_bound_are_not_changed(name):
    driver = Driver(POLICIES[name])
    for _ in range(4):
        (found,) = driver.step([0.1, 0.1]).gradients
        assert found.tolist() == [0.1, 0.1]


@every_policy
def test_the_same_gradients_give_the_same_limits_and_states(name):
    one, two = Driver(POLICIES[name]), Driver(POLICIES[name])
    for _ in range(2):
        for gradients in ([[1.0, 2.0], [3.0]], [[0.1, 0.0], [7.0]], [[5.0, 1.0], [0.0]]):
            first, second = one.step(*gradients), two.step(*gradients)
            assert all(map(torch.equal, first.gradients, second.gradients))
            assert (first.bound, first.rejected) == (second.bound, second.rejected)
            for a, b in zip(one.states, two.states, strict=True):
                assert a.keys() == b.keys()
                assert all(torch.equal(a[key], b[key]) for key in a)


@every_single
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_limit_and_update_are_pure(name, steps):
    policy = SINGLE[name]
    state, norms, total = state_and_norms(policy, steps=steps)
    copies = [tensor.clone() for tensor in (*state.values(), norms, total)]
    limit = policy.limit(norms, total, state)
    policy.update(norms, total, limit, state)
    assert all(map(torch.equal, copies, (*state.values(), norms, total)))


@every_single
def test_update_keeps_names_and_dtypes_of_the_state(name):
    policy = SINGLE[name]
    state, norms, total = state_and_norms(policy)
    new = policy.update(norms, total, policy.limit(norms, total, state), state)
    assert new.keys() == state.keys()
    for key, tensor in new.items():
        assert tensor.dtype == state[key].dtype
        assert tensor.shape == state[key].shape or (policy.per == "tensor" and tensor.shape == norms.shape)


@every_single
def test_two_states_share_no_memory(name):
    one, two = SINGLE[name].init(), SINGLE[name].init()
    addresses = [tensor.data_ptr() for tensor in (*one.values(), *two.values())]
    assert len(set(addresses)) == len(addresses)


@every_single
@pytest.mark.parametrize("steps", [0, 5])
def test_no_policy_reads_a_number_on_the_host(name, steps):
    policy = SINGLE[name]
    state, norms, total = state_and_norms(policy, "meta", steps=steps)
    with no_host_reads("meta"):
        limit = policy.limit(norms, total, state)
        policy.update(norms, total, limit, state)


@pytest.mark.gpu
@every_single
def test_on_cuda_a_policy_gives_the_same_numbers_captured_in_a_graph(name):
    policy = SINGLE[name]
    inputs = state_and_norms(policy, steps=5)
    expected = policy.limit(inputs[1], inputs[2], inputs[0])
    expected_state = policy.update(inputs[1], inputs[2], expected, inputs[0])
    state, norms, total = state_and_norms(policy, "cuda", steps=5)
    torch.cuda.synchronize()
    policy.limit(norms, total, state)  # Loads the kernels.
    torch.cuda.set_sync_debug_mode("error")
    try:
        limit = policy.limit(norms, total, state)
        policy.update(norms, total, limit, state)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        limit = policy.limit(norms, total, state)
        new_state = policy.update(norms, total, limit, state)
    graph.replay()
    for key in ("factor", "bound", "reject"):
        torch.testing.assert_close(getattr(limit, key).cpu(), getattr(expected, key), rtol=1e-12, atol=0.0)
    for key, tensor in expected_state.items():
        torch.testing.assert_close(new_state[key].cpu(), tensor, rtol=1e-12, atol=0.0)


@every_single
def test_a_policy_is_a_frozen_value_that_compares_by_its_settings(name):
    policy = SINGLE[name]
    settings = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    assert policy == type(policy)(**settings)
    assert repr(policy) == repr(type(policy)(**settings))
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


LEARNING = {
    "QuantileClip": QuantileClip(0.5),
    "ZScoreClip": ZScoreClip(warmup=2),
    "AdaGC": AdaGC(warmup=2),
    "SkipSpikes": SkipSpikes(window=4),
    "chain": chain(SkipSpikes(window=4), ZScoreClip(warmup=2), ClipByNorm(1.0)),
}


@pytest.mark.parametrize("name", LEARNING)
@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_a_nonfinite_step_changes_no_state(name, bad):
    healthy, struck = Driver(LEARNING[name]), Driver(LEARNING[name])
    for number in range(8):
        norm = 1.0 + 0.1 * number
        healthy.step(norm)
        if number in (0, 3, 5):
            step = struck.step(bad)
            assert step.skipped
            assert not step.rejected
        struck.step(norm)
        for one, two in zip(healthy.states, struck.states, strict=True):
            assert all(torch.equal(one[key], two[key]) for key in one)


def test_every_public_policy_is_listed_here():
    public = {
        name
        for name in clip_module.__all__
        if isinstance(member := getattr(clip_module, name), type) and issubclass(member, clip_module.ClipPolicy)
    }
    listed = {type(policy).__name__ for policy in SINGLE.values()}
    assert public - {"ClipPolicy"} <= listed
    with_memory = {type(policy).__name__ for policy in SINGLE.values() if policy.init()} & public
    assert with_memory <= {type(policy).__name__ for policy in LEARNING.values()}
    assert all(resolve_clip(policy) for policy in POLICIES.values())
