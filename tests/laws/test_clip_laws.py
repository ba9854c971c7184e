"""What every clip policy keeps, whatever the gradients are. A new policy joins by being listed."""

import dataclasses
import math

import pytest
import torch
from hypothesis import strategies as st

import gradilocks
from gradilocks import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPerTensor,
    GradientControl,
    NoClip,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
)
from gradilocks.step.engine import decide
from gradilocks.step.measure import measure
from gradilocks.values import Scene
from tests.laws.examples import each_of

INF, NAN = math.inf, math.nan

BY_NORM = {
    "ClipByNorm 1": ClipByNorm(1.0),
    "ClipByNorm 0.01": ClipByNorm(0.01),
    "ClipByNorm 1e6": ClipByNorm(1e6),
    "ClipByNorm p=1": ClipByNorm(1.0, order=1.0),
    "ClipByNorm p=3": ClipByNorm(2.0, order=3.0),
    "ClipByNorm p=inf": ClipByNorm(0.5, order=INF),
    "ClipByNorm inf": ClipByNorm(INF),
}
"""Policies that shorten all gradients by one factor."""

ZEROING = {"ClipByNorm 0": ClipByNorm(0.0), "ClipByValue 0": ClipByValue(0.0)}
"""Policies whose limit is zero, the one reason for a finite gradient to become zero."""

POLICIES = {
    "NoClip": NoClip(),
    **BY_NORM,
    **ZEROING,
    "ClipByValue 0.5": ClipByValue(0.5),
    "ClipByValue 1e-3": ClipByValue(1e-3),
    "ClipByValue inf": ClipByValue(INF),
    "ClipPerTensor": ClipPerTensor(0.5),
    "ClipPerTensor p=inf": ClipPerTensor(0.5, order=INF),
    "ClipPerGroup": ClipPerGroup({0: 0.5}),
    "AdaptiveClip": AdaptiveClip(0.01),
    "QuantileClip": QuantileClip(0.5, window=4),
    "ZScoreClip": ZScoreClip(warmup=2),
    "AdaGC": AdaGC(warmup=2),
    "SkipSpikes": SkipSpikes(at_least=2, window=4),
    "chain": chain(SkipSpikes(at_least=2, window=4), ClipByNorm(1.0), ClipByValue(0.25)),
    "chain of parts": chain(AdaptiveClip(0.1), ClipPerTensor(0.5), ClipByNorm(0.7)),
}

CPU = torch.device("cpu")
every_policy = pytest.mark.parametrize("name", POLICIES)
every_norm_policy = pytest.mark.parametrize("name", BY_NORM)

# Powers of two as bounds, because hypothesis wants them exact in float32.
elements = st.one_of(
    st.just(0.0),
    st.floats(2.0**-60, 2.0**100, width=32),
    st.floats(-(2.0**100), -(2.0**-60), width=32),
)
gradient_lists = st.lists(st.lists(elements, min_size=1, max_size=6), min_size=1, max_size=4)


def judged(policy, tensors, scale=1.0):
    """The limit and the decision that follow from gradients that carry `scale`."""
    measurement = measure(tensors, home=CPU, order=float(policy.order), detail=policy.needs_largest)
    carried = torch.tensor(scale)
    count = len(tensors)
    scene = Scene(
        params=[torch.zeros_like(tensor) for tensor in tensors],
        tensors=tensors,
        places=range(count),
        count=count,
        names=lambda: [f"layer.{k}" for k in range(count)],
        groups=lambda: [(0, None)] * count,
    )
    measurement = dataclasses.replace(measurement, scene=scene)
    limit = policy.limit(measurement, carried, policy.start(CPU, count))
    return limit, decide(measurement, carried, limit)


def stepped(policy, rows, scale=1.0, fused=False):
    """The gradients that an optimizer is stepped on, and the Outcome; None if it was not."""
    params = [torch.nn.Parameter(torch.zeros(len(row))) for row in rows]
    control = GradientControl(
        torch.optim.SGD(params, lr=1.0, fused=fused), scale=scale, clip=policy
    )
    control.scale_loss(torch.zeros((), requires_grad=True) * 1.0)
    for p, row in zip(params, rows, strict=True):
        p.grad = torch.tensor(row, dtype=torch.float32) * scale
    outcome = control.step()
    return [-p.detach() for p in params], outcome


