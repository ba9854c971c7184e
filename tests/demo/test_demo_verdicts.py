"""The verdicts of the demo: both outcomes of each claim, and what cannot be judged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gradilocks.demo.arms import ARMS, Experiment, Job, Result, Setup, Step, arm_named
from gradilocks.demo.folder import summarize
from gradilocks.demo.verdicts import judge

HEALTHY: dict[str, dict[str, Any]] = {
    "fp32": {"final_loss": 2.30},
    "too-small": {"final_loss": 4.75, "least_loss": 3.2, "lost": 0.99},
    "just-right": {"final_loss": 2.301, "lost": 0.0},
    "too-large": {
        "final_loss": math.nan,
        "first_nonfinite": 6,
        "last_finite": 5,
        "norm_largest": 385.0,
    },
    "clipped": {"final_loss": 2.54},
}


def result(arm: str, seed: int = 0, **changes: Any) -> Result:
    """A result as it should be, but for what is changed."""
    fields: dict[str, Any] = {
        "arm": arm,
        "seed": seed,
        "steps": 300,
        "first_loss": 4.81,
        "final_loss": 2.3,
        "window": 50,
        "first_nonfinite": None,
        "last_finite": 300,
        "least_loss": 2.1,
        "largest_loss": 4.9,
        "skipped": 0,
        "clipped": 2,
        "scale_first": 65536.0,
        "scale_last": 32768.0,
        "rate_first": 0.002,
        "rate_least": 0.001,
        "rate_largest": 0.003,
        "norm_first": 0.93,
        "norm_median": 0.3,
        "norm_largest": 1.2,
        "lost": None,
        "stopped": None,
        "parameters": 117_479,
        "seconds": 12.5,
        "path": f"runs/demo/{arm}-{seed}.jsonl",
    }
    return Result(**{**fields, **HEALTHY[arm], **changes})


def healthy(seed: int = 0) -> list[Result]:
    return [result(arm.name, seed) for arm in ARMS]


def changed(arm: str, **changes: Any) -> list[Result]:
    """Healthy results, one of them changed."""
    return [result(each.name, **(changes if each.name == arm else {})) for each in ARMS]


def test_all_claims_hold_where_the_numbers_bear_them_out() -> None:
    verdicts = judge(healthy())
    assert [verdict.name for verdict in verdicts] == ["too small", "too large", "just right"]
    assert [verdict.holds for verdict in verdicts] == [True, True, True]
    small, large, right = (verdict.sentence for verdict in verdicts)
    assert "99.0%" in small
    assert "the loss ends near its start: 4.810 at the first step, 3.200 at best, 4.750" in small
    assert "fp32 goes from 4.810 to 2.300." in small
    assert "from 0.93 to 385 and the loss is not finite from step 6 on; clipped at 0.25" in large
    assert "the loss of the same training goes from 4.810 to 2.540." in large
    assert "0.043% apart, within the 0.5% claimed" in right


@pytest.mark.parametrize("final", [2.3116, 2.2884])
def test_just_right_does_not_hold_when_it_is_further_from_fp32(final: float) -> None:
    verdict = judge(changed("just-right", final_loss=final))[2]
    assert verdict.holds is False
    assert "more than the 0.5% claimed" in verdict.sentence


def test_just_right_holds_on_the_edge_of_what_is_claimed() -> None:
    assert judge(changed("just-right", final_loss=2.3 * 1.00499))[2].holds


def test_just_right_does_not_hold_as_nan_and_gives_nan_no_distance() -> None:
    verdict = judge(changed("just-right", final_loss=math.nan))[2]
    assert verdict.holds is False
    assert verdict.sentence == (
        "Scaled and clipped, fp16 ends at NaN, fp32 at 2.3000: a loss that is not finite has no "
        "distance."
    )


def test_just_right_says_so_if_fp32_did_not_learn() -> None:
    verdict = judge([result("fp32", final_loss=4.81), result("just-right", final_loss=4.81)])[2]
    assert verdict.sentence.endswith("; fp32 itself did not learn.")


# fp32 falls by 4.81 - 2.30 = 2.51, and a tenth of that is 0.251.
@pytest.mark.parametrize(
    ("final", "holds", "words"),
    [
        (4.81, True, "ends near its start"),
        (4.81 - 0.250, True, "ends near its start"),
        (4.81 + 0.250, True, "ends near its start"),
        (4.81 - 0.252, False, "falls all the same"),
        (2.4, False, "falls all the same"),
        (4.81 + 0.252, False, "rises above its start"),
        (50.0, False, "rises above its start"),
        (math.nan, False, "is not finite at the end"),
    ],
    ids=["start", "below", "above", "lower", "learned", "higher", "fifty", "nan"],
)
def test_too_small_holds_only_for_a_loss_that_ends_near_its_start(
    final: float, holds: bool, words: str
) -> None:
    verdict = judge(changed("too-small", final_loss=final))[0]
    assert verdict.holds is holds
    assert f"to zero at the first step, and the loss {words}: 4.810 at " in verdict.sentence
    assert verdict.numbers["the loss"] == {"0": words}


@pytest.mark.parametrize("final", [4.81, 4.9, math.nan])
def test_too_small_does_not_hold_where_fp32_did_not_learn_either(final: float) -> None:
    both = [result("fp32", final_loss=final), result("too-small", final_loss=4.81)]
    verdict = judge(both)[0]
    assert verdict.holds is False
    assert "the loss shows nothing, for fp32 did not learn either: 4.810" in verdict.sentence
    assert verdict.numbers["fell, as a part of what fp32's fell"] == {"0": None}


def test_too_small_counts_what_became_of_each_seed_and_shows_no_mean_of_nan() -> None:
    finals = {0: 4.81, 1: 60.0, 2: math.nan}
    several = [result("fp32", seed) for seed in finals]
    several += [result("too-small", seed, final_loss=final) for seed, final in finals.items()]
    verdict = judge(several)[0]
    assert verdict.holds is False
    assert (
        "the loss ends near its start in 1 of 3 seeds and rises above its start in 1 of 3 seeds "
        "and is not finite at the end in 1 of 3 seeds: 4.810 at the first step, 3.200 at best, "
        "NaN in 1 of 3 seeds and 32.405 in the rest at the end; fp32 goes from 4.810 to 2.300 "
        "(means of 3 seeds)."
    ) in verdict.sentence


def larges(**by_seed: dict[str, Any]) -> str:
    """What is said of three seeds without a clip, up to the clip."""
    several = [result("clipped", seed) for seed in range(len(by_seed))]
    for seed, changes in enumerate(by_seed.values()):
        several.append(result("too-large", seed, **changes))
    return judge(several)[1].sentence.partition(";")[0]


FINITE: dict[str, Any] = {"first_nonfinite": None, "last_finite": 300, "final_loss": 2.6}


def test_too_large_does_not_hold_when_nothing_diverges() -> None:
    verdict = judge(changed("too-large", **FINITE))[1]
    assert verdict.holds is False
    assert "the loss ends at 2.600, no higher than its start;" in verdict.sentence
    assert larges(a=FINITE, b=FINITE, c=FINITE).endswith(
        "the loss ends at 2.600, no higher than its start, in all 3 seeds"
    )


def test_too_large_holds_for_a_loss_that_is_finite_and_above_its_start() -> None:
    verdict = judge(changed("too-large", **{**FINITE, "final_loss": 900.0}))[1]
    assert verdict.holds
    assert "the loss ends at 900.000, above its start;" in verdict.sentence


def test_too_large_counts_what_became_of_each_seed() -> None:
    assert larges(a={}, b=FINITE, c={"first_nonfinite": 9, "last_finite": 8}).endswith(
        "the loss is not finite from step 6 or 9 on in 2 of 3 seeds and ends at 2.600, no higher "
        "than its start, in 1 of 3 seeds"
    )
    assert larges(a={}, b={}, c={}).endswith("is not finite from step 6 on in all 3 seeds")


def test_too_large_says_from_which_step_on_only_if_no_later_loss_is_finite() -> None:
    assert larges(a={"first_nonfinite": 280, "last_finite": 300}).endswith(
        "the loss is first not finite at step 280, though not from there on, and its final mean "
        "is NaN"
    )


def test_too_large_shows_no_norm_that_there_was_not() -> None:
    never = {"norm_first": math.nan, "norm_largest": math.nan}
    assert "the gradient norm is never finite and" in larges(a=never)
    assert "the gradient norm goes from 0.93 to 385 and" in larges(a=never, b={})
    assert "norm is not finite at the first step, 385 at most after it" in larges(
        a={"norm_first": math.nan}
    )


def test_too_large_says_when_the_clipped_loss_does_not_fall() -> None:
    verdict = judge(changed("clipped", final_loss=5.0))[1]
    assert verdict.sentence.endswith("goes from 4.810 to 5.000, and does not fall.")


@pytest.mark.parametrize("final", [5.0, math.nan])
def test_too_large_does_not_hold_when_clipping_does_not_help(final: float) -> None:
    assert judge(changed("clipped", final_loss=final))[1].holds is False


def test_one_seed_out_of_three_is_enough_for_a_claim_not_to_hold() -> None:
    several = [*healthy(0), *healthy(1), *healthy(2)]
    assert [verdict.holds for verdict in judge(several)] == [True, True, True]
    spoilt = [
        result("too-large", 1, **FINITE) if (one.arm, one.seed) == ("too-large", 1) else one
        for one in several
    ]
    verdict = judge(spoilt)[1]
    assert verdict.holds is False
    assert "in 2 of 3 seeds" in verdict.sentence


def test_what_was_not_run_is_not_judged() -> None:
    verdicts = judge([result("fp32"), result("just-right")])
    assert [verdict.holds for verdict in verdicts] == [None, None, True]
    assert "takes the arms too-small and fp32" in verdicts[0].sentence
    assert judge([result("fp32", 0), result("just-right", 1)])[2].holds is None


def test_the_numbers_behind_a_verdict_are_there_seed_by_seed() -> None:
    small, large, right = (verdict.to_plain()["numbers"] for verdict in judge(healthy()))
    assert small["rounded to zero"] == {"0": 0.99}
    assert large["final loss without a clip"] == {"0": None}
    assert right["claimed at most"] == 0.005


def test_a_result_is_plain_json_with_every_field_and_no_nan() -> None:
    one = result("too-small", 3, skipped=4, stopped="why", lost=0.5)
    assert Result(**json.loads(json.dumps(one.to_plain(), allow_nan=False))) == one
    lost = json.loads(json.dumps(result("too-large").to_plain(), allow_nan=False))
    assert (lost["final_loss"], lost["lost"], lost["stopped"]) == (None, None, None)


def test_steps_are_summed_up() -> None:
    steps = [
        Step(1, 5.0, 4.0, 3.0, True, False, 0.1),
        Step(2, 9.0, 4.0, 8.0, True, False, 0.3),
        Step(3, math.nan, 4.0, math.nan, True, True, 0.2),
        Step(4, math.inf, 2.0, 1.0, False, True, 0.2),
    ]
    job = Job(arm_named("too-large"), 0, Setup(steps=4), "a.jsonl")
    one = Result.from_steps(job, steps, lost=0.1, stopped=None, parameters=5, seconds=1.0)
    assert (one.steps, one.skipped, one.clipped, one.window) == (4, 2, 2, 1)
    assert (one.first_loss, one.least_loss, one.largest_loss) == (5.0, 5.0, 9.0)
    assert (one.first_nonfinite, one.last_finite) == (3, 2)
    assert (one.scale_first, one.scale_last) == (4.0, 2.0)
    assert (one.norm_first, one.norm_median, one.norm_largest) == (3.0, 3.0, 8.0)
    assert (one.rate_first, one.rate_least, one.rate_largest) == (0.1, 0.1, 0.3)
    assert math.isnan(one.final_loss)


def test_the_summary_holds_every_final_loss_and_is_plain_json() -> None:
    results = [*healthy(0), *healthy(1), *healthy(2)]
    command = ("gradilocks", "demo", "--full")
    summary = summarize(
        Experiment(ARMS, [0, 1, 2], Setup(), Path("runs/demo"), command),
        list(reversed(results)),
        started=1_790_000_000.0,
        seconds=61.25,
        versions={"torch": "2.13"},
    )
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert set(summary) == {
        "made_by", "version", "command", "started", "seconds", "versions", "setup", "seeds",
        "arms", "runs", "verdicts",
    }  # fmt: skip
    assert set(summary["versions"]) == {"gradilocks", "python", "torch"}
    assert [(run["arm"], run["seed"]) for run in summary["runs"]] == [
        (arm.name, seed) for arm in ARMS for seed in (0, 1, 2)
    ]
    assert {run["final_loss"] for run in summary["runs"] if run["arm"] == "too-large"} == {None}
    spread = {arm["name"]: arm["final_loss"] for arm in summary["arms"]}
    assert spread["fp32"] == {
        "mean": pytest.approx(2.3), "deviation": pytest.approx(0.0), "seeds": 3, "finite": 3,
    }  # fmt: skip
    assert spread["too-large"] == {"mean": None, "deviation": None, "seeds": 3, "finite": 0}
    assert summary["setup"]["global_batch"] == 2_097_152
