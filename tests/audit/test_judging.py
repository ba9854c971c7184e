"""Which format, which scale, what to keep: judged from histograms that are made by hand."""

from __future__ import annotations

import math

import pytest

import gradilocks
from gradilocks.lab.audit import Audit, Histogram, ModuleGradients
from gradilocks.lab.audit.judging import (
    HEADROOM,
    LOST_MASS,
    faults,
    formats_named,
    judge,
    scale_for,
)
from gradilocks.lab.formats import FORMATS

FP16, BF16 = FORMATS["fp16"], FORMATS["bf16"]


def seen(first: int, last: int, *, each: int = 100, **more: int) -> Histogram:
    """As many values in every bin, from one exponent to another."""
    bins = dict.fromkeys(range(first, last + 1), each)
    return Histogram.of(bins, largest=1.5 * 2.0**last, smallest=2.0**first, **more)


def module(name: str, first: int, last: int, *, each: int = 100) -> ModuleGradients:
    return ModuleGradients(name, "Linear", None, seen(first, last, each=each))


def audited(*modules: ModuleGradients, formats=("fp16", "bf16"), **more) -> Audit:
    return Audit.of(modules, steps=1, formats=formats_named(formats), **more)


@pytest.mark.parametrize("name", ["fp16", "fp8 e5m2", "fp8 e4m3"])
@pytest.mark.parametrize("last", [-18, -3, 0, 7])
def test_the_scale_is_the_largest_power_of_two_that_leaves_the_headroom(name, last):
    found = judge(FORMATS[name], [module("a", last - 3, last)])
    assert math.log2(found.scale).is_integer()
    assert HEADROOM <= found.scaled.headroom < HEADROOM + 1
    assert found.holds


def test_bf16_needs_no_scale():
    assert judge(BF16, [module("a", -60, -40)]).scale == 1.0
    assert judge(BF16, [module("a", -60, -40)]).holds


def test_the_scale_stays_within_what_a_dynamic_scale_takes():
    for last in (-140, 120):
        scale = scale_for(FP16, 2.0**last)
        assert gradilocks.DynamicScale(init_scale=scale).init_scale == scale
        assert gradilocks.StaticScale(scale)


def test_fp16_is_preferred_where_it_holds():
    found = audited(module("a", -20, -2), module("b", -18, -4))
    assert (found.recommendation.format, found.recommendation.keep) == ("fp16", ())
    assert found.initial_scale == found.formats[0].scale == 2.0 ** (17 - HEADROOM)
    assert "Take fp16 with an initial loss scale of 8192." in found.recommendation.words


def test_why_one_of_fp16_and_bf16_is_preferred_is_said():
    def why(*given, formats=("fp16", "bf16")):
        words = audited(*given, formats=formats).recommendation.words
        return [sentence for sentence in words if sentence.startswith("Why not")]

    small = module("a", -20, -2)
    (said,) = why(small)
    assert said.startswith("Why not bf16: it would hold them without a loss scale, but its steps")
    far_apart = [module(str(i), *((-60, -50) if i % 2 else (0, 10))) for i in range(8)]
    found = audited(*far_apart)
    assert found.recommendation.format == "bf16"
    (said,) = why(*far_apart)
    assert said.startswith("Why not fp16, whose steps are 8 times as fine: it does not hold them.")
    assert any(s.startswith("fp16 does not hold them: ") for s in found.recommendation.words)
    assert why(small, formats=("fp16",)) == why(small, formats=("bf16", "fp8 e5m2")) == []


def test_one_loud_module_is_kept_out_so_that_the_rest_has_a_scale():
    quiet = [module(f"blocks.{n}", -40, -26) for n in range(7)]
    found = audited(*quiet, module("head", 10, 14, each=10))
    assert found.recommendation.format == "fp16"
    assert found.recommendation.keep == ("head",)
    assert found.initial_scale > 1e9
    assert any("Keep head in float32" in words for words in found.recommendation.words)
    assert found.formats[0].scaled.overflow > 0


def test_one_quiet_module_is_kept_out_if_the_rest_is_fine():
    loud = [module(f"blocks.{n}", -10, 4) for n in range(7)]
    found = audited(*loud, module("embedding", -60, -50, each=10))
    assert found.recommendation.keep == ("embedding",)
    assert found.initial_scale == 2.0 ** (15 - HEADROOM - 4)


