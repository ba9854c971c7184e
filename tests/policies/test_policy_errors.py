"""Settings that the policies reject, and their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import math

import pytest

from gradilocks import clip as clip_module
from gradilocks import scale as scale_module
from gradilocks.clip import (
    AdaGC,
    AdaptiveClip,
    ClipByNorm,
    ClipByValue,
    ClipPerGroup,
    ClipPolicy,
    QuantileClip,
    SkipSpikes,
    ZScoreClip,
    chain,
    resolve_clip,
)
from gradilocks.scale import DynamicScale, HeadroomScale, StaticScale, resolve_scale


class PerLayer(ClipPolicy):
    per = "layer"


class HalfOrder(ClipPolicy):
    order = 0.5


REJECTED = [
    (lambda: ClipByNorm(-1.0), ValueError, "max_norm must be at least 0, got -1.0"),
    (lambda: ClipByNorm(math.nan), ValueError, "max_norm must be at least 0, got nan"),
    (lambda: ClipByNorm("1"), TypeError, "max_norm must be a number, got str '1'"),
    (lambda: ClipByNorm(True), TypeError, "max_norm must be a number, got bool True"),
    (lambda: ClipByNorm(1.0, order=0.5), ValueError, "order must be at least 1 and at most 8, got 0.5"),
    (lambda: ClipPerGroup({"a": 1.0}, order=9.0), ValueError, "order must be at least 1 and at most 8, got 9.0"),
    (lambda: ClipByValue(-0.5), ValueError, "value must be at least 0"),
    (lambda: QuantileClip(0.5, window=0), ValueError, "window must be at least 2, got 0"),
    (lambda: QuantileClip(0.0), ValueError, "quantile must be above 0 and below 1, got 0.0"),
    (lambda: QuantileClip(math.nan), ValueError, "quantile must be above 0 and below 1, got nan"),
    (lambda: QuantileClip(0.5, window=2.0), TypeError, "window must be an int, got float 2.0"),
    (lambda: ZScoreClip(threshold=0.0), ValueError, "threshold must be above 0 and finite, got 0.0"),
    (lambda: ZScoreClip(alpha=1.0), ValueError, "alpha must be above 0 and below 1"),
    (lambda: ZScoreClip(warmup=0), ValueError, "warmup must be at least 1"),
    (lambda: AdaGC(ratio=-1.0), ValueError, "ratio must be above 0"),
    (lambda: AdaGC(beta=1.0), ValueError, "beta must be above 0 and below 1"),
    (lambda: AdaGC(warmup_norm=-1.0), ValueError, "warmup_norm must be at least 0"),
    (lambda: SkipSpikes(sigmas=math.inf), ValueError, "sigmas must be above 0 and finite"),
    (lambda: SkipSpikes(window=3), ValueError, "window must be at least 4"),
    (lambda: SkipSpikes(max_norm=0.0), ValueError, "max_norm must be above 0"),
    (lambda: AdaptiveClip(0.0), ValueError, "clipping must be above 0"),
    (lambda: AdaptiveClip(exclude="head"), TypeError, "exclude must be a tuple of patterns .* got 'head'"),
    (lambda: AdaptiveClip(exclude=(1,)), TypeError, "exclude must be a tuple of patterns"),
    (lambda: ClipPerGroup({}), TypeError, "limits must be a non-empty dict"),
    (lambda: ClipPerGroup({1.5: 1.0}), TypeError, "a key of limits must be a str or an int, got 1.5"),
    (lambda: ClipPerGroup({"a": -1.0}), ValueError, r"limits\['a'\] must be at least 0"),
    (lambda: ClipPerGroup({"a": 1.0}, otherwise="b"), TypeError, "otherwise must be a number, got str 'b'"),
    (lambda: chain(), TypeError, r"chain takes clip policies such as ClipByNorm\(1.0\), got \(\)"),
    (lambda: chain(ClipByNorm(1.0), None), TypeError, "chain takes clip policies .* None"),
    (lambda: chain(ClipByNorm(1.0), -1.0), ValueError, "clip must be at least 0, got -1.0"),
    (lambda: chain(ClipByNorm(1.0), ClipByNorm(1.0, order=1.0)), ValueError, r"same order, got orders \[1.0, 2.0\]"),
    (lambda: chain(ClipByValue(1.0), ClipByNorm(1.0)), ValueError, "ClipByValue must be the last policy"),
    (lambda: chain(chain(1.0, ClipByValue(1.0)), 1.0), ValueError, "ClipByValue must be the last policy"),
    (lambda: chain(ClipByNorm(1.0), AdaptiveClip()), ValueError, "AdaptiveClip must be the first policy"),
    (lambda: resolve_clip(ClipByNorm), TypeError, "clip must be None, a number .* got <class"),
    (lambda: resolve_clip(True), TypeError, "clip must be None, a number .* got True"),
    (lambda: ClipByNorm(1.0, order=math.nan), ValueError, "order must be at least 1 and at most 8, got nan"),
    (lambda: resolve_clip(math.nan), ValueError, "clip must be at least 0, got nan"),
    (lambda: resolve_clip(PerLayer()), ValueError, "per must be one of model, group, tensor, row, got 'layer'"),
    (lambda: resolve_clip(HalfOrder()), ValueError, "order must be at least 1 and at most 8, got 0.5"),
    (lambda: StaticScale(0.0), ValueError, "scale must be at least 1.17549e-38 and at most 3.40282e.38, got 0.0"),
    (lambda: StaticScale(math.inf), ValueError, "scale must be .* got inf"),
    (lambda: resolve_scale(math.nan), ValueError, "scale must be .* got nan"),
    (lambda: resolve_scale(1e-45), ValueError, "scale must be .* got 1"),
    (lambda: DynamicScale("big"), TypeError, "init_scale must be a number, got str 'big'"),
    (lambda: DynamicScale(1.0, min_scale=2.0), ValueError, "init_scale must be at least 2 and at most"),
    (lambda: DynamicScale(growth_factor=1.0), ValueError, "growth_factor must be above 1 and finite, got 1.0"),
    (lambda: DynamicScale(backoff_factor=1.0), ValueError, "backoff_factor must be above 0 and below 1"),
    (lambda: DynamicScale(growth_interval=0), ValueError, "growth_interval must be at least 1"),
    (lambda: DynamicScale(growth_interval=2**31), ValueError, "growth_interval must be .* got 2147483648"),
    (lambda: DynamicScale(hysteresis=0), ValueError, "hysteresis must be at least 1"),
    (lambda: HeadroomScale(margin=-1), ValueError, "margin must be at least 0"),
    (lambda: HeadroomScale(margin=1.5), TypeError, "margin must be an int, got float 1.5"),
    (lambda: HeadroomScale(init_scale=1.0, min_scale=2.0), ValueError, "init_scale must be at least 2"),
    (lambda: resolve_scale("static"), TypeError, "scale must be None, 'dynamic', a number .* got 'static'"),
    (lambda: resolve_scale(DynamicScale), TypeError, "scale must be None, 'dynamic', a number .* got <class"),
    (lambda: resolve_scale(False), TypeError, "scale must be None, 'dynamic', a number .* got False"),
]


@pytest.mark.parametrize(("make", "error", "words"), REJECTED, ids=[words for *_, words in REJECTED])
def test_a_wrong_setting_is_rejected_with_its_name_and_value(make, error, words):
    with pytest.raises(error, match=words):
        make()


DOCUMENTED = [
    member
    for module in (clip_module, scale_module)
    for name in module.__all__
    if dataclasses.is_dataclass(member := getattr(module, name))
    and issubclass(member, (ClipPolicy, scale_module.ScalePolicy))
]


@pytest.mark.parametrize("policy", DOCUMENTED, ids=lambda policy: policy.__name__)
def test_a_docstring_has_the_rule_the_arguments_an_example_and_the_reference(policy):
    text = inspect.getdoc(policy)
    assert [line for line in text.splitlines() if line.startswith("    ") and " = " in line], "no formula"
    for part in ("Args:", "Examples:", "Reference:"):
        assert part in text
    for field in dataclasses.fields(policy):
        assert f"{field.name}:" in text or f"{field.name}, " in text, field.name
