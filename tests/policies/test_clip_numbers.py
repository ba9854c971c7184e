"""Published numbers of each clip policy, and chains of policies."""

from __future__ import annotations

import math

import pytest
import torch

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
)
from policies.drive import Driver
from policies.own_policies import ClipPerTensor

INF = math.inf
NORMS = (1.0, 2.0, 3.0, 2.0, 2.0, 10.0, 2.5)
G1, G2 = [3.0, 4.0], [0.0, 0.0, 12.0]


@pytest.mark.parametrize(
    ("policy", "norm", "first", "last"),
    [
        (ClipByNorm(1.0, order=1.0), 19.0, [3 / 19, 4 / 19], 12 / 19),
        (ClipByNorm(1.0), 13.0, [0.23076922, 0.30769229], 0.92307687),
        (ClipByNorm(1.0, order=3.0), 12.207057, [3 / 12.207057, 4 / 12.207057], 12 / 12.207057),
        (ClipByNorm(1.0, order=INF), 12.0, [0.24999999, 0.33333331], 1.0),
        (ClipByNorm(13.0), 13.0, [2.99999976, 3.99999976], 12 * (13 / 13.000001)),
        (None, 13.0, [3.0, 4.0], 12.0),
    ],
)
def test_clip_by_norm(policy, norm, first, last):
    step = Driver(policy).step(G1, G2)
    assert step.norm == pytest.approx(norm, rel=5e-7)
    assert step.gradients[0].tolist() == pytest.approx(first, rel=3e-7)
    assert step.gradients[1].tolist() == pytest.approx([0.0, 0.0, last], rel=3e-7)


def test_a_norm_beyond_float32_is_clipped_not_zeroed():
    (found,) = Driver(ClipByNorm(1.0)).step([1e38] * 100).gradients
    assert found.tolist() == pytest.approx([0.1] * 100)


def test_clip_by_value():
    step = Driver(ClipByValue(0.5)).step([3.0, -0.25, -7.0, 0.5])
    assert step.gradients[0].tolist() == [0.5, -0.25, -0.5, 0.5]
    assert step.norm == pytest.approx(math.sqrt(9 + 0.0625 + 49 + 0.25))
    assert step.bound == INF


def test_zscore_clip():
    driver = Driver(ZScoreClip(warmup=4))
    for norm in NORMS[:4]:
        assert driver.step(norm).bound == INF
    assert driver.state == pytest.approx({"count": 4, "mean": 2.0, "variance": 0.5})
    driver.step(NORMS[4])
    assert driver.state["variance"] == pytest.approx(0.485)
    step = driver.step(NORMS[5])
    deviation = math.sqrt(0.485)
    assert step.bound == pytest.approx(2.0 + 2.5**2 * deviation * (deviation + 1e-6) / (10.0 - 2.0), rel=1e-14)
    assert torch.tensor(step.bound).item() == torch.tensor(2.37890673).item()  # The published number is a float32.
    assert step.ratios == pytest.approx([step.bound / 10.0], rel=1e-14)
    assert driver.state["mean"] == pytest.approx(2.0113672, rel=1e-8)
    assert driver.state["variance"] == pytest.approx(0.47450256, rel=1e-8)
    driver.step(NORMS[6])
    assert driver.state["mean"] == pytest.approx(2.02602619, rel=1e-8)
    assert driver.state["variance"] == pytest.approx(0.46700702, rel=1e-8)


@pytest.mark.parametrize(
    ("policy", "norms", "expected"),
    [
        (QuantileClip(0.1), NORMS, [1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6]),
        (QuantileClip(0.9), NORMS, [1, 1.9, 2.8, 2.7, 2.6, 6.5, 5.8]),
        (QuantileClip(0.5, window=3), [100, 100, 1, 2, 3], [100, 100, 100, 2, 2]),  # Forgets older norms.
    ],
)
def test_quantile_clip(policy, norms, expected):
    driver = Driver(policy)
    assert [driver.step(norm).bound for norm in norms] == pytest.approx(expected)