@every_policy
@each_of(40, rows=gradient_lists, scale=st.sampled_from([1.0, 1024.0, 2.0**-10]))
def test_the_coefficient_lies_between_zero_and_one(name, rows, scale):
    tensors = [torch.tensor(row) * scale for row in rows]
    limit, decision = judged(POLICIES[name], tensors, scale)
    assert 0.0 <= limit.coefficient.item() <= 1.0
    assert limit.clipped.item() in (0.0, 1.0)
    assert decision.skip.item() == 0.0
    assert decision.multiplier.item() == pytest.approx(limit.coefficient.item() / scale)


@every_policy
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_nonfinite_gradient_gets_coefficient_one_and_is_skipped(name, bad):
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([bad, 3.0])]
    limit, decision = judged(POLICIES[name], tensors, 4.0)
    assert limit.coefficient.item() == 1.0
    assert (decision.skip.item(), decision.multiplier.item()) == (1.0, 1.0)
    assert decision.bound is None or decision.bound.item() == INF


@pytest.mark.parametrize("name", [name for name in POLICIES if name not in ZEROING])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e20, 1e30, 3e38])
def test_a_finite_gradient_is_never_zeroed(name, fused, size):
    (found,), outcome = stepped(POLICIES[name], [[size, -size, size]], fused=fused)
    assert not outcome.skipped
    assert torch.isfinite(found).all()
    assert (found != 0).all()
    assert found.sign().tolist() == [1.0, -1.0, 1.0]


@pytest.mark.parametrize("name", ZEROING)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e20, 1e30, 3e38])
def test_a_limit_of_zero_leaves_exactly_nothing(name, fused, size):
    (found,), outcome = stepped(POLICIES[name], [[size, -size, size]], fused=fused)
    assert not outcome.skipped
    assert found.abs().tolist() == [0.0, 0.0, 0.0]


@every_norm_policy
@each_of(40, rows=gradient_lists)
def test_the_direction_is_kept(name, rows):
    found, outcome = stepped(POLICIES[name], rows)
    before = torch.cat([torch.tensor(row, dtype=torch.float64) for row in rows])
    after = torch.cat(found).double()
    coefficient = judged(POLICIES[name], [torch.tensor(row) for row in rows])[0].coefficient.item()
    assert outcome.skipped is False
    # A product of two float32 numbers; what falls below their range may be flushed to zero.
    torch.testing.assert_close(after, before * coefficient, rtol=1e-6, atol=1e-37)


@every_norm_policy
@pytest.mark.parametrize("scale", [1.0, 65536.0])
@each_of(40, rows=gradient_lists)
def test_the_norm_afterwards_is_at_most_the_limit(name, scale, rows):
    rows = [[x * 2.0**-24 for x in row] for row in rows]
    policy = POLICIES[name]
    found, _ = stepped(policy, rows, scale)
    norm = torch.linalg.vector_norm(torch.cat(found).double(), policy.order).item()
    assert norm <= policy.max_norm * (1 + 1e-6)


@every_policy
@each_of(30, rows=gradient_lists, power=st.integers(-8, 16))
def test_the_loss_scale_does_not_matter(name, rows, power):
    rows = [[x * 2.0**-24 for x in row] for row in rows]
    plain, told = stepped(POLICIES[name], rows)
    scaled, told_scaled = stepped(POLICIES[name], rows, scale=2.0**power)
    assert told.clipped == told_scaled.clipped
    assert told.norm == pytest.approx(told_scaled.norm, rel=1e-6)
    for one, other in zip(plain, scaled, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-37)


@every_policy
@each_of(30, rows=gradient_lists)
def test_clipped_means_that_the_gradients_changed(name, rows):
    found, outcome = stepped(POLICIES[name], rows)
    changed = any(
        not torch.equal(after, torch.tensor(row)) for after, row in zip(found, rows, strict=True)
    )
    zero = all(x == 0 for row in rows for x in row)
    if changed:
        assert outcome.clipped
    # A coefficient within a rounding error of 1 changes nothing that float32 can show.
    if not outcome.clipped or zero:
        assert not changed


@every_policy
@each_of(20, rows=gradient_lists)
def test_the_same_gradients_get_the_same_limit(name, rows):
    tensors = [torch.tensor(row) for row in rows]
    one, two = (judged(POLICIES[name], tensors)[0] for _ in range(2))
    assert one.coefficient.item() == two.coefficient.item()
    assert one.limit.item() == two.limit.item()
    assert one.clipped.item() == two.clipped.item()


