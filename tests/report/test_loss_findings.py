"""What a report says about the loss: that it diverged, that it was not finite, and when it is well.

No file says which losses were NaN: they are missing, and the gradients beside them are not finite.
"""

from __future__ import annotations

from dataclasses import replace
from html import escape
from typing import Any

import pytest

from gradilocks.report.health import Finding
from gradilocks.report.report_page import render
from gradilocks.report.run_report import examine, main_numbers, report_on
from gradilocks.runfile import Run
from tests.report.made_runs import SKIPPED, header, info, made_run, made_steps

NAN_LOSS = {"loss": None, "norm": None, "nan": 5}
SKIPPED_NAN_LOSS = {**SKIPPED, **NAN_LOSS}
ADVICE_ON_SCALES = ("HeadroomScale", "growth_interval", "dynamic scale", "grow as training")


def found(run: Run) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(run).findings}


def rising(n: int) -> dict[str, Any]:
    return {"loss": 4.0 - 0.02 * n if n < 150 else 1.0 + 0.05 * (n - 150)}


# --- it rises ------------------------------------------------------------------------------------


def test_a_loss_that_blows_up_with_its_norm_diverged() -> None:
    def blown(n: int) -> dict[str, Any]:
        much = 1.1 ** max(0, n - 150)
        return {"loss": 1.0 * much, "norm": 0.5 * much, "clipped": False}

    finding = found(made_run(always=blown))["loss-diverged"]
    assert finding.title.startswith("The loss diverged: 1 → 6")
    assert finding.severity == "problem"
    assert "Lower the learning rate (0.001 at step 175) first" in finding.sentence


def test_a_loss_that_ends_somewhat_above_its_start_is_a_note() -> None:
    health = examine(made_run(always=rising))
    (finding,) = health.findings
    assert (finding.rule, finding.severity) == ("loss-diverged", "note")
    assert finding.title == "The loss ended higher than it began"
    assert 130 <= (finding.step or 0) <= 165
    assert health.verdict == "healthy"


def test_a_loss_that_rises_again_is_a_note() -> None:
    (finding,) = examine(made_run(always=lambda n: {"loss": min(rising(n)["loss"], 3.5)})).findings
    assert (finding.title, finding.severity) == ("The loss rose again", "note")


def test_a_loss_whose_targets_move_may_grow_a_hundredfold() -> None:
    def learning_values(n: int) -> dict[str, Any]:
        return {"loss": 0.07 + n * 0.03, "norm": 0.7 + n * 0.013, "clipped": False}

    assert examine(made_run(always=learning_values)).verdict == "healthy"


@pytest.mark.parametrize(("factor", "severity"), [(500.0, "note"), (1e6, "problem")])
def test_with_several_optimizers_only_a_huge_loss_is_a_problem(factor, severity) -> None:
    def loss(n: int) -> dict[str, Any]:
        much = factor ** (max(0, n - 100) / 200)
        return {"loss": much, "norm": 0.5 * much, "clipped": False}

    run = made_run(always=loss)
    two = replace(
        run, optimizers=(info(), info(1, "Adam")), steps=[*run.steps, *made_steps(optimizer=1)]
    )
    assert found(two)["loss-diverged"].severity == severity


# --- it is not finite ----------------------------------------------------------------------------


