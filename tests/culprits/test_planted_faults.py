"""`gradilocks run` names the origin of the first NaN or Inf of untouched scripts."""

from __future__ import annotations

import pytest

from culprits.cases import FAULTY_TRAINING, OTHER_FAULTS, OTHERS, PLANTED, Case, Other, verdict
from run.scripts import Finished, run_plain, run_recorded


def is_long(case: Case) -> bool:
    """True for faults that last: at the first bad step they are like those that happen once."""
    return case.how_often == "lasting" and case.fault not in ("schedule", "rate")


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name, marks=[pytest.mark.long] if is_long(case) else []) for case in PLANTED],
)
def test_the_planted_fault_is_named(case: Case, tmp_path):
    finished = run_recorded(FAULTY_TRAINING, *case.arguments, cwd=tmp_path)
    assert finished.exit_code == 0, finished.err
    assert verdict(case, finished.culprits) == "exact", finished.err


@pytest.mark.parametrize("case", OTHERS, ids=[case.name for case in OTHERS])
def test_other_faults_are_named_or_unknown(case: Other, tmp_path):
    finished = run_recorded(OTHER_FAULTS, case.name, cwd=tmp_path)
    assert finished.exit_code == 0, finished.err
    expected = "unknown" if case.source == "unknown" else "exact"
    assert verdict(case, finished.culprits) == expected, finished.err


def test_weights_that_have_grown_are_reported(tmp_path):
    finished = run_recorded(FAULTY_TRAINING, "mlp", "fp32", "sgd", "rate", "lasting", cwd=tmp_path)
    assert "; weights have grown to " in finished.culprits[0]["text"]


def same_training(finished: Finished, plain: Finished) -> bool:
    """True if the losses and the generator's state at the end are equal."""
    return (finished.exit_code, finished.out) == (plain.exit_code, plain.out)


@pytest.mark.parametrize("arguments", [PLANTED[0].arguments, PLANTED[11].arguments, PLANTED[4].arguments])
def test_a_replay_changes_nothing(arguments, tmp_path):
    (tmp_path / "plain").mkdir()
    finished = run_recorded(FAULTY_TRAINING, *arguments, cwd=tmp_path)
    assert finished.culprits
    assert same_training(finished, run_plain(FAULTY_TRAINING, *arguments, cwd=tmp_path / "plain"))


def test_the_output_of_a_replay_is_not_shown(tmp_path):
    (tmp_path / "plain").mkdir()
    finished = run_recorded(OTHER_FAULTS, "output_in_forward", cwd=tmp_path)
    assert finished.culprits[0]["operation"] == "log"
    assert same_training(finished, run_plain(OTHER_FAULTS, "output_in_forward", cwd=tmp_path / "plain"))


def test_without_trace_nothing_is_replayed(tmp_path):
    finished = run_recorded(FAULTY_TRAINING, *PLANTED[0].arguments, cwd=tmp_path, has_trace=False)
    assert finished.culprits == []
    assert finished.steps[5]["nan"] > 0