def test_adagc():
    driver = Driver(AdaGC(warmup=1, warmup_norm=INF))
    driver.step(1.0)
    expected = [(1.0, 1.0, 1.0), (1.04, 1.0, 1.0008), (1.2, 0.8757, 1.0018008)]
    expected += [(3.0, 0.35063028, 1.0028026), (0.9, 1.0, 1.00074655)]
    for norm, factor, average in expected:
        assert driver.step(norm).ratios == pytest.approx([factor], rel=1e-7)
        assert driver.state["average"] == pytest.approx([average], rel=1e-7)


def test_adagc_clips_the_global_norm_during_warm_up_and_remembers_the_smallest_norms():
    driver = Driver(AdaGC(warmup=2))
    step = driver.step(3.0, 4.0)
    assert step.ratios == pytest.approx([0.2, 0.2], rel=1e-6)
    assert step.bound == 1.0
    driver.step(0.3, 0.9)
    assert driver.state["average"] == pytest.approx([0.3, 0.8], rel=1e-6)
    assert driver.step(0.3, 0.8).bound == INF


def test_adagc_does_not_learn_from_a_parameter_without_a_gradient():
    driver = Driver(AdaGC(warmup=1))
    driver.step(0.3, 0.4)
    driver.step(0.0, 0.4)
    assert driver.state["average"] == pytest.approx([0.3, 0.4], rel=1e-6)


def test_adagc_does_not_clip_the_first_gradient_of_a_layer_that_had_none():
    driver = Driver(AdaGC(warmup=1))
    driver.step(0.0, 0.5)
    driver.step(0.0, 0.5)
    assert driver.state["average"][0] == INF
    assert driver.step(0.5, 0.5).ratios == [1.0, 1.0]
    assert driver.state["average"][0] == 0.5


def test_small_norms_are_bounded_as_exactly_as_large_ones():
    driver = Driver(AdaGC(warmup=1, warmup_norm=INF))
    driver.step(1e-7)
    assert driver.step(1.06e-7).ratios == pytest.approx([1.05 / 1.06])


def test_adaptive_clip():
    weights = [torch.tensor([[3.0, 4.0], [0.0, 0.0]])]
    step = Driver(AdaptiveClip(0.01), weights=weights).step([[0.3, 0.4], [0.003, 0.004]])
    assert step.gradients[0].flatten().tolist() == pytest.approx([0.03, 0.04, 6e-6, 8e-6])


@pytest.mark.parametrize(("shape", "rows"), [((), 1), ((5,), 1), ((3, 4), 3), ((3, 2, 2), 3), ((1, 4), 1), ((0, 4), 0)])
def test_adaptive_clip_measures_rows_and_whole_vectors(shape, rows):
    assert AdaptiveClip().rows("weight", shape) == rows


def test_adaptive_clip_leaves_excluded_parameters_alone():
    driver = Driver(AdaptiveClip(0.01, exclude=["head.*"]), names=("body.weight", "head.weight"))
    assert driver.step([1.0], [1.0]).ratios == pytest.approx([1e-5, 1.0])


def test_adaptive_clip_does_not_change_a_gradient_below_a_tiny_limit():
    for norm, left in ((5e-8, 5e-8), (2e-7, 2e-7 * 1e-7 / 1e-6)):
        (found,) = Driver(AdaptiveClip(1e-4)).step([norm]).gradients  # The limit is 1e-7.
        assert found.item() == pytest.approx(left)


def test_clip_per_group_by_pattern():
    policy = ClipPerGroup({"embed.*": 1.0, "head.*": None}, otherwise=2.0)
    driver = Driver(policy, names=("embed.a", "embed.b", "head.w", "body.w"))
    assert driver.step(3.0, 4.0, 100.0, 8.0).ratios == pytest.approx([0.2, 0.2, 1.0, 0.25], rel=1e-6)


def test_clip_per_group_by_number_and_name_of_the_param_group():
    policy = ClipPerGroup({0: 1.0, "muon": None}, otherwise=3.0)
    driver = Driver(policy, param_groups=[(0, None), (1, "muon"), (2, None)])
    assert driver.step(6.0, 6.0, 6.0).ratios == pytest.approx([1 / 6, 1.0, 0.5], rel=1e-6)