def test_a_nan_loss_at_skipped_steps_is_a_warning_without_advice_on_scales() -> None:
    plant = dict.fromkeys(range(60, 300, 40), SKIPPED_NAN_LOSS)
    scales = {"always": lambda n: {"scale": 2.0 ** (20 - n // 25)}}
    health = examine(made_run(plant=plant, **scales))
    (finding,) = health.findings
    assert (finding.rule, finding.severity) == ("loss-nonfinite-steps", "warning")
    assert finding.title == "The loss itself was NaN or Inf at 6 steps"
    assert "First at step 60" in finding.sentence
    assert "No scale can cure that: look at the batches there" in finding.sentence
    assert not any(words in finding.sentence for words in ADVICE_ON_SCALES)
    assert health.verdict == "needs a look"


def test_overflows_beside_nan_losses_are_counted_apart() -> None:
    plant: dict[int, Any] = dict.fromkeys(range(60, 300, 40), SKIPPED_NAN_LOSS)
    plant |= dict.fromkeys(range(70, 300, 40), SKIPPED)
    rules = found(made_run(plant=plant))
    assert rules["skipped"].evidence["skipped"] == 6
    assert rules["loss-nonfinite-steps"].evidence["steps"] == 6


def test_a_run_that_does_not_know_its_loss_is_not_said_to_have_lost_it() -> None:
    run = made_run(
        always=lambda n: {"loss": None}, plant=dict.fromkeys(range(60, 300, 40), SKIPPED)
    )
    assert set(found(run)) == {"skipped"}


def test_a_loss_that_turns_nan_and_stays_is_a_problem() -> None:
    (finding,) = examine(made_run(plant={n: {"loss": None} for n in range(250, 301)})).findings
    assert (finding.rule, finding.step) == ("loss-not-finite", 250)


@pytest.mark.parametrize("since", [2, 15, 61])
def test_a_loss_that_turns_nan_early_is_told(since: int) -> None:
    plant = dict.fromkeys(range(since, 301), NAN_LOSS) | {since: {"loss": None}}
    (finding,) = examine(made_run(plant=plant)).findings
    assert (finding.rule, finding.severity) == ("taken-though-nonfinite", "problem")
    assert finding.step == since + 1
    assert f"The loss is NaN or Inf from step {since} on" in finding.sentence


def test_a_loss_that_was_nan_from_the_first_step_is_told() -> None:
    (finding,) = examine(made_run(100, always=lambda n: NAN_LOSS)).findings
    assert finding.title == "The weights are spoilt since step 1 at the latest"
    assert "No step had a finite loss." in finding.sentence
    skipped = found(made_run(100, always=lambda n: SKIPPED_NAN_LOSS))["loss-not-finite"]
    assert (skipped.title, skipped.step) == ("The loss was never finite", 1)


def test_a_loss_that_turns_nan_in_each_of_two_sessions_is_told() -> None:
    session = made_steps(100, plant=dict.fromkeys(range(51, 101), NAN_LOSS))
    run = replace(made_run(0), steps=[*session, *session], resumed=(header(),))
    finding = found(run)["taken-though-nonfinite"]
    assert (finding.severity, finding.step, finding.evidence["steps"]) == ("problem", 51, 100)


def test_a_session_that_took_nan_is_told_though_a_later_one_is_well() -> None:
    session = made_steps(100, plant=dict.fromkeys(range(51, 101), NAN_LOSS))
    run = replace(made_run(0), steps=[*session, *made_steps(100)], resumed=(header(),))
    finding = found(run)["taken-though-nonfinite"]
    assert (finding.severity, finding.step, finding.evidence["steps"]) == ("problem", 51, 50)


@pytest.mark.parametrize(
    ("run", "loss"),
    [
        (made_run(plant=dict.fromkeys(range(150, 301), NAN_LOSS)), "3.99 → NaN"),
        (made_run(always=lambda n: NAN_LOSS), "NaN"),
        (made_run(always=lambda n: {"loss": None}), "–"),
    ],
)
def test_the_main_numbers_of_a_run_say_that_its_loss_ended_as_nan(run: Run, loss: str) -> None:
    reported = report_on(run, "run")
    numbers = dict(main_numbers(reported, reported.tracks[0]))
    assert numbers["loss"] == loss
    assert (numbers["median norm"] == "NaN") is (loss == "NaN")
    assert (escape(loss) in render([reported])) is True


# --- it is far out -------------------------------------------------------------------------------


def test_a_skipped_batch_with_an_absurd_loss_is_blamed_and_no_scale_is() -> None:
    bad = {n: {**SKIPPED, "loss": 3e6} for n in range(37, 300, 37)}
    findings = found(made_run(plant=bad))
    finding = findings["skipped-far-out"]
    assert (finding.severity, finding.step) == ("warning", 37)
    assert "8 steps skipped" in finding.title
    assert "look at the batches there" in finding.sentence
    assert "skipped" not in findings
    for told in findings.values():
        assert not any(words in told.sentence for words in ADVICE_ON_SCALES)


def test_an_ordinary_loss_of_a_skipped_step_is_not_far_out() -> None:
    findings = found(made_run(plant={n: dict(SKIPPED) for n in range(60, 300, 30)}))
    assert "skipped-far-out" not in findings
    assert "HeadroomScale" in findings["skipped"].sentence
