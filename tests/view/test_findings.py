"""Each rule on runs written by hand: what it says, what it must not say, and the verdict."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from gradilocks.view import runfile
from gradilocks.view.findings import TIERS, Finding, find, verdict
from view import made_runs as made

CULPRIT = "first NaN: output of log in head.norm (forward); input float32[4, 16], min 0, 1 zero"


def found(run: runfile.Run) -> dict[str, Finding]:
    return {finding.rule: finding for finding in find(run)}


def everything(run: runfile.Run) -> str:
    return "\n".join([verdict(run).text, *(f"{finding.title}. {finding.text}" for finding in find(run))])


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_run_whose_loss_falls_is_healthy() -> None:
    run = made.made_run()
    assert find(run) == []
    assert verdict(run).text == "Healthy: 300 steps, loss 4.01 → 1."
    assert verdict(run).severity == "ok"


def test_a_loss_that_ends_higher_is_not_called_healthy() -> None:
    run = made.made_run(20, plant={20: {"loss": 5.0}})
    assert verdict(run).text == "No problem found: 20 steps, loss 4.01 → 5."
    assert verdict(run).severity == "ok"


def test_a_loss_that_fell_by_less_than_a_tenth_is_not_called_healthy() -> None:
    """A GPT that a learning rate of 0.5 had ruined was "Healthy: 100 steps, loss 4.164 → 4.161."."""
    run = made.made_run(100, always=lambda step: {"loss": 4.2 - 0.002 * step})
    assert verdict(run).text == "No problem found: 100 steps, loss 4.198 → 4."


def test_a_loss_that_is_maximized_is_healthy_if_it_rises() -> None:
    settings = {"maximize": True}
    lines = made.steps(always=lambda step: {"loss": 0.04 * step, "norm": 0.01 * step, "updates": [0.2, 0.2]})
    run = made.run_of(made.optimizer(settings=settings), *lines)
    assert find(run) == []
    assert verdict(run).text == "Healthy: 300 steps, loss 0.04 → 12."


def test_a_run_without_losses_has_a_verdict() -> None:
    assert verdict(made.made_run(20, always=lambda step: {"loss": None})).text == "No problem found in 20 steps."


def test_a_run_without_steps_is_a_warning() -> None:
    run = made.run_of()
    assert verdict(run).text == "Warning: No optimizer step was recorded."


def test_of_several_findings_the_worst_is_the_verdict() -> None:
    run = made.made_run(plant=dict.fromkeys(range(100, 301), made.NAN_LOSS))
    run.end = made.end(status="ValueError: NaN", exit_code=1)
    assert [finding.rule for finding in find(run)] == ["corrupt_weights", "ended"]
    assert verdict(run).text == "Problem: Weights contain NaN or Inf since step 100 (or earlier)."


def test_a_problem_in_one_tier_ends_the_search() -> None:
    run = made.made_run(plant={50: {"rejected": True, "skipped": True}})
    assert set(found(run)) == {"rejected_steps"}
    bad = dict.fromkeys(range(100, 301), made.NAN_LOSS)
    run = made.made_run(plant={50: {"rejected": True, "skipped": True}, **bad})
    assert set(found(run)) == {"corrupt_weights"}


def test_there_are_about_fourteen_rules_with_docstrings() -> None:
    rules = [rule for tier in TIERS for rule in tier]
    assert 12 <= len(rules) <= 16
    assert all(rule.__doc__ for rule in rules)


def test_every_rule_has_a_row_in_the_documentation() -> None:
    page = (Path(__file__).parents[2] / "docs" / "report.md").read_text(encoding="utf-8")
    assert [rule.__name__ for tier in TIERS for rule in tier if f"| `{rule.__name__}` |" not in page] == []


def test_findings_name_the_optimizer_if_there_are_several() -> None:
    steps = [*made.steps(20), *made.steps(20, number=1, plant=dict.fromkeys(range(10, 21), made.NAN_LOSS))]
    run = made.run_of(*steps, made.optimizer(1, "SGD"))
    assert verdict(run).text == "Problem: optimizer 1 (SGD): Weights contain NaN or Inf since step 10 (or earlier)."
    assert verdict(made.run_of(*made.steps(20), *made.steps(7, number=1))).text == (
        "No problem found in 2 optimizers, 27 steps in total."
    )


# --- NaN and Inf ------------------------------------------------------------------------------------------------------


def test_nan_that_was_applied_is_a_problem_with_its_culprit() -> None:
    steps = made.steps(80, plant=dict.fromkeys(range(61, 81), made.NAN_LOSS))
    run = made.run_of(*steps, made.culprit(61, CULPRIT), made.culprit(62, "another"))
    assert verdict(run).text == f"Problem: Weights contain NaN or Inf since step 61 (or earlier); {CULPRIT}."
    finding = found(run)["corrupt_weights"]
    assert (finding.step, finding.culprit) == (61, CULPRIT)
    assert "First NaN: output of log in head.norm" in finding.text
    assert "The last finite loss before this step was 1.759" in finding.text
    assert "Continue from a checkpoint before step 61" in finding.text


def test_a_finite_loss_says_exactly_since_when_the_weights_are_corrupt() -> None:
    plant: dict[int, Any] = {61: {"norm": "nan", "nan": 1}, **dict.fromkeys(range(62, 81), made.NAN_LOSS)}
    assert found(made.made_run(80, plant=plant))["corrupt_weights"].title == "Weights contain NaN or Inf since step 61"


def test_an_unknown_origin_is_said_once_with_its_reason() -> None:
    steps = made.steps(80, plant=dict.fromkeys(range(61, 81), made.NAN_LOSS))
    culprit = made.culprit(61, "origin unknown: the replay gave finite values", known=False)
    text = everything(made.run_of(*steps, culprit))
    assert text.count("the replay gave finite values") == 1
    assert "Origin unknown: the replay gave finite values." in text
    assert text.lower().count("origin unknown") == 1


def test_a_control_is_pointed_to_run_for_the_operation() -> None:
    steps = made.steps(80, plant=dict.fromkeys(range(61, 81), made.NAN_LOSS))
    assert "`gradilocks run` finds the operation" in everything(made.run_of(*steps, source="control"))
    assert "finds the operation" not in everything(made.run_of(*steps))


def test_with_several_optimizers_the_first_culprit_is_named() -> None:
    steps = [
        *made.steps(20, plant=dict.fromkeys(range(11, 21), made.NAN_LOSS)),
        *made.steps(20, number=1, plant=dict.fromkeys(range(10, 21), made.NAN_LOSS)),
    ]
    culprits = [made.culprit(11, "NaN in parameter g"), made.culprit(10, CULPRIT, optimizer=1)]
    text = verdict(made.run_of(*steps, made.optimizer(1), *culprits)).text
    assert text.endswith(f"{CULPRIT}.")


def test_the_verdict_does_not_name_the_culprit_of_an_earlier_skip() -> None:
    plant = {1: made.SKIPPED, 71: {**made.NAN_LOSS, "skipped": True}}
    steps = made.steps(100, always=lambda step: {"scale": 65536.0}, plant=plant)
    overflow = made.culprit(1, "first Inf: mm (AddmmBackward0) in head (backward)", value="Inf")
    run = made.run_of(*steps, overflow, made.culprit(71, CULPRIT))
    assert [finding.rule for finding in find(run)] == ["nonfinite_loss", "skipped_steps"]
    assert verdict(run).text == f"Warning: The loss was NaN or Inf in step 71; {CULPRIT}."


def test_finite_steps_after_an_applied_nan_make_it_a_warning() -> None:
    finding = found(made.made_run(plant={100: {"nan": 1, "norm": "nan"}}))["corrupt_weights"]
    assert (finding.severity, finding.step) == ("warning", 100)
    assert finding.title == "1 step applied with NaN or Inf in the gradients (first: step 100)"


def test_nan_on_another_rank_names_the_rank() -> None:
    finding = found(made.made_run(plant={step: {"nan": 1, "rank": 3} for step in range(100, 301)}))["corrupt_weights"]
    assert "in the gradients on rank 3" in finding.text


def test_a_loss_that_stays_nan_in_skipped_steps_leaves_the_weights_alone() -> None:
    plant = {step: {**made.NAN_LOSS, "skipped": True} for step in range(250, 301)}
    finding = found(made.made_run(plant=plant))["nonfinite_loss"]
    assert (finding.severity, finding.title) == ("problem", "The loss has been NaN or Inf since step 250")
    assert "NaN or Inf did not reach the weights" in finding.text


def test_single_nan_losses_that_were_skipped_are_a_warning_without_advice_on_scales() -> None:
    run = made.made_run(plant={step: {**made.NAN_LOSS, "skipped": True} for step in range(60, 300, 40)})
    assert verdict(run).text == "Warning: The loss was NaN or Inf in 6 steps (first: step 60)."
    assert "skipped_steps" not in found(run)
    assert "scale" not in everything(run).lower()


def test_a_loss_that_was_never_finite_is_said() -> None:
    run = made.made_run(always=lambda step: {**made.NAN_LOSS, "skipped": True})
    assert verdict(run).text == "Problem: The loss is NaN or Inf in every step."
    applied = made.made_run(always=lambda step: made.NAN_LOSS)
    assert verdict(applied).text == "Problem: Weights contain NaN or Inf since step 1 (or earlier)."


def test_a_nan_loss_with_finite_gradients_does_not_affect_the_weights() -> None:
    finding = found(made.made_run(plant={100: {"loss": "nan"}}))["nonfinite_loss"]
    assert finding.severity == "warning"
    assert "NaN or Inf did not reach the weights" in finding.text


# --- skipped steps ----------------------------------------------------------------------------------------------------


def scaled(step: int) -> dict[str, Any]:
    return {"scale": 65536.0}


@pytest.mark.parametrize(
    ("steps", "severity"),
    [
        (range(1, 13), "note"),  # The scale settles.
        (range(60, 300, 100), "warning"),
        (range(60, 300, 8), "problem"),
        (range(1, 301, 300), "note"),
        ([299, 300], "note"),
        (range(280, 301), "problem"),  # No step after them.
    ],
)
def test_skipped_steps_matter_once_the_scale_has_settled(steps: Any, severity: str) -> None:
    finding = found(made.made_run(always=scaled, plant=dict.fromkeys(steps, made.SKIPPED)))["skipped_steps"]
    assert finding.severity == severity
    assert finding.numbers["skipped"] == len(list(steps))


def test_skips_of_a_scale_that_grows_every_20_steps_are_no_alarm() -> None:
    def oscillating(step: int) -> dict[str, Any]:
        return {"scale": 65536.0} | (made.SKIPPED | {"scale": 131072.0} if step % 21 == 0 else {})

    assert found(made.made_run(always=oscillating))["skipped_steps"].severity == "note"


def test_a_skip_without_a_scale_is_no_matter_of_the_scale() -> None:
    finding = found(made.made_run(plant={100: made.SKIPPED}))["skipped_steps"]
    assert finding.severity == "warning"
    assert "Check the inputs" in finding.text
    assert "scale" not in finding.text.lower()


def test_a_skip_is_no_matter_of_the_scale_if_the_forward_pass_made_the_nan() -> None:
    lines = made.steps(300, always=scaled, plant={100: made.SKIPPED})
    finding = found(made.run_of(*lines, made.culprit(100, phase="forward", rank=1)))["skipped_steps"]
    assert finding.severity == "warning"
    assert "Check the inputs" in finding.text
    finding = found(made.run_of(*lines, made.culprit(100, phase="backward")))["skipped_steps"]
    assert finding.severity == "note"


def test_a_scale_that_falls_to_nothing_is_named() -> None:
    def collapse(step: int) -> dict[str, Any]:
        return {"scale": 2.0 ** (16 - max(0, step - 250)), **(made.SKIPPED if step > 250 else {})}

    finding = found(made.made_run(always=collapse))["skipped_steps"]
    assert "Values overflow even at a scale of 2^-34" in finding.text


def test_a_scale_that_is_still_too_large_is_named() -> None:
    run = made.made_run(12, always=lambda step: {"scale": 2.0 ** (33 - step), **made.SKIPPED})
    assert "The scale was still 2^21: start from a smaller one." in found(run)["skipped_steps"].text


def test_steps_with_a_lost_loss_are_not_counted_twice() -> None:
    plant = {10: made.SKIPPED, 20: {**made.NAN_LOSS, "skipped": True}}
    title = found(made.made_run(always=scaled, plant=plant))["skipped_steps"].title
    assert title == "1 of 300 steps (0.33%) skipped for NaN or Inf in the gradients while the loss was finite"


def test_rejected_steps_are_counted_apart() -> None:
    few = made.made_run(plant={step: {"rejected": True, "skipped": True} for step in (100, 200)})
    assert found(few)["rejected_steps"].severity == "note"
    assert "skipped_steps" not in found(few)
    many = made.made_run(plant={step: {"rejected": True, "skipped": True} for step in range(100, 300, 10)})
    assert verdict(many).text == "Warning: The clip policy rejected 20 of 300 steps (6.7%)."


# --- sentences that were false ----------------------------------------------------------------------------------------


def test_a_loss_that_fell_is_not_said_to_have_risen() -> None:
    """4.81 → 4.6 was "ended higher than it began"."""

    def up_and_down(step: int) -> dict[str, Any]:
        return {"loss": 4.81 if step == 1 else 4.6 if step == 300 else 3.0 + 0.007 * step}

    text = everything(made.made_run(always=up_and_down))
    assert "higher" not in text
    assert "rose" not in text
    assert verdict(made.made_run(always=up_and_down)).text == "No problem found: 300 steps, loss 4.81 → 4.6."


def test_a_loss_that_falls_without_bound_has_not_risen() -> None:
    """The old sentence: "rose and was −2,440" for a loss that fell."""
    run = made.made_run(always=lambda step: {"loss": 5.0 - step**2 / 30, "norm": step * (1.0 + step % 3)})
    assert "rose" not in everything(run)
    assert verdict(run).text == "Healthy: 300 steps, loss 4.967 → -2,995."


def test_a_solved_loss_of_zero_with_zero_gradients_is_no_alarm() -> None:
    """The old sentence: "the loss does not depend on the parameters" for a hinge or triplet loss that is solved."""
    run = made.made_run(
        always=lambda step: {"loss": 1.0 / step, "norm": 0.1} if step < 30 else {"loss": 0.0, "norm": 0.0}
    )
    assert verdict(run).severity == "ok"
    assert find(run) == []


def test_gradients_of_zero_at_the_best_loss_are_convergence() -> None:
    """Gradient descent that has reached a loss of exactly 7 was "units may be dead"."""
    run = made.made_run(
        always=lambda step: {"loss": 7.0 + 20 / step, "norm": 1.0} if step < 50 else {"loss": 7.0, "norm": 0.0}
    )
    assert verdict(run).text == "Healthy: 300 steps, loss 27 → 7."


def test_gradients_of_zero_at_a_loss_far_from_the_best_are_a_problem() -> None:
    run = made.made_run(
        always=lambda step: {"loss": 5.0 / step, "norm": 1.0} if step < 50 else {"loss": 3.0, "norm": 0.0}
    )
    assert verdict(run).text == "Problem: All gradients are zero in 83.7% of the steps, but the loss is not."


def test_gradients_of_zero_under_a_loss_that_is_not_are_a_problem() -> None:
    run = made.made_run(always=lambda step: {"loss": 2.3, "norm": 0.0})
    assert verdict(run).text == "Problem: All gradients are zero in 100% of the steps, but the loss is not."


def test_weights_that_have_converged_are_not_said_to_stand_still() -> None:
    """The old sentence: "no step changes a weight" after LBFGS has converged."""

    def converged(step: int) -> dict[str, Any]:
        still = step > 20
        return {
            "norm": 1e-9 if still else 1.0,
            "loss": 1e-12 if still else 1.0 / step,
            "updates": [0.0 if still else 0.1] * 2,
        }

    run = made.made_run(always=converged)
    assert find(run) == []
    solved_at_once = made.made_run(
        always=lambda step: {"norm": 1e-9, "loss": 14.0 if step == 1 else 1e-12, "updates": [0.0, 0.0]}
    )
    assert find(solved_at_once) == []


def blow_up(begin: int, **fields: Any) -> Any:
    def step_fields(step: int) -> dict[str, Any]:
        much = 3.0 ** max(0, step - begin)
        return {"loss": 1.0 * much, "norm": 0.5 * much, **{name: value(step) for name, value in fields.items()}}

    return step_fields


def test_a_jump_of_the_learning_rate_is_named_and_not_the_batch() -> None:
    run = made.made_run(120, always=blow_up(100, lr=lambda step: 1e-3 if step < 99 else 1e-1))
    text = found(run)["diverged"].text
    assert "The learning rate had just risen from 0.001 to 0.1" in text
    assert "batch" not in text


def test_a_loss_that_jumps_in_one_step_sends_to_the_batch_first() -> None:
    run = made.made_run(120, always=lambda step: {"loss": 1.0 if step < 61 else 1e6, "norm": 1.0 if step < 61 else 1e5})
    finding = found(run)["diverged"]
    assert (finding.step, finding.severity) == (61, "problem")
    assert finding.text.index("check the batch of that step first") < finding.text.index("learning rate (0.001)")
    assert "Continue from a checkpoint before step 61" in finding.text


def test_a_loss_that_grows_step_by_step_sends_to_the_learning_rate() -> None:
    run = made.made_run(120, always=blow_up(100))
    assert "Lower the learning rate (0.001)" in found(run)["diverged"].text
    assert verdict(run).text.startswith("Problem: The loss diverged: first 1, highest ")


def test_divergence_before_nan_is_the_verdict_and_its_culprit_is_named() -> None:
    fields = blow_up(10)
    steps = made.steps(60, always=lambda step: fields(step) if step < 50 else made.NAN_LOSS)
    run = made.run_of(*steps, made.culprit(50, "first Inf: output of mm in head (forward)", value="Inf"))
    assert [finding.rule for finding in find(run)] == ["diverged", "corrupt_weights"]
    assert verdict(run).text.endswith(", then NaN or Inf; first Inf: output of mm in head (forward).")


def test_a_divergence_needs_steps_that_change_the_weights() -> None:
    run = made.made_run(20, always=lambda step: {"loss": 10.0**step, "skipped": True, "inf": 1})
    assert "diverged" not in found(run)


def test_with_several_optimizers_a_loss_may_rise_a_hundredfold() -> None:
    rising = made.steps(100, always=lambda step: {"loss": 5.0 * step, "norm": step * (1.0 + step % 3)})
    assert verdict(made.run_of(*rising, *made.steps(100, number=1))).severity == "ok"


# --- the other rules --------------------------------------------------------------------------------------------------


def test_spikes_are_a_note_with_the_tensor() -> None:
    run = made.made_run(
        plant={150: {"norm": 50.0, "norms": [1.0, 49.9]}, 250: {"norm": 8.0, "limit": 1.0, "clipped": True}}
    )
    finding = found(run)["spikes"]
    assert (finding.severity, finding.title, finding.step) == ("note", "2 spikes in the gradient norm", 150)
    assert "largest in b.weight" in finding.text
    assert "Clipped or skipped: 1 of 2." in finding.text
    assert verdict(run).severity == "ok"


def test_norms_that_vary_by_orders_have_no_spikes() -> None:
    run = made.made_run(always=lambda step: {"norm": math.exp((step * 7919 % 100) / 10)})
    assert "spikes" not in found(run)


def test_parameters_without_gradients_are_named() -> None:
    run = made.made_run(always=lambda step: {"norms": [0.5, None], "zeros": [0.0, None], "updates": [1e-3, 0.0]})
    assert found(run)["unused_parameters"].text == "b.weight: frozen, or not used in the loss of these steps."


def test_no_gradient_at_all_is_a_problem_of_one_optimizer_and_a_warning_of_several() -> None:
    run = made.made_run(20, always=lambda step: {"norm": None})
    assert verdict(run).text == "Problem: No parameter had a gradient in 20 steps."
    both = made.run_of(*made.steps(20), *made.steps(20, number=1, always=lambda step: {"norm": None}))
    assert verdict(both).severity == "warning"


def test_a_norm_of_zero_in_parameters_without_gradients_is_no_gradient() -> None:
    run = made.made_run(20, always=lambda step: {"norm": 0.0, "norms": [0.0, 0.0], "zeros": [0.0, 0.0]})
    assert verdict(run).text == "Problem: No parameter had a gradient in 20 steps."


def test_updates_of_sparse_gradients_are_no_evidence() -> None:
    """They are estimated from 128 elements: an embedding of a million rows was "No step changes the weights"."""
    run = made.made_run(always=lambda step: {"norms": [0.3, 0.3], "zeros": [0.999] * 2, "updates": [0.0] * 2})
    assert verdict(run).severity == "ok"


def test_a_learning_rate_of_zero_is_named() -> None:
    run = made.made_run(always=lambda step: {"lr": 0.0, "updates": [0.0, 0.0]})
    assert verdict(run).text == "Problem: No step changes the weights: the learning rate is 0."


def test_a_second_param_group_that_trains_is_no_rest() -> None:
    run = made.made_run(always=lambda step: {"lr": 0.0 if step > 100 else 0.1, "updates": [0.0, 1e-3]})
    assert find(run) == []


def test_the_learning_rate_may_be_zero_for_a_few_steps() -> None:
    run = made.made_run(
        always=lambda step: {"lr": 0.0 if step in (1, 300) else 0.1, "updates": [0.0 if step == 1 else 1e-3] * 2}
    )
    assert find(run) == []


def test_mostly_zero_gradients_matter_only_if_the_loss_does_not_fall() -> None:
    detail = {"norms": [0.3, 0.3], "zeros": [0.99, 0.95], "updates": [1e-3, 1e-3]}
    healthy = found(made.made_run(always=lambda step: detail))["zero_gradients"]
    assert healthy.severity == "note"
    flat = {**detail, "loss": 4.0}
    assert found(made.made_run(always=lambda step: flat))["zero_gradients"].severity == "note", "two embeddings"
    sick = found(made.made_run(always=lambda step: {**flat, "zeros": [1.0, 1.0]}))["zero_gradients"]
    assert (sick.severity, sick.culprit) == ("warning", "a.weight")
    assert sick.title == "The gradients of 2 of 2 weight tensors are mostly zero"


# --- how a run ends ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "severity", "title"),
    [
        ({}, None, None),
        ({"status": "SystemExit: 3", "exit_code": 3}, "warning", "The script exited with status 3 after 20 steps"),
        ({"status": "KeyError: 'x'", "exit_code": 1}, "problem", "The script failed after 20 steps: KeyError: 'x'"),
        ({"status": "ValueError: A sentence."}, "problem", "The script failed after 20 steps: ValueError: A sentence"),
        ({"status": "SIGTERM", "exit_code": 143}, "note", "The run was stopped after 20 steps (SIGTERM)"),
        ({"status": "KeyboardInterrupt"}, "note", "The run was stopped after 20 steps (KeyboardInterrupt)"),
        (
            {"status": "recording stopped: KeyError: 1"},
            "warning",
            "Only the first 20 steps are recorded (recording stopped: KeyError: 1)",
        ),
        ({"exit_code": 3}, "warning", "The script exited with status 3 after 20 steps"),
        ({"status": "Evil: \x1b[31m"}, "problem", "The script failed after 20 steps: Evil: \\x1b[31m"),
    ],
)
def test_how_a_run_ended_is_said(fields: Any, severity: str | None, title: str | None) -> None:
    run = made.made_run(20)
    run.end = made.end(**fields)
    ended = found(run).get("ended")
    assert (ended and (ended.severity, ended.title)) == (severity and (severity, title))


def test_a_run_that_is_not_closed_is_a_note() -> None:
    run = made.made_run(20)
    run.end, run.skipped_lines = None, 2
    assert found(run)["not_closed"].text.startswith("It was killed or is still running.")
    assert found(run)["unreadable_lines"].title == "2 lines of the file could not be read"
    assert verdict(run).severity == "ok"


def test_braces_and_backquotes_in_names_are_harmless() -> None:
    names = ["{0}{step}", "`x` {__class__}"]
    plant = dict.fromkeys(range(100, 301), made.NAN_LOSS)
    run = made.run_of(made.optimizer(names=names), *made.steps(plant=plant), made.culprit(100, "{step} {numbers[0]}"))
    assert "{step} {numbers[0]}" in verdict(run).text
    detail = {"norms": [0.3, None], "zeros": [0.99, None], "updates": [1e-3, None]}
    run = made.run_of(made.optimizer(names=names), *made.steps(always=lambda step: detail))
    assert "`x` {__class__}: frozen" in everything(run)