@every_policy
def test_judging_changes_no_gradient(name):
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([0.0, 0.0, 12.0])]
    kept = [t.clone() for t in tensors]
    judged(POLICIES[name], tensors)
    assert all(torch.equal(a, b) for a, b in zip(tensors, kept, strict=True))


@every_policy
def test_no_gradients_and_zero_gradients_make_a_usable_limit(name):
    for tensors in ([], [torch.zeros(3)], [torch.zeros(0)]):
        limit, decision = judged(POLICIES[name], tensors)
        assert 0.0 <= limit.coefficient.item() <= 1.0
        assert decision.skip.item() == 0.0


@every_policy
@pytest.mark.parametrize("fused", [False, True])
def test_fused_and_unfused_optimizers_are_clipped_alike(name, fused):
    rows = [[3.0, 4.0], [0.0, 0.0, 12.0]]
    one, _ = stepped(POLICIES[name], rows, scale=64.0, fused=fused)
    two, _ = stepped(POLICIES[name], rows, scale=1.0, fused=not fused)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@every_policy
def test_a_clip_policy_is_a_frozen_value_that_compares_by_its_settings(name):
    policy = POLICIES[name]
    settings_of = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    assert policy == type(policy)(**settings_of)
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.anything = 1


@every_policy
def test_a_clip_policy_goes_through_a_checkpoint(name):
    def make():
        p = torch.nn.Parameter(torch.zeros(2))
        return GradientControl(torch.optim.SGD([p], lr=1.0), clip=POLICIES[name])

    resumed, control = make(), make()
    resumed.load_state_dict(control.state_dict())
    assert resumed.state_dict() == control.state_dict()


# The numbers that torch and ours agree on, and those where torch is at fault.

G1, G2 = [3.0, 4.0], [0.0, 0.0, 12.0]


@pytest.mark.parametrize(
    ("policy", "norm", "first", "last"),
    [
        (ClipByNorm(1.0, order=1.0), 19.0, [3 / 19, 4 / 19], 12 / 19),
        (ClipByNorm(1.0), 13.0, [0.23076922, 0.30769229], 0.92307687),
        (ClipByNorm(1.0, order=3.0), 12.207057, [3 / 12.207057, 4 / 12.207057], 12 / 12.207057),
        (ClipByNorm(1.0, order=INF), 12.0, [0.24999999, 0.33333331], 1.0),
        (ClipByNorm(13.0), 13.0, [2.99999976, 3.99999976], 12 * (13 / 13.000001)),
        (NoClip(), 13.0, [3.0, 4.0], 12.0),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_the_numbers_of_two_small_gradients(policy, norm, first, last, scale):
    (one, two), outcome = stepped(policy, [G1, G2], scale)
    assert outcome.norm == pytest.approx(norm, rel=5e-7)
    assert one.tolist() == pytest.approx(first, rel=3e-7)
    assert two.tolist() == pytest.approx([0.0, 0.0, last], rel=3e-7)


def test_four_float32_of_1e20_are_clipped_not_zeroed():
    (found,), outcome = stepped(ClipByNorm(1.0), [[1e20] * 4])
    assert outcome.norm == pytest.approx(2e20, rel=1e-6)
    assert found.tolist() == pytest.approx([0.5] * 4, rel=1e-6)


def test_seventy_thousand_float16_of_300_are_measured():
    tensors = [torch.full((70_000,), 300.0, dtype=torch.float16)]
    limit, _ = judged(ClipByNorm(1.0), tensors)
    assert limit.coefficient.item() == pytest.approx(1 / (300 * math.sqrt(70_000)), rel=1e-6)


def test_5120_bfloat16_ones_are_measured():
    measurement = measure([torch.ones(5120, dtype=torch.bfloat16)], home=CPU)
    assert measurement.norm.item() == pytest.approx(71.554175, rel=1e-7)


def test_a_bound_on_elements_turns_the_direction_but_not_the_signs():
    (found,), outcome = stepped(ClipByValue(0.5), [[3.0, -0.25, -7.0, 0.5]], scale=8.0)
    assert found.tolist() == [0.5, -0.25, -0.5, 0.5]
    assert outcome.clipped
    assert outcome.norm == pytest.approx(math.sqrt(9 + 0.0625 + 49 + 0.25), rel=1e-6)


def test_every_public_policy_is_listed_here():
    public = {name for name in gradilocks.__all__ if gradilocks._HOME[name] == "clip"} - {"chain"}
    assert {type(policy).__name__ for policy in POLICIES.values()} - {"Chain"} == public