def test_fp16_does_not_hold_what_would_need_half_of_the_modules_kept_out():
    found = audited(
        *(module(f"loud.{n}", 4, 8) for n in range(4)),
        *(module(f"quiet.{n}", -40, -36) for n in range(4)),
    )
    fp16 = found.formats[0]
    assert (fp16.holds, fp16.keep) == (False, ())
    assert (found.recommendation.format, found.initial_scale) == ("bf16", 1.0)
    assert any("too much in quiet.0, quiet.1" in words for words in found.recommendation.words)


def test_a_module_with_most_of_the_values_is_not_kept_out():
    modules = [module(f"a.{n}", -3, 3) for n in range(6)]
    found = judge(FP16, [*modules, module("huge", -60, -40, each=100_000)])
    assert not found.holds
    assert tuple(found.faults) == ("huge",)


def test_many_small_values_that_carry_no_mass_do_no_harm():
    # Gradients that vanish over time: half of all values are lost, and nothing with them.
    found = audited(module("cell", -60, 0))
    assert found.recommendation.format == "fp16"
    assert found.formats[0].scaled.lost > 0.3
    assert any("which carry" in words for words in found.recommendation.words)


def test_a_module_breaks_by_mass_by_overflow_and_by_parameters_that_learn_nothing():
    assert not faults(module("a", -20, 0), FP16, 1.0)
    assert faults(module("a", -40, -30), FP16, 1.0)
    assert faults(module("a", 10, 16), FP16, 1.0)
    few_large = Histogram.of({-40: 10, 0: 90}, largest=1.5, smallest=2.0**-40)
    assert not faults(ModuleGradients("a", "Linear", None, few_large), FP16, 1.0)
    assert faults(ModuleGradients("a", "Linear", few_large, None), FP16, 1.0)
    assert 0 < LOST_MASS < 0.1


def test_fp32_is_what_is_left_if_no_format_holds():
    loud = [module(f"loud.{n}", 4, 8) for n in range(4)]
    quiet = [module(f"quiet.{n}", -40, -36) for n in range(4)]
    found = audited(*loud, *quiet, formats=("fp16", "fp8 e4m3"))
    assert (found.recommendation.format, found.initial_scale) == ("fp32", 1.0)
    assert found.recommendation.words[-1].endswith("stay with float32.")


def test_fp32_and_tf32_are_no_choice_of_their_own():
    found = audited(module("a", -20, -2), formats=("fp32", "tf32", "bf16"))
    assert found.recommendation.format == "bf16"


def test_all_zeros_are_said_to_be_nothing_to_judge_by():
    nothing = ModuleGradients("a", "Linear", Histogram(zeros=12), None)
    found = audited(nothing)
    assert (found.recommendation.format, found.initial_scale) == ("fp32", 1.0)
    assert "All 12 gradients are zero" in found.recommendation.words[0]
    assert found.formats[0].scaled.headroom is None
    str(found)


def test_nothing_finite_is_said_too():
    found = audited(ModuleGradients("a", "Linear", Histogram(nonfinite=3), None))
    assert "3 values were NaN or Inf, in a" in found.recommendation.words[0]
    assert "No gradient is finite" in found.recommendation.words[1]


def test_a_loss_that_was_nan_itself_is_no_matter_of_the_scale():
    bad = ModuleGradients("a", "Linear", seen(-20, -2, nonfinite=1), None)
    found = audited(bad, loss_scale=65536.0, lost_passes=(2, 10))
    said = found.recommendation.words[0]
    assert "The loss itself was NaN or Inf in 2 of 10 backward passes" in said
    assert "forward or in the loss" in said
    assert "smaller scale" not in " ".join(found.recommendation.words)


def test_under_a_loss_scale_the_way_out_of_infinities_is_a_smaller_one():
    seen_inf = ModuleGradients("a", "Linear", seen(-20, -2, nonfinite=1), None)
    found = audited(seen_inf, loss_scale=65536.0, precision="float16 autocast")
    assert "multiplied by 65536: a smaller scale may do" in found.recommendation.words[0]
    assert "at a loss scale of 65536" in found.recommendation.words[-1]
