"""What a bad step tells of where it arose, and what a run of them tells of how it ended."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradilocks import read_run
from gradilocks.report.comparison import summarize
from gradilocks.report.tracks import tracks
from gradilocks.runfile import (
    FORWARD_OR_LOSS,
    BadSteps,
    Origin,
    Run,
    Step,
    describe_ending,
    origin_of,
    step_line,
)
from tests.runfile.run_files import FIRST, HEADER, NAMES, plain_step, skipped_step, write_run

BAD = skipped_step(3, "b", "a", loss_nonfinite=False)


@pytest.mark.parametrize(
    ("step", "origin"),
    [
        (BAD._replace(finite_after="c", finite_gradients=1), Origin("parameter", "b", "c")),
        (BAD._replace(finite_after="c", finite_gradients=1, loss=None), Origin("unknown")),
        (BAD._replace(finite_gradients=1), Origin("unknown")),
        (BAD._replace(finite_gradients=0), Origin("backward")),
        (BAD._replace(finite_gradients=0, loss=None), Origin("unknown")),
        (BAD._replace(culprits=BAD.culprits[:1], finite_gradients=1), Origin("parameter", "b")),
        (BAD._replace(culprits=BAD.culprits[:1], finite_gradients=0), Origin("backward")),
        (BAD._replace(culprits=BAD.culprits[:1]), Origin("unknown")),
        (BAD, Origin("unknown")),
        (BAD._replace(finite_after="c", loss=None, loss_nonfinite=True), Origin("forward")),
        (BAD._replace(culprits=()), Origin("unknown")),
    ],
)
def test_a_step_tells_no_more_than_its_loss_and_gradients_know(step: Step, origin: Origin) -> None:
    assert origin_of(step) == origin


RANKS = skipped_step(3, "b on rank 1", loss_nonfinite=False)._replace(loss_ranks=2)


@pytest.mark.parametrize(
    ("step", "origin"),
    [
        (RANKS, Origin("ranks", "b on rank 1")),
        (RANKS._replace(loss_ranks=None), Origin("unknown")),  # Another's loss may have been bad.
        (RANKS._replace(of_rank=True), Origin("unknown")),  # Another's gradients may have been.
        (RANKS._replace(culprits=RANKS.culprits * 2), Origin("unknown")),
        (RANKS._replace(loss=None, loss_nonfinite=True), Origin("forward")),
    ],
)
def test_ranks_that_name_one_culprit_and_all_losses_tell_where(step: Step, origin: Origin) -> None:
    assert origin_of(step) == origin


def test_the_rank_whose_loss_was_bad_is_in_how_the_run_ended() -> None:
    bad = BadSteps()
    for number in range(1, 7):
        lost = skipped_step(number, "b on rank 1", loss=None, loss_nonfinite=True)
        bad.take(lost._replace(bad_loss_ranks=(1,), loss_ranks=2))
    assert str(describe_ending(bad)).endswith("; the loss on rank 1: " + FORWARD_OR_LOSS)


def test_an_older_file_tells_less() -> None:
    old = BAD._replace(loss_nonfinite=None)
    assert origin_of(old) == Origin("unknown")
    assert origin_of(old._replace(loss=None)) == Origin("unknown")
    assert origin_of(old._replace(loss=None), lost=True) == Origin("forward")


def test_what_a_step_says_of_its_loss_and_its_culprits_is_read_as_it_was_written(tmp_path) -> None:
    steps = [
        plain_step(1, loss=None, loss_nonfinite=True),
        plain_step(2, loss=None, loss_nonfinite=False),
        skipped_step(3, "head.bias", finite_gradients=1, finite_after="embed.weight"),
        skipped_step(4, "head.bias", finite_gradients=0),
        plain_step(5),
    ]
    assert read_run(write_run(tmp_path / "a", steps)).steps == steps
    assert "loss_nonfinite" not in step_line(plain_step(5, loss_nonfinite=False))


@pytest.mark.parametrize(
    "field", ['"loss_nonfinite":3', '"finite_after":false', '"finite_gradients":true']
)
def test_a_line_with_a_field_of_another_type_is_left_out(field: str, tmp_path: Path) -> None:
    path = write_run(tmp_path / "a", [plain_step(1)])
    path.write_text(path.read_text().replace('"kind":"step"', f'"kind":"step",{field}'))
    with pytest.warns(RuntimeWarning, match="must be"):
        assert read_run(path).steps == []


def followed(steps: list[Step]) -> BadSteps:
    bad = BadSteps()
    for step in steps:
        bad.take(step)
    return bad


NAN_LOSS = {"loss": None, "loss_nonfinite": True, "norm": None, "nan": 2}


@pytest.mark.parametrize(
    ("steps", "ending"),
    [
        ([plain_step(1), plain_step(2, **NAN_LOSS)],
         "the loss is NaN or Inf since step 2 of 2, and the weights are spoilt since step 2 at the "
         "latest"),
        ([plain_step(1), plain_step(2, nan=1), plain_step(3, **NAN_LOSS)],
         "the loss is NaN or Inf since step 3 of 3, and the weights are spoilt since step 2"),
        ([plain_step(1, nan=1, loss=None, loss_nonfinite=False)],
         "the gradients are NaN or Inf since step 1 of 1, and the weights are spoilt since step 1 "
         "at the latest"),
        ([plain_step(1), plain_step(2, nan=1)],
         "the gradients are NaN or Inf since step 2 of 2, and the weights are spoilt since step 2"),
        ([plain_step(1), *(plain_step(n, **{**NAN_LOSS, "nan": 0}) for n in range(2, 7))],
         "the loss is NaN or Inf since step 2 of 6; the gradients stayed finite"),
        ([plain_step(1), plain_step(2, **{**NAN_LOSS, "nan": 0}),
          *(plain_step(n, **NAN_LOSS, skipped=True) for n in range(3, 8))],
         "the loss is NaN or Inf since step 2 of 7; those of the steps since then with NaN or Inf "
         "in the gradients were skipped"),
        ([plain_step(1, nan=1), plain_step(2), *(skipped_step(n, "a") for n in range(3, 9))],
         "the gradients are NaN or Inf since step 3 of 8; the steps since then were skipped and "
         "changed no weight"),
        ([plain_step(1), *(skipped_step(n, "a") for n in range(2, 6))], None),
        ([plain_step(1), *(plain_step(n, **NAN_LOSS, skipped=True) for n in range(2, 7))],
         "the loss is NaN or Inf since step 2 of 6; the steps since then were skipped and changed "
         "no weight"),
        ([plain_step(1), *(plain_step(n, **NAN_LOSS, skipped=True) for n in range(2, 6))], None),
        ([plain_step(1), *(skipped_step(n, "a") for n in range(2, 30))],
         "the gradients are NaN or Inf since step 2 of 29; the steps since then were skipped and "
         "changed no weight"),
        ([plain_step(1, **NAN_LOSS), plain_step(2)], None),
        ([], None),
    ],
)  # fmt: skip
def test_a_run_ends_in_nan_if_weights_are_spoilt_or_the_loss_stays_bad(
    steps: list[Step], ending: str | None
) -> None:
    assert followed(steps).ending == ending


KINDS = st.sampled_from(
    [
        {},
        {"nan": 1},
        NAN_LOSS,
        {**NAN_LOSS, "nan": 0},
        {**NAN_LOSS, "skipped": True},
        {"inf": 3, "skipped": True},
        {"loss": None, "loss_nonfinite": False},
        {"loss": None, "loss_nonfinite": False, "nan": 1},
        {"norm": None},
    ]
)


@given(st.lists(KINDS, min_size=1, max_size=14))
def test_the_report_says_of_every_end_what_the_closing_line_said(kinds) -> None:
    steps = [plain_step(n, **kind) for n, kind in enumerate(kinds, start=1)]
    info = replace(FIRST, names=NAMES)
    (track,) = tracks(Run(Path("a"), HEADER, (info,), steps))
    bad = followed(steps)
    assert track.bad.ending == bad.ending
    assert track.ending == describe_ending(bad)
    places = {step.step: place for place, step in enumerate(steps)}
    assert track.bad.lost_from == (None if bad.lost_since is None else places[bad.lost_since])


@given(st.lists(st.sampled_from([{}, {"loss": None}, {"loss": None, "nan": 1, "norm": None}])))
def test_an_older_file_ends_alike_for_everybody_too(kinds) -> None:
    steps = [plain_step(n, **kind) for n, kind in enumerate(kinds, start=1)]
    run = Run(Path("a"), HEADER, (replace(FIRST, names=NAMES),), steps)
    for track in tracks(run):
        ended = describe_ending(followed(steps))
        assert track.ending == ended == summarize(run).bad_endings.get(0)
