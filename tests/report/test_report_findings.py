"""Every rule fires on the fault it is for, and none on a run that is well."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from gradilocks.errors import BadRunFile
from gradilocks.report.comparison import summarize
from gradilocks.report.health import Finding
from gradilocks.report.report_page import render
from gradilocks.report.run_report import examine, report_on, what_ran
from gradilocks.report.series import skip_marks
from gradilocks.report.tracks import tracks
from gradilocks.runfile import Culprit, End, OptimizerInfo, Run, Step, Trace, read_run
from tests.report.made_runs import NAMES, SKIPPED, header, info, made_run, made_steps


def found(run: Run) -> dict[str, Finding]:
    return {finding.rule: finding for finding in examine(run).findings}


def only(run: Run) -> Finding:
    (finding,) = examine(run).findings
    return finding


# --- health --------------------------------------------------------------------------------------


def test_a_run_that_really_learned_is_healthy(healthy_file: Path) -> None:
    health = examine(read_run(healthy_file))
    assert health.verdict == "healthy", health.findings
    assert {finding.severity for finding in health.findings} <= {"note"}


def test_a_made_up_healthy_run_has_nothing_to_report() -> None:
    health = examine(made_run())
    assert (health.verdict, health.findings) == ("healthy", ())
    assert health.sentence == "Nothing wrong in 300 steps."


def test_a_few_steps_prove_little() -> None:
    assert "prove little" in examine(made_run(5)).sentence


def test_a_run_without_steps_says_so() -> None:
    health = examine(made_run(0))
    assert health.verdict == "no steps"


def test_the_gravest_comes_first() -> None:
    run = made_run(
        plant={200: {"skipped": False, "nan": 4, "norm": None}, 100: {"norm": 50.0}}, end=None
    )
    severities = [finding.severity for finding in examine(run).findings]
    assert severities == ["problem", "warning", "note"]
    assert examine(run).verdict == "in trouble"


def test_a_warning_alone_needs_a_look() -> None:
    assert examine(made_run(plant={100: {"norm": 50.0}})).verdict == "needs a look"


def test_a_number_that_is_none_is_a_bad_run_file() -> None:
    with pytest.raises(BadRunFile, match=r"made\.jsonl: a step holds something else"):
        examine(made_run(plant={100: {"norm": "large"}}))


def test_numbers_that_json_cannot_hold_count_as_missing() -> None:
    run = made_run(plant={100: {"norm": float("inf")}, 101: {"loss": float("nan")}})
    assert examine(run).verdict == "healthy"


def test_detail_that_does_not_fit_its_optimizer_is_a_bad_run_file() -> None:
    run = made_run()
    short = run.steps[9].detail._replace(norm=[1.0])  # type: ignore[union-attr]
    run.steps[9] = run.steps[9]._replace(detail=short)
    with pytest.raises(BadRunFile, match="detail for other than the 10 tensors"):
        examine(run)


# --- skipped steps -------------------------------------------------------------------------------


def test_the_skips_of_a_scale_that_settles_are_a_note() -> None:
    plant = {n: {**SKIPPED, "scale": 2.0 ** (17 - n)} for n in range(1, 7)}
    finding = only(made_run(plant=plant))
    assert (finding.rule, finding.severity) == ("skipped", "note")
    assert "usual price" in finding.sentence


def test_one_step_in_fifty_skipped_is_a_warning_that_names_the_culprit() -> None:
    culprits = (Culprit("blocks.4.mlp.weight", 0, 3), Culprit("blocks.3.mlp.weight", 0, 1))
    told = {"culprits": culprits, "finite_gradients": 8, "finite_after": "head.weight"}
    plant = {n: {**SKIPPED, **told} for n in range(60, 300, 50)}
    finding = only(made_run(plant=plant))
    assert (finding.severity, finding.step) == ("warning", 60)
    assert finding.culprit == "blocks.4.mlp.weight"
    assert finding.title == "5 steps skipped: NaN or Inf in the gradients"
    assert "Likely it arose in backward at blocks.4.mlp.weight or just after it each time." in (
        finding.sentence
    )


def test_one_step_in_eight_skipped_is_a_problem() -> None:
    finding = only(made_run(plant=dict.fromkeys(range(60, 300, 8), SKIPPED)))
    assert finding.severity == "problem"


def test_a_streak_of_skips_is_a_problem_that_no_scale_cures() -> None:
    plant = {n: {**SKIPPED, "scale": 2.0 ** (2046 - n)} for n in range(2976, 3001)}
    finding = found(made_run(3000, plant=plant))["skipped"]
    assert finding.severity == "problem"
    assert finding.evidence["longest streak"] == 25
    assert "a smaller scale does not cure this" in finding.sentence


def test_of_a_streak_that_ended_at_a_high_scale_it_is_not_known_what_cures_it() -> None:
    plant = {n: {**SKIPPED, "scale": 2.0 ** (3008 - n)} for n in range(2976, 3001)}
    finding = found(made_run(3000, plant=plant))["skipped"]
    assert finding.severity == "problem"
    assert "25 of them came in a row, the last at a scale of 2^8" in finding.sentence
    assert "Whether a smaller scale cures this is not known." in finding.sentence


def test_a_streak_that_a_smaller_scale_ended_says_so() -> None:
    plant = {n: {**SKIPPED, "scale": 2.0 ** (46 - n)} for n in range(30, 55)}
    finding = found(made_run(3000, plant=plant))["skipped"]
    assert finding.severity != "problem"
    assert "until the scale was small enough" in finding.sentence


def test_a_skip_without_a_scale_is_a_warning() -> None:
    finding = only(made_run(always=lambda n: {"scale": 1.0}, plant={150: SKIPPED}))
    assert finding.severity == "warning"
    assert "what divides or takes a root" in finding.sentence
    assert "scale" not in finding.sentence


def test_nan_without_a_scale_is_a_problem_with_its_culprit() -> None:
    nan = {**SKIPPED, "nan": 2, "inf": 0, "finite_gradients": 9}
    nan["culprits"] = (Culprit("blocks.0.mlp.weight", 2, 0),)
    finding = found(made_run(always=lambda n: {"scale": 1.0}, plant={150: nan}))["nan"]
    assert (finding.severity, finding.step) == ("problem", 150)
    assert finding.culprit == "blocks.0.mlp.weight"


def test_nan_of_a_scaled_overflow_is_not_called_nan() -> None:
    assert "nan" not in found(made_run(plant={150: {**SKIPPED, "nan": 2}}))


def test_a_step_taken_with_nan_is_a_problem() -> None:
    finding = found(made_run(plant={150: {"nan": 2, "norm": None}}))["taken-though-nonfinite"]
    assert (finding.severity, finding.step) == ("problem", 150)


@pytest.mark.parametrize(("every", "severity"), [(100, "note"), (10, "warning")])
def test_rejected_steps_are_noted_and_many_are_a_warning(every: int, severity: str) -> None:
    rejected = {"skipped": True, "reason": "rejected"}
    finding = only(made_run(plant=dict.fromkeys(range(every, 300, every), rejected)))
    assert (finding.rule, finding.severity) == ("rejected", severity)


# --- limit and scale -----------------------------------------------------------------------------


def test_a_limit_that_cuts_nearly_every_step_is_a_warning() -> None:
    finding = only(made_run(always=lambda n: {"limit": 0.01, "clipped": True}))
    assert (finding.rule, finding.severity) == ("clipped-nearly-always", "warning")


def test_a_limit_just_below_the_usual_norm_is_a_note() -> None:
    finding = only(made_run(always=lambda n: {"limit": 0.3, "clipped": True}))
    assert (finding.rule, finding.severity) == ("clipped-nearly-always", "note")


def test_a_limit_that_is_never_reached_is_a_note() -> None:
    finding = only(made_run(always=lambda n: {"limit": 100.0, "clipped": False}))
    assert (finding.rule, finding.severity) == ("never-clipped", "note")


def test_a_limit_that_adapts_may_keep_its_distance() -> None:
    run = made_run(always=lambda n: {"limit": 100.0 + n, "clipped": False})
    assert examine(run).findings == ()


def test_a_scale_at_its_lower_bound_is_a_problem() -> None:
    run = made_run(always=lambda n: {"scale": max(1.0, 2.0 ** (16 - n // 3))})
    assert found(run)["scale-stuck-low"].severity == "problem"


def test_a_scale_at_its_upper_bound_is_a_note() -> None:
    run = made_run(
        always=lambda n: {"scale": min(2.0**20, 2.0 ** (16 + n // 20))},
        header=header(settings={"scale": "DynamicScale(max_scale=1048576.0)"}),
    )
    finding = only(run)
    assert (finding.rule, finding.severity) == ("scale-stuck-high", "note")
    assert "2^20" in finding.sentence


def test_a_scale_that_falls_and_falls_is_a_warning() -> None:
    finding = only(made_run(always=lambda n: {"scale": 2.0 ** (24 - n // 25)}))
    assert (finding.rule, finding.severity) == ("scale-falling", "warning")


def test_a_static_scale_is_neither_stuck_nor_falling() -> None:
    assert examine(made_run(always=lambda n: {"scale": 1.0})).findings == ()


# --- norm and loss -------------------------------------------------------------------------------


def test_a_spike_is_told_with_its_step_and_its_tensor() -> None:
    run = made_run(details={"norm": {"blocks.2.mlp.weight": 0.9}}, plant={150: {"norm": 30.0}})
    finding = only(run)
    assert (finding.rule, finding.severity, finding.step) == ("spikes", "warning", 150)
    assert finding.culprit == "blocks.2.mlp.weight"
    assert "step 150 (30," in finding.sentence
    assert "most of it in blocks.2.mlp.weight" in finding.sentence


def test_a_spike_that_was_clipped_is_a_note() -> None:
    finding = only(made_run(plant={155: {"norm": 30.0, "clipped": True}}))
    assert (finding.severity, finding.culprit) == ("note", None)
    assert "the weights are safe" in finding.sentence


def test_spikes_close_together_are_one() -> None:
    plant = {n: {"norm": 30.0 + n} for n in range(150, 156)}
    finding = only(made_run(plant=plant))
    assert (finding.evidence["spikes"], finding.step) == (1, 155)


def test_gradients_that_are_all_zero_are_a_problem() -> None:
    finding = found(made_run(always=lambda n: {"norm": 0.0}))["no-gradient"]
    assert finding.severity == "problem"


def test_a_loss_that_only_makes_noise_has_not_diverged() -> None:
    noise = made_run(always=lambda n: {"loss": (n * 7919 % 101) / 50})
    assert examine(noise).findings == ()


# --- tensors -------------------------------------------------------------------------------------


def test_tensors_of_zeros_are_named() -> None:
    finding = only(made_run(details={"zeros": {NAMES[3]: 0.97, NAMES[4]: 0.95, NAMES[5]: 0.95}}))
    assert (finding.rule, finding.severity) == ("vanishing-zeros", "warning")
    assert finding.culprit == NAMES[3]


def test_the_zeros_of_a_large_table_that_learns_have_two_explanations() -> None:
    run = made_run(details={"zeros": {NAMES[3]: 0.97}})
    table = (1000,) * 3 + (50_000,) + (1000,) * 6
    large = OptimizerInfo(0, "AdamW", NAMES, table, ("float32",) * 10)
    finding = only(replace(run, optimizers=(large,)))
    assert (finding.rule, finding.severity) == ("vanishing-zeros", "note")
    assert "embedding" in finding.sentence
    assert "loss scale" in finding.sentence
    still = made_run(details={"zeros": {NAMES[3]: 0.97}, "update": {NAMES[3]: 0.0}})
    assert found(replace(still, optimizers=(large,)))["vanishing-zeros"].severity == "warning"


def test_the_zeros_of_an_embedding_are_its_nature() -> None:
    names = ("token_embedding.weight", *NAMES)
    run = made_run(names=names, details={"zeros": {names[0]: 0.99}})
    assert examine(run).findings == ()


def test_a_vanishing_tensor_is_named() -> None:
    finding = only(made_run(details={"norm": {NAMES[0]: 1e-8}}))
    assert (finding.rule, finding.culprit) == ("vanishing-norm", NAMES[0])


def test_vanished_tensors_are_named_also_where_they_are_most_of_the_model() -> None:
    faint = {name: 10.0 ** (i - 20) for i, name in enumerate(NAMES[:7])}
    finding = only(made_run(details={"norm": faint}))
    assert (finding.rule, finding.evidence["tensors"]) == ("vanishing-norm", 7)


def test_a_bias_may_vanish() -> None:
    names = ("key.bias", *NAMES)
    assert examine(made_run(names=names, details={"norm": {names[0]: 1e-9}})).findings == ()


def test_a_tensor_without_a_gradient_is_noted() -> None:
    nothing = {NAMES[1]: None}
    run = made_run(details=dict.fromkeys(("norm", "zeros", "nan", "inf", "update"), nothing))
    finding = only(run)
    assert (finding.rule, finding.severity, finding.culprit) == (
        "without-gradient",
        "note",
        NAMES[1],
    )


def test_a_dominating_tensor_is_named() -> None:
    finding = only(made_run(details={"norm": {NAMES[5]: 40.0}}))
    assert (finding.rule, finding.culprit) == ("dominating", NAMES[5])


@pytest.mark.parametrize(
    ("ratio", "rule"), [(0.4, "update-large"), (1e-9, "update-small"), (0.0, "update-small")]
)
def test_an_unusual_update_is_named(ratio: float, rule: str) -> None:
    details = {"update": {NAMES[2]: ratio}}
    finding = only(made_run(details=details, always=lambda n: {"loss": None}))
    assert (finding.rule, finding.severity, finding.culprit) == (rule, "warning", NAMES[2])
    learned = only(made_run(details=details))
    assert (learned.severity == "note") is (rule == "update-large")


def test_small_updates_of_a_run_that_has_converged_are_a_note() -> None:
    fallen = made_run(
        always=lambda n: {"loss": 0.9**n, "norm": 0.9**n, "clipped": False},
        details={"update": {NAMES[2]: 1e-9}},
    )
    finding = found(fallen)["update-small"]
    assert finding.severity == "note"
    assert "little left to change" in finding.sentence


# --- the end, traces, several optimizers ---------------------------------------------------------


def test_a_run_that_was_killed_is_noted() -> None:
    finding = only(made_run(end=None, torn=1))
    assert (finding.rule, finding.severity) == ("no-end", "note")
    assert "1 torn line" in finding.sentence


@pytest.mark.parametrize(
    ("end", "rule", "severity"),
    [
        (End(60.0, "error", 1, "ValueError: no"), "ended-in-error", "problem"),
        (End(60.0, "interrupted", 130, None), "interrupted", "note"),
        (End(60.0, "exit", 3, None), "exit-status", "warning"),
    ],
)
def test_a_bad_end_is_told(end: End, rule: str, severity: str) -> None:
    finding = only(made_run(end=end))
    assert (finding.rule, finding.severity) == (rule, severity)


def test_what_a_script_said_when_it_left_is_in_the_report() -> None:
    run = made_run(end=End(60.0, "exit", 1, "no data in /data"))
    assert only(run).sentence == "It ended itself after 1 min 0 s: no data in /data"
    assert dict(what_ran(run))["ended"] == "with exit status 1: no data in /data"


def test_the_page_says_what_the_first_and_the_last_loss_are() -> None:
    reported = report_on(made_run(100), "run")
    first, last, over = reported.tracks[0].loss_ends
    taken = [step.loss for step in reported.run.steps]
    assert (first, last, over) == (taken[0], median(taken[-10:]), 10)
    page = render([reported])
    assert "at the first step; the median over the last tenth of the steps" in page
    assert summarize(reported.run).losses[0].last == last


TRACE = Trace(60, 6.0, "forward", "blocks.0", "Block", "Inf", (), "Block blocks.0 gave Inf.")


@pytest.mark.parametrize(
    ("certainty", "culprit"), [("certain", "blocks.0"), ("likely", "blocks.0"), ("unknown", None)]
)
def test_a_trace_counts_more_than_what_gradients_show_and_says_how_sure_it_is(
    certainty: str, culprit: str | None
) -> None:
    trace = replace(TRACE, certainty=certainty)
    lost = {"loss": None, "loss_nonfinite": True, "nan": 2, "norm": None}
    run = made_run(plant=dict.fromkeys(range(60, 301), lost), traces=(trace,))
    (finding,) = examine(run).findings
    assert finding.culprit == culprit
    assert ("forward or loss, module unknown" in finding.sentence) is (culprit is None)
    assert (f"blocks.0 ({certainty})" in finding.sentence) is (culprit is not None)
    assert (f"first appeared in blocks.0 ({certainty})" in examine(run).sentence) is bool(culprit)


def test_weights_that_had_grown_too_large_are_the_culprit_and_no_module_is() -> None:
    trace = replace(TRACE, where="grown", text="NaN in blocks.0. Lower the learning rate first")
    lost = {"loss": None, "loss_nonfinite": True, "nan": 2, "norm": None}
    run = made_run(plant=dict.fromkeys(range(60, 301), lost), traces=(trace,))
    (finding,) = examine(run).findings
    assert finding.culprit is None
    assert "weights that had grown too large" in finding.sentence
    assert "Lower the learning rate first." in finding.sentence
    assert "grown too large" in examine(run).sentence


def test_two_optimizers_that_share_a_bad_backward_pass_are_told_once() -> None:
    bad = {n: {"nan": 2, "norm": None, "loss": None} for n in range(60, 301)}
    ours, theirs = (made_steps(plant=bad, optimizer=i) for i in (0, 1))
    both = [step for pair in zip(ours, theirs, strict=True) for step in pair]
    run = replace(made_run(0), optimizers=(info(), info(1)), steps=both)
    (finding,) = examine(run).findings
    assert finding.title.startswith("optimizer 0 (AdamW): The weights are spoilt since step 60")
    assert finding.sentence.endswith("With them those of optimizer 1 (AdamW), since step 60.")


def test_a_resumed_run_says_how_many_sessions_it_has() -> None:
    assert only(made_run(resumed=(header(),))).title == "The file holds 2 sessions"


def test_a_trace_is_told_in_its_own_words() -> None:
    trace = Trace(9, 1.0, "forward", "blocks.0", "Block", "Inf", (), "Block blocks.0 gave Inf.")
    finding = only(made_run(traces=(trace,)))
    assert (finding.step, finding.culprit) == (9, "blocks.0")
    assert finding.sentence == "Block blocks.0 gave Inf."
    assert finding.title == "At step 9 Inf first appeared in blocks.0 (certain)"
    likely = only(made_run(traces=(replace(trace, certainty="likely"),)))
    assert likely.title == "At step 9 Inf first appeared in blocks.0 (likely)"
    many = found(made_run(traces=(trace,) * 5))["traced"]
    assert many.sentence == "Block blocks.0 gave Inf. Found 5 times, up to step 9."


@pytest.mark.parametrize(
    ("text", "nan_at"),
    [("NaN first in the output of wte", 100), ("NaN in wte.weight itself: the parameter was "
      "damaged before this step", 500)],
)  # fmt: skip
def test_a_trace_of_weights_that_were_spoilt_before_it_names_nobody(text, nan_at) -> None:
    trace = Trace(101, 10.05, "forward", "wte", "Embedding", "NaN", (), text, damaged=None)
    findings = found(made_run(plant={nan_at: {"nan": 2, "norm": None}}, traces=(trace,)))
    assert "traced" not in findings
    late = findings["taken-though-nonfinite" if nan_at == 100 else "weights-not-finite"]
    assert late.culprit is None
    assert ("The trace began after the weights were spoilt" in late.sentence) is (nan_at == 100)
    assert "first appeared" not in late.title + late.sentence


def test_a_trace_is_an_origin_again_in_a_session_that_began_with_good_weights() -> None:
    trace = Trace(101, 20.05, "forward", "wte", "Embedding", "NaN", (), "NaN first in wte", None)
    bad = {n: {"nan": 2, "norm": None} for n in range(100, 150)} | {150: {"norm": None}}
    bad |= {n: {**SKIPPED, "nan": 1} for n in range(151, 202)}
    run = made_run(plant=bad, traces=(trace,), resumed=(header(),))
    assert "wte" in {finding.culprit for finding in found(replace(run, begins=(150,))).values()}
    late = found(replace(run, begins=(50,)))
    assert {finding.culprit for finding in late.values()} == {None}
    assert "The trace began after" in late["taken-though-nonfinite"].sentence
    looked = replace(run, begins=(50,), traces=(replace(trace, damaged=()),))
    assert "wte" in {finding.culprit for finding in found(looked).values()}


def test_a_trace_after_weights_that_were_mended_is_an_origin() -> None:
    trace = Trace(201, 20.05, "forward", "wte", "Embedding", "NaN", (), "NaN first in wte", None)
    run = made_run(plant={100: {"nan": 2, "norm": None}, 200: SKIPPED}, traces=(trace,))
    assert found(run)["traced"].culprit == "wte"


def test_skipped_steps_after_weights_that_were_mended_never_send_back_to_a_checkpoint() -> None:
    lost = {**SKIPPED, "loss": None, "loss_nonfinite": True}
    run = made_run(plant={5: {"nan": 2, "norm": None}} | dict.fromkeys(range(250, 301), lost))
    told = found(run)
    assert "checkpoint" not in told["loss-not-finite"].sentence
    assert "skipped and changed no weight" in told["loss-not-finite"].sentence
    assert "forward or loss, module unknown" in told["loss-not-finite"].sentence
    assert "Look at the weights before you trust any" in told["taken-though-nonfinite"].sentence


def test_a_harmless_loss_is_not_blamed_for_another_step_that_was_taken() -> None:
    plant = {10: {"loss": None, "loss_nonfinite": True}, 50: {"nan": 2, "norm": None}}
    told = found(made_run(plant=plant))["loss-not-finite"]
    assert told.title == "The loss was NaN or Inf at 1 step"
    assert "the weights are not spoilt by it" in told.sentence


def test_weights_may_have_been_spoilt_before_a_step_whose_loss_was_not_finite() -> None:
    lost = {"loss": None, "loss_nonfinite": True, "nan": 2, "norm": None}
    told = found(made_run(plant=dict.fromkeys(range(250, 301), lost)))
    spoilt = told["taken-though-nonfinite"]
    assert spoilt.title == "The weights are spoilt since step 250 at the latest"
    assert "Go back to a checkpoint before step 250 whose weights are finite" in spoilt.sentence
    assert "The loss is NaN or Inf from step 250 on; it was 1." in spoilt.sentence
    assert "loss-not-finite" not in told, "one event, one finding"
    first = {"nan": 2, "norm": None}
    told = found(made_run(plant={250: first} | dict.fromkeys(range(251, 301), lost)))
    assert told["taken-though-nonfinite"].title == "The weights are spoilt since step 250"


TWO = {"nan": 2, "norm": None, "culprits": (Culprit("b", 1, 0), Culprit("a", 1, 0))}
ONE = {"nan": 2, "norm": None, "culprits": (Culprit("b", 2, 0),), "finite_gradients": 3}
WELL = {"loss": 2.0}


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({**TWO, "finite_gradients": 0}, {**TWO, "finite_gradients": 0}, "none of the gradients"),
        ({**TWO, "finite_gradients": 0}, {}, "do not tell where it arose"),
        ({**TWO, "finite_gradients": 3, "finite_after": "c"}, {}, "Likely it arose in backward"),
        ({**TWO, "finite_gradients": 3, "finite_after": "c"}, {**TWO, "finite_gradients": 0},
         "do not tell where it arose"),
        (ONE, {}, "Likely it arose in backward at b"),
        (ONE, ONE, "do not tell where it arose"),
    ],
)  # fmt: skip
def test_what_other_optimizers_saw_of_the_same_backward_pass_counts(first, second, said) -> None:
    plants = [{150: {**SKIPPED, "inf": 0, **each, **WELL}} for each in (first, second)]
    if not second:
        plants[1] = {150: WELL}
    ours, theirs = (made_steps(plant=p, optimizer=i) for i, p in enumerate(plants))
    both = [step for pair in zip(ours, theirs, strict=True) for step in pair]
    run = replace(made_run(0), optimizers=(info(), info(1)), steps=both)
    told = [f.sentence for f in examine(run).findings if f.title.startswith("optimizer 0")]
    assert any(said in sentence for sentence in told)
    (track, _) = tracks(run)
    marks = skip_marks(track)
    assert (marks is not None and "in b" in marks.words[0]) is ("Likely" in said)


def test_steps_after_spoilt_weights_are_not_counted_as_origins() -> None:
    first = {"nan": 2, "norm": None, "finite_gradients": 9}
    first["culprits"] = (Culprit("blocks.1.mlp.weight", 2, 0),)
    later = {**first, "loss": None, "culprits": (Culprit("blocks.4.mlp.weight", 2, 0),)}
    run = made_run(plant={150: first} | dict.fromkeys(range(151, 301), later))
    told = found(run)
    assert {finding.culprit for finding in told.values()} == {"blocks.1.mlp.weight"}
    assert "blocks.4.mlp.weight" not in " ".join(finding.sentence for finding in told.values())
    assert "nan" not in told


def test_a_step_taken_with_nan_after_which_all_was_well_is_not_said_to_have_spoilt_all() -> None:
    finding = found(made_run(plant={150: {"nan": 2, "norm": None}}))["taken-though-nonfinite"]
    assert finding.title == "1 step taken with NaN or Inf in the gradients"
    assert "At step 151 all gradients were finite again" in finding.sentence
    assert "spoilt since" not in finding.title + finding.sentence


def test_each_of_several_optimizers_is_named() -> None:
    run = made_run()
    second = made_steps(100, optimizer=1, plant={60: {"norm": 50.0}})
    both = Run(
        run.path,
        run.header,
        (info(), info(1, "SGD")),
        [*run.steps, *second],
        end=run.end,
    )
    assert only(both).title == "optimizer 1 (SGD): 1 spike of the gradient norm"


def test_names_that_would_move_the_cursor_are_shown_escaped() -> None:
    names = ("\x1b[2Jevil", *NAMES)
    finding = only(made_run(names=names, details={"zeros": {names[0]: 0.97}}))
    assert "\x1b" not in finding.title + finding.sentence
    assert "\\x1b[2Jevil" in finding.sentence


def test_steps_of_an_optimizer_without_a_line_are_judged_too() -> None:
    bare = Run(Path("a.jsonl"), header(), (), made_steps(detail_every=0))
    assert isinstance(bare.steps[0], Step)
    assert examine(bare).verdict == "healthy"
