"""The verdicts of the demo: both outcomes of each claim, and what cannot be judged."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gradilocks.demo.arms import ARMS, Setup, arm_named
from gradilocks.demo.summary import summarize
from gradilocks.demo.values import Job, Result, Step
from gradilocks.demo.values import summarize as sum_up
from gradilocks.demo.verdicts import judge

HEALTHY: dict[str, dict[str, Any]] = {
    "fp32": {"final_loss": 2.30},
    "too-small": {"final_loss": 4.75, "least_loss": 3.2, "lost": 0.99},
    "just-right": {"final_loss": 2.301, "lost": 0.0},
    "too-large": {"final_loss": math.nan, "last_finite": 5, "norm_largest": 385.0},
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
        "last_finite": 300,
        "least_loss": 2.1,
        "largest_loss": 4.9,
        "skipped": 0,
        "clipped": 2,
        "scale_first": 65536.0,
        "scale_last": 32768.0,
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
    assert "4.750 at the end" in small
    assert "from 0.93 to 385 and the loss is NaN from step 6 on" in large
    assert "0.043% apart, within the 0.5% claimed" in right


@pytest.mark.parametrize("final", [2.3116, 2.2884, math.nan])
def test_just_right_does_not_hold_when_it_is_further_from_fp32(final: float) -> None:
    verdict = judge(changed("just-right", final_loss=final))[2]
    assert verdict.holds is False
    assert "more than the 0.5% claimed" in verdict.sentence


def test_just_right_holds_on_the_edge_of_what_is_claimed() -> None:
    assert judge(changed("just-right", final_loss=2.3 * 1.00499))[2].holds


@pytest.mark.parametrize("final", [2.4, 4.1])
def test_too_small_does_not_hold_when_the_model_learns_all_the_same(final: float) -> None:
    verdict = judge(changed("too-small", final_loss=final))[0]
    assert verdict.holds is False
    assert "learns all the same" in verdict.sentence


def test_too_large_does_not_hold_when_nothing_diverges() -> None:
    verdict = judge(changed("too-large", final_loss=2.6, last_finite=300))[1]
    assert verdict.holds is False
    assert "the loss ends at 2.600" in verdict.sentence


def test_too_large_holds_for_a_loss_that_is_finite_and_above_its_start() -> None:
    verdict = judge(changed("too-large", final_loss=900.0, last_finite=300))[1]
    assert verdict.holds
    assert "the loss ends at 900.000" in verdict.sentence


@pytest.mark.parametrize("final", [5.0, math.nan])
def test_too_large_does_not_hold_when_clipping_does_not_help(final: float) -> None:
    assert judge(changed("clipped", final_loss=final))[1].holds is False


def test_one_seed_out_of_three_is_enough_for_a_claim_not_to_hold() -> None:
    several = [*healthy(0), *healthy(1), *healthy(2)]
    assert [verdict.holds for verdict in judge(several)] == [True, True, True]
    spoilt = [
        result("too-large", 1, final_loss=2.6, last_finite=300)
        if (one.arm, one.seed) == ("too-large", 1)
        else one
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


def test_a_result_comes_back_the_same_from_json_with_no_field_at_its_default() -> None:
    one = result("too-small", 3, skipped=4, stopped="why", lost=0.5)
    assert Result.from_plain(json.loads(json.dumps(one.to_plain(), allow_nan=False))) == one
    lost = Result.from_plain(json.loads(json.dumps(result("too-large").to_plain())))
    assert math.isnan(lost.final_loss)
    assert (lost.lost, lost.stopped) == (None, None)


def test_a_job_comes_back_the_same_from_json() -> None:
    job = Job(arm_named("clipped"), 7, Setup(steps=9, rows=2), "a.jsonl", ("gradilocks", "demo"))
    assert Job.from_plain(json.loads(json.dumps(job.to_plain()))) == job


def test_steps_are_summed_up() -> None:
    steps = [
        Step(1, 5.0, 4.0, 3.0, True, False),
        Step(2, 9.0, 4.0, 8.0, True, False),
        Step(3, math.nan, 4.0, math.nan, True, True),
        Step(4, math.inf, 2.0, 1.0, False, True),
    ]
    job = Job(arm_named("too-large"), 0, Setup(steps=4), "a.jsonl")
    one = sum_up(job, steps, lost=0.1, stopped=None, parameters=5, seconds=1.0)
    assert (one.steps, one.skipped, one.clipped, one.window) == (4, 2, 2, 1)
    assert (one.first_loss, one.least_loss, one.largest_loss) == (5.0, 5.0, 9.0)
    assert (one.last_finite, one.scale_first, one.scale_last) == (2, 4.0, 2.0)
    assert (one.norm_first, one.norm_median, one.norm_largest) == (3.0, 3.0, 8.0)
    assert math.isnan(one.final_loss)


def test_the_summary_holds_every_final_loss_and_is_plain_json() -> None:
    results = [*healthy(0), *healthy(1), *healthy(2)]
    summary = summarize(
        arms=ARMS,
        setup=Setup(),
        seeds=[0, 1, 2],
        results=list(reversed(results)),
        verdicts=judge(results),
        command=("gradilocks", "demo", "--full"),
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
