"""The numbers of a run, on runs small enough to count by hand."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

import gradilocks
from gradilocks.report.comparison import compare, seconds_of, summarize
from gradilocks.report.tracks import quantile
from gradilocks.runfile import End, Run
from tests.runfile.run_files import (
    END,
    LATER,
    lines_of,
    plain_step,
    skipped_step,
    training,
    write_run,
)


def run_of(tmp_path: Path, steps=(), **more) -> Run:
    return gradilocks.read_run(write_run(tmp_path / "run.jsonl", steps, **more))


def test_skips_clips_and_culprits_are_counted(tmp_path):
    run = run_of(
        tmp_path,
        [
            plain_step(1, clipped=True),
            plain_step(2),
            skipped_step(3, "a", "b", clipped=True),  # a skipped step clips nothing
            skipped_step(4, "a"),
            plain_step(5, skipped=True, reason="rejected"),
        ],
    )
    found = summarize(run)
    assert (found.steps, found.skipped, found.clipped, found.clip_rate) == (5, 3, 1, 0.5)
    assert found.reasons == {"nonfinite": 2, "rejected": 1}
    assert found.culprits == {"a": 2, "b": 1}
    assert list(found.culprits) == ["a", "b"]


def test_the_last_loss_is_a_median_over_a_tenth_of_the_steps(tmp_path):
    steps = [plain_step(n, loss=float(n)) for n in range(1, 41)]
    steps[6] = plain_step(7, loss=-1.0)
    loss = summarize(run_of(tmp_path, steps)).losses[0]
    assert (loss.first, loss.last, loss.window) == (1.0, 38.5, 4)
    assert (loss.least, loss.least_at) == (-1.0, 7)


def test_what_a_run_does_not_know_is_none(tmp_path):
    found = summarize(run_of(tmp_path))
    assert (found.steps, found.clip_rate, found.losses, found.norm) == (0, None, {}, None)
    assert (found.steps_per_second, found.status, found.seconds) == (None, "no end", 0.0)
    json.dumps(asdict(found), allow_nan=False)


def test_the_losses_of_several_optimizers_are_kept_apart(tmp_path):
    steps = [plain_step(n // 2 + 1, loss=float(n % 2), optimizer=n % 2) for n in range(40)]
    losses = summarize(run_of(tmp_path, steps)).losses
    assert {index: (loss.first, loss.last) for index, loss in losses.items()} == {
        0: (0.0, 0.0),
        1: (1.0, 1.0),
    }


def test_losses_that_were_nan_are_counted(tmp_path):
    bad = {"loss": None, "norm": None, "nan": 1}
    steps = [plain_step(n) for n in range(1, 31)] + [plain_step(n, **bad) for n in range(31, 61)]
    found = summarize(run_of(tmp_path, steps))
    assert (found.losses[0].nonfinite, found.losses[0].nonfinite_since) == (30, 31)
    assert found.taken_nonfinite == 30
    never = summarize(run_of(tmp_path, [plain_step(1, **bad)])).losses[0]
    assert (never.first, never.last, never.least, never.nonfinite_since) == (None, None, None, 1)


def test_norms_that_were_not_finite_are_left_out(tmp_path):
    steps = [plain_step(n, norm=float(n)) for n in range(1, 102)]
    norm = summarize(run_of(tmp_path, [*steps, skipped_step(102, "a")])).norm
    assert (norm.least, norm.median, norm.p99, norm.most) == (1.0, 51.0, 100.0, 101.0)
    assert (norm.first, norm.last) == (1.0, 101.0)


def test_the_time_of_every_session_counts(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text(
        lines_of([plain_step(1, time=1.0), plain_step(2, time=8.0)])
        + lines_of([plain_step(3, time=0.5), plain_step(4, time=2.0)], header=LATER, end=END)
    )
    run = gradilocks.read_run(path)
    assert seconds_of(run) == 8.0 + END.time
    found = summarize(run)
    assert found.steps_per_second == 4 / 17.5
    assert (found.status, found.error, found.sessions) == ("error", "ValueError: no", 2)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)])
def test_a_quantile_lies_between_its_neighbours(share, value):
    assert quantile([1.0, 2.0, 4.0], share) == value
    assert quantile([7.0], share) == 7.0


def test_a_whole_run_is_plain_data(tmp_path):
    found = summarize(run_of(tmp_path, training(500), end=End(9.0, "finished", 0, None)))
    plain = json.loads(json.dumps(asdict(found), allow_nan=False))
    assert plain["norm"]["most"] <= 1.5
    assert math.isclose(plain["steps_per_second"], 500 / 9.0)
    assert plain["parameters"] == 4161


def test_repeated_steps_are_compared_as_they_were_in_the_end(tmp_path):
    first = run_of(tmp_path, [plain_step(1, loss=1.0), plain_step(2, loss=5.0)])
    path = tmp_path / "resumed.jsonl"
    path.write_text(
        lines_of([plain_step(1, loss=1.0), plain_step(2, loss=9.0)])
        + lines_of([plain_step(2, loss=5.0)], header=LATER)
    )
    (parting,) = compare([first, gradilocks.read_run(path)]).partings
    assert (parting.shared, parting.step) == (2, None)
