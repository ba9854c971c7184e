"""Every sentence and every cell: what is said is so, and for the reason that is given."""

from __future__ import annotations

import pytest

from gradilocks.lab.audit import Audit, Histogram, ModuleGradients
from gradilocks.lab.audit.audit_text import percent
from gradilocks.lab.audit.judging import formats_named, judge
from gradilocks.lab.audit_record import Outputs
from gradilocks.lab.formats import FORMATS

FP16 = FORMATS["fp16"]


def seen(bins: dict[int, int], largest: float | None = None) -> Histogram:
    first, last = min(bins), max(bins)
    return Histogram.of(bins, largest=largest or 1.5 * 2.0**last, smallest=1.5 * 2.0**first)


def owner(name: str, bins: dict[int, int], **more) -> ModuleGradients:
    return ModuleGradients(name, "Linear", seen(bins), None, **more)


def audited(*modules: ModuleGradients, formats=("fp16", "bf16")) -> Audit:
    return Audit.of(modules, steps=3, formats=formats_named(formats))


GOLDEN = """\
3 steps in float32: 3,092 gradients of parameters and 2,852 of activations,
other than zero.

Take fp16 with an initial loss scale of 256.
At scale 1 fp16 would round 28.4 % of the gradients to zero; at 256 7.3 %, which
carry under 0.001 % of the sum of all magnitudes.
The largest, 12 in head, leaves 4.4 doublings of headroom there.
Why not bf16: it would hold them and every module without a loss scale, but its
steps are 8 times as coarse (8 significant bits, fp16 has 11). It is the choice
if you want no scale to look after.
Keep embed in float32: at this scale too much of what counts there would be lost
to zero.

format    scale  lost at 1   lost  subnormal  overflow  headroom        holds
fp16        256     28.4 %  7.9 %     20.5 %       0 %       4.4  without 1 *
bf16          1        0 %    0 %        0 %       0 %     124.4          yes
fp8 e4m3   2^24     98.7 %  7.9 %        0 %     1.3 %     -18.8  without 2 *

module    values  largest  lost at 1   lost  headroom
embed *       40  1.3e-18      100 %  100 %      67.4
blocks.1     964  1.2e-06     27.5 %  6.6 %      27.7
blocks.2     967  1.2e-06     27.8 %  6.9 %      27.7
blocks.3     970  1.2e-06     28.1 %  7.2 %      27.7
blocks.4     973  1.2e-06     28.5 %  7.5 %      27.7
blocks.5     976  1.2e-06     28.8 %  7.8 %      27.7
blocks.6     979  1.2e-06     29.1 %  8.1 %      27.7
head          75       12        0 %    0 %       4.4

The modules are shown in fp16 at scale 256.
* fp16 holds if embed stays in float32.
* fp8 e4m3 holds if embed and head stay in float32."""
SAID = [
    "At scale 256 fp16 loses 7.9 % of the gradients to zero (28.4 % at scale 1); 4.4 doublings of "
    "headroom are left; without embed it loses 7.3 %.",
    "At scale 1 bf16 loses 0 % of the gradients to zero; 124.4 doublings of headroom are left.",
    "At scale 2^24 fp8 e4m3 loses 7.9 % of the gradients to zero (98.7 % at scale 1) and overflows "
    "in 1.3 %; without embed and head it loses 7.4 %.",
]


def test_a_whole_audit_reads_as_worked_out_by_hand():
    # At 256 fp16 loses what is below 2**-33: of blocks.n, 61 + 3n values of 961 + 3n; at 1 what is
    # below 2**-25, another 200 + n. The headroom of 1.25 * 2**-20 is 16 - 0.3 + 20 - 8.
    blocks = [
        ModuleGradients(
            f"blocks.{n}",
            "Linear",
            seen({-40 - n: 1, -30: 200 + n, -20: 300}, 1.25 * 2.0**-20),
            seen({-50: 2 * n, -42: n, -35: 60, -22: 400 - n}),
        )
        for n in range(1, 7)
    ]
    head = ModuleGradients("head", "Linear", seen({2: 20, 3: 5}, 12.0), seen({-3: 50}))
    found = audited(
        owner("embed", {-70: 30, -60: 10}), *blocks, head, formats=("fp16", "bf16", "fp8 e4m3")
    )
    assert str(found) == GOLDEN
    assert [each.words for each in found.formats] == SAID


def words_of(*modules: ModuleGradients, formats=("fp16", "bf16")) -> str:
    return " ".join(audited(*modules, formats=formats).recommendation.words)


def test_what_overflows_at_any_scale_is_not_said_to_be_lost():
    said = words_of(owner("a", {98: 10, 99: 10}))
    assert (
        "fp16 does not hold them: even at scale 2^-24, the smallest that a DynamicScale takes, "
        "100 % of the gradients overflow, up to 9.5e+29 in a." in said
    )
    assert "to zero" not in said.split("fp16 does not hold")[1]


def test_what_is_too_small_for_the_largest_scale_is_said_to_be_so():
    said = words_of(owner("a", {-100: 10}))
    assert "at scale 2^32, the largest that a DynamicScale takes, it loses 100 %" in said
    assert "the most that the largest allow" not in said


def test_a_format_without_a_scale_is_refused_without_one():
    said = words_of(owner("a", {-146: 10}), formats=["bf16"])
    assert (
        "bf16 does not hold them: it loses 100 % of the gradients to zero, too much in a." in said
    )


