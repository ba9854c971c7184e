"""Policies check their settings when they are made; the message has the name and what came."""

import math

import pytest
import torch

from gradilocks import ClipByNorm, ClipByValue, DynamicScale, NoClip, NoScale, StaticScale


@pytest.mark.parametrize(
    ("settings", "kind", "words"),
    [
        ({"init_scale": 0.0}, ValueError, "init_scale must be a positive float32"),
        ({"init_scale": -1.0}, ValueError, "init_scale must be a positive float32"),
        ({"init_scale": math.inf}, ValueError, "init_scale must be a positive float32"),
        ({"init_scale": math.nan}, ValueError, "init_scale must be a positive float32"),
        ({"init_scale": "65536"}, TypeError, "init_scale must be a number, got str"),
        ({"init_scale": True}, TypeError, "init_scale must be a number, got bool"),
        ({"init_scale": None}, TypeError, "init_scale must be a number, got NoneType"),
        ({"init_scale": torch.tensor(2.0)}, TypeError, "init_scale must be a number, got Tensor"),
        ({"init_scale": 2.0**33}, ValueError, "init_scale must lie between"),
        ({"init_scale": 1.0, "min_scale": 2.0}, ValueError, "init_scale must lie between"),
        ({"min_scale": 8.0, "max_scale": 4.0}, ValueError, "min_scale and max_scale"),
        ({"min_scale": 0.0}, ValueError, "min_scale must be a positive float32"),
        ({"min_scale": 2.0**-127}, ValueError, "min_scale must be a positive float32"),
        ({"max_scale": math.inf}, ValueError, "max_scale must be a positive float32"),
        ({"max_scale": 1e39}, ValueError, "max_scale must be a positive float32"),
        ({"growth_factor": 1.0}, ValueError, "growth_factor must be greater than 1, got 1.0"),
        ({"growth_factor": 0.5}, ValueError, "growth_factor must be greater than 1, got 0.5"),
        ({"growth_factor": math.inf}, ValueError, "growth_factor"),
        ({"growth_factor": math.nan}, ValueError, "growth_factor"),
        ({"growth_factor": "2"}, TypeError, "growth_factor must be a number, got str"),
        ({"backoff_factor": 1.0}, ValueError, "backoff_factor must be between 0 and 1, got 1.0"),
        ({"backoff_factor": 0.0}, ValueError, "backoff_factor must be between 0 and 1"),
        ({"backoff_factor": -0.5}, ValueError, "backoff_factor must be between 0 and 1"),
        ({"backoff_factor": math.nan}, ValueError, "backoff_factor"),
        ({"backoff_factor": None}, TypeError, "backoff_factor must be a number, got NoneType"),
        ({"growth_interval": 0}, ValueError, "growth_interval must be at least 1, got 0"),
        ({"growth_interval": -5}, ValueError, "growth_interval must be at least 1, got -5"),
        ({"growth_interval": 2.0}, TypeError, "growth_interval must be an int, got float"),
        ({"growth_interval": True}, TypeError, "growth_interval must be an int, got bool"),
        ({"hysteresis": 0}, ValueError, "hysteresis must be at least 1, got 0"),
        ({"hysteresis": 1.5}, TypeError, "hysteresis must be an int, got float"),
        ({"hysteresis": 2**31}, ValueError, "hysteresis"),
    ],
)
def test_a_dynamic_scale_refuses_impossible_settings(settings, kind, words):
    with pytest.raises(kind, match=words):
        DynamicScale(**settings)


@pytest.mark.parametrize(
    ("scale", "kind"),
    [
        (0, ValueError),
        (-1.0, ValueError),
        (math.inf, ValueError),
        (math.nan, ValueError),
        (1e-40, ValueError),
        (1e40, ValueError),
        pytest.param(10**400, ValueError, id="beyond every float"),
        ("8", TypeError),
        (None, TypeError),
        (False, TypeError),
        (torch.tensor(8.0), TypeError),
    ],
)
def test_a_static_scale_refuses_what_cannot_be_divided_by(scale, kind):
    with pytest.raises(kind, match="scale must be"):
        StaticScale(scale)


@pytest.mark.parametrize("policy", [ClipByNorm, ClipByValue])
@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        (-1.0, ValueError, "must not be negative or NaN, got -1.0"),
        (-1, ValueError, "must not be negative or NaN, got -1"),
        (-math.inf, ValueError, "must not be negative or NaN, got -inf"),
        (math.nan, ValueError, "must not be negative or NaN, got nan"),
        ("1", TypeError, "must be a number, got str"),
        (None, TypeError, "must be a number, got NoneType"),
        (True, TypeError, "must be a number, got bool"),
        (torch.tensor(1.0), TypeError, "must be a number, got Tensor"),
        ([1.0], TypeError, "must be a number, got list"),
    ],
)
def test_a_clip_policy_refuses_an_impossible_bound(policy, given, kind, words):
    with pytest.raises(kind, match=words) as caught:
        policy(given)
    assert {ClipByNorm: "max_norm", ClipByValue: "value"}[policy] in str(caught.value)


@pytest.mark.parametrize(
    ("order", "kind"),
    [
        (0, ValueError),
        (0.5, ValueError),
        (-1, ValueError),
        (-math.inf, ValueError),
        (math.nan, ValueError),
        ("inf", TypeError),
        (None, TypeError),
        (True, TypeError),
    ],
)
def test_a_norm_below_one_is_no_norm(order, kind):
    with pytest.raises(kind, match="order must be"):
        ClipByNorm(1.0, order=order)


@pytest.mark.parametrize("interval", [2**31 - 1, 2**31, 10**12])
def test_an_interval_that_no_run_reaches_means_never_to_grow(interval):
    policy = DynamicScale(init_scale=8.0, growth_interval=interval)
    state = policy.start(torch.device("cpu"))
    for skip in (0.0, 0.0, 1.0, 0.0):
        policy.advance(state, torch.tensor(skip))
    assert state.scale.item() == 4.0


def test_whole_numbers_are_numbers():
    assert ClipByNorm(1, order=2) == ClipByNorm(1.0)
    assert StaticScale(8) == StaticScale(8.0)
    assert DynamicScale(init_scale=8, min_scale=1, max_scale=16).bounds() == (1, 16)


@pytest.mark.parametrize(
    ("policy", "bounds"),
    [
        (NoScale(), (1.0, 1.0)),
        (StaticScale(8.0), (8.0, 8.0)),
        (DynamicScale(), (2.0**-24, 2.0**32)),
    ],
)
def test_bounds_are_what_the_scale_can_reach(policy, bounds):
    assert policy.bounds() == bounds


def test_policies_show_their_settings():
    assert repr(ClipByNorm(1.0)) == "ClipByNorm(max_norm=1.0, order=2.0)"
    assert repr(NoClip()) == "NoClip()"
    assert "growth_interval=2000" in repr(DynamicScale())


def test_the_defaults_are_torchs():
    scaler = torch.amp.GradScaler("cpu")
    policy = DynamicScale()
    assert policy.init_scale == scaler.get_scale()
    assert policy.growth_factor == scaler.get_growth_factor()
    assert policy.backoff_factor == scaler.get_backoff_factor()
    assert policy.growth_interval == scaler.get_growth_interval()