def test_the_first_key_that_matches_a_parameter_wins():
    names, groups = ["embed.bias", "body.bias", "body.weight"], [(0, None)] * 3
    assert ClipPerGroup({"*.bias": 1.0, "embed.*": 2.0, 0: 3.0}).groups(names, groups) == [0, 0, 2]
    assert ClipPerGroup({"embed.*": 2.0, "*.bias": 1.0}).groups(names, groups) == [0, 1, 2]


def test_keys_that_match_nothing_are_reported_as_the_user_wrote_them():
    names, groups = ["embed.weight", "body.weight"], [(0, None), (1, "muon")]
    policy = ClipPerGroup({"embed.*": 1.0, "head.*": None, 1: 1.0, 2: 1.0, "muon": 1.0, "adam": 1.0})
    assert policy.unmatched(names, groups) == ["limits['head.*']", "limits[2]", "limits['adam']"]
    assert AdaptiveClip(exclude=("body.*", "head.*")).unmatched(names, groups) == ["exclude='head.*'"]


def test_clip_per_group_keeps_its_own_copy_of_the_limits():
    limits = {"a": 1.0}
    policy = ClipPerGroup(limits)
    limits["b"] = 2.0
    assert policy.limits == {"a": 1.0}
    assert policy.count == 2


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
def test_clip_per_group_measures_any_order(order):
    norm = 4.0 if order == INF else (3.0**order + 4.0**order) ** (1 / order)
    assert Driver(ClipPerGroup({0: 1.0}, order=order)).step(3.0, 4.0).ratios == pytest.approx([1 / norm] * 2, rel=1e-6)


def test_skip_spikes():
    driver = Driver(SkipSpikes(window=8))
    for norm in (1.0, 1.1, 0.9, 1.0):
        assert not driver.step(norm).skipped
    before = driver.state
    step = driver.step(50.0)
    assert step.rejected
    assert step.bound == pytest.approx(1.0 + 6 * math.sqrt(0.02 / 3), rel=2e-6)
    assert driver.state == before
    assert not driver.step(1.05).rejected
    assert driver.state["norms"] == [INF, INF, INF, 1.0, 1.1, 0.9, 1.0, 1.05]


def test_skip_spikes_accepts_rounding_errors_of_a_norm_that_never_varies():
    for norm, rejected in ((1.0 + 9e-7, False), (1.0 + 2e-6, True)):
        driver = Driver(SkipSpikes(window=8))
        for _ in range(4):
            driver.step(1.0)
        assert driver.step(norm).rejected == rejected


def test_skip_spikes_rejects_norms_above_its_absolute_bound_from_the_first_step_on():
    driver = Driver(SkipSpikes(window=4, max_norm=5.0))
    step = driver.step(5.1)
    assert step.rejected
    assert step.bound == 5.0
    assert not driver.step(5.0).rejected
    driver.step(1.0)
    assert driver.step(4.9).bound == 5.0  # The window alone would allow 20.
    assert driver.step(5.1).rejected


def test_skip_spikes_rejects_nan_also_by_itself():
    policy, nan = SkipSpikes(), torch.tensor(math.nan, dtype=torch.float64)
    assert policy.limit(nan.reshape(1), nan, policy.init()).reject


def test_a_chain_passes_on_the_clipped_norms():
    # 6 and 4 become 3 and 3, then 0.7071 each, then 0.7 each.
    step = Driver(chain(ClipPerTensor(3.0), ClipByNorm(1.0), ClipByValue(0.7))).step(6.0, 4.0)
    assert torch.cat(step.gradients).tolist() == [0.7, 0.7]
    assert step.bound == 1.0


def test_a_step_that_one_policy_rejects_changes_no_state_of_the_chain():
    driver = Driver(chain(SkipSpikes(window=4), ZScoreClip(warmup=2)))
    for norm in (1.0, 1.1, 1.0):
        driver.step(norm)
    before = driver.states
    assert driver.step(50.0).rejected
    assert driver.states is before
    assert driver.states[1]["count"] == 3