def test_a_refusal_tells_the_share_at_its_own_scale():
    loud = [owner(f"loud.{n}", {4: 100}) for n in range(4)]
    quiet = [owner(f"quiet.{n}", {-40: 50, -30: 50}) for n in range(4)]
    said = words_of(*loud, *quiet)  # At 128 what is below 2**-32 is lost, at 1 all that is quiet.
    assert (
        "at scale 128, the most that the largest allow, it loses 25 % of the gradients to zero, "
        "too much in quiet.0, quiet.1, quiet.2 and quiet.3." in said
    )


def test_parameters_that_learn_nothing_are_the_reason_where_nothing_that_counts_is_lost():
    rest = [owner(f"a.{n}", {0: 100}) for n in range(7)]
    said = words_of(*rest, owner("sparse", {-60: 30, 0: 70}))
    assert "Keep sparse in float32: at this scale too many of the parameters there would" in said
    assert "of what counts" not in said


def test_a_forward_pass_and_gradients_that_do_not_fit_are_two_sentences():
    large = owner("a", {-60: 50, 4: 50}, outputs=Outputs(1e6))
    found = audited(large)
    said = " ".join(found.recommendation.words)
    assert "fp16 does not hold what a returns: it returns values up to 1e+06, and fp16 ends" in said
    assert "to zero, too much in a." in said
    assert found.formats[0].words.endswith("Nor does it hold what a returns.")


@pytest.mark.parametrize(("small", "holds"), [(19, True), (21, False)])
def test_a_hundredth_of_the_sum_is_the_border(small, holds):
    # In an output's gradient: `small` values of bin -34 weigh small / 1000 of 500 of bin -33,
    # and at the scale of these, 2**32 at most, both would be there. So a loud one sets it.
    quiet = seen({-34: small * 2, -33: 2000 - small})
    lost = ModuleGradients("quiet", "Linear", None, quiet)
    share = small * 2 * 0.5 / (small * 2 * 0.5 + 2000 - small)
    assert (share < 0.01) == holds
    rest = [ModuleGradients(f"a.{n}", "Linear", None, seen({3: 8000})) for n in range(2)]
    found = judge(FP16, [*rest, lost])
    assert found.scale == 256.0
    assert (found.keep == ()) == holds


@pytest.mark.parametrize(("small", "broken"), [(4, False), (6, True)])
def test_a_twentieth_of_the_parameters_is_the_border(small, broken):
    found = judge(FP16, [owner("a", {-60: small, 0: 100 - small})])
    assert ("a" in found.keep or not found.holds) == broken


def test_what_is_lost_without_the_kept_ones_is_weighed():
    found = judge(FP16, [owner("a", {-34: 2, 3: 100})])
    assert found.lost_mass == pytest.approx(2 * 2.0**-37 / 100, rel=1e-6)


def test_the_fewest_are_kept_even_if_more_would_do():
    rest = [owner(f"a.{n}", {0: 100}) for n in range(10)]
    found = judge(FP16, [*rest, owner("loud", {9: 20}), owner("louder", {12: 20})])
    assert (found.keep, found.too_large) == ((), ())


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"), (9e-6, "under 0.001 %"), (1.1e-5, "0.0011 %"), (0.0004, "0.04 %"),
        (0.009, "0.9 %"), (0.25, "25 %"), (0.99995, "over 99.99 %"), (1.0, "100 %"),
    ],
)  # fmt: skip
def test_a_share_is_written_as_it_is_read(share, text):
    assert percent(share) == text


def test_a_star_is_explained_only_where_there_is_one():
    rest = [owner(f"a.{n}", {0: 100}) for n in range(7)]
    found = audited(*rest, owner("b", {-20: 10}), formats=("fp16", "fp8 e4m3"))
    assert (found.formats[0].keep, found.formats[1].keep) == ((), ("b",))
    assert "kept in float32" not in str(found)


@pytest.mark.parametrize("nothing", [Histogram(zeros=12), Histogram(nonfinite=3)])
def test_a_format_without_a_value_to_judge_it_by_does_not_hold(nothing):
    found = audited(ModuleGradients("a", "Linear", nothing, None))
    assert [each.holds for each in found.formats] == [False, False]
    assert "yes" not in str(found)


def test_what_is_as_wide_as_float32_holds_and_is_said_to():
    found = audited(owner("a", {-20: 5}), formats=("tf32", "fp32"))
    (sentence,) = found.recommendation.words
    assert sentence.startswith("Of what was asked for, tf32 and fp32 hold these gradients")
    assert "Ask for fp16 or bf16" in sentence


def test_gradients_that_are_too_large_are_the_reason_for_a_scale_below_one():
    words = " ".join(audited(owner("a", {18: 5, 2: 5}), formats=("fp16",)).recommendation.words)
    assert "At scale 1 50 % of the gradients would overflow in fp16; at " in words
    assert "0 %, and 0 % are lost to zero." in words


def test_a_scale_that_nothing_needs_yet_says_what_it_is_for():
    words = " ".join(audited(owner("a", {-10: 5, -16: 15}), formats=("fp16",)).recommendation.words)
    assert "At scale 1 fp16 would lose none of them either, and store 75 % with fewer bits" in words
    assert "makes room for smaller ones to come." in words


def test_fp4_is_refused_for_it_has_a_scale_a_block():
    with pytest.raises(ValueError, match=r"fp4 .* every block .* gradilocks\.emulate\('fp4'\)"):
        formats_named(["fp16", "fp4"])


def test_zeros_beside_nan_are_not_called_all():
    nothing = Histogram.of({}, zeros=7, nonfinite=3)
    words = audited(ModuleGradients("a", "Linear", nothing, None)).recommendation.words
    assert "Every gradient is zero, NaN or Inf" in " ".join(words)
    assert "gradients are zero" not in " ".join(words)
