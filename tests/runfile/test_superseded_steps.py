"""Run files whose run went on from an earlier step: what counts no more is left out everywhere."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradilocks import read_run
from gradilocks.cli.watch_view import Watched, plain_logs, plain_skips, plain_status
from gradilocks.integrations.tensorboard import TensorBoardSink
from gradilocks.record import ResumeSink
from gradilocks.report import examine
from gradilocks.report.comparison import summarize
from gradilocks.runfile import (
    Follower,
    Logged,
    Resume,
    header_line,
    log_line,
    optimizer_line,
    resume_line,
    step_line,
    trace_line,
)
from tests.cli.cli_process import run as run_command
from tests.runfile.run_files import (
    FIRST,
    HEADER,
    LATER,
    SECOND,
    TRACE,
    lines_of,
    plain_step,
    skipped_step,
)

START = lines_of((plain_step(1), plain_step(2)), optimizers=(FIRST,))
LOST = (
    step_line(skipped_step(3, "head.bias"))
    + log_line(Logged(2, 1.5, {"epoch": 3.0}))  # With a number of the user's own.
    + step_line(plain_step(4))
    + trace_line(replace(TRACE, step=4))
)
BACK = resume_line(Resume(optimizer=0, step=2, time=2.5, counted=2))
AGAIN = step_line(plain_step(3, time=3.0)) + step_line(plain_step(4, time=3.5))


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "run.jsonl"
    place.write_text(START + log_line(Logged(2, 1.25, {"epoch": 1.0})) + LOST + BACK + AGAIN)
    return place


def test_steps_logs_and_traces_after_it_are_put_away_and_those_before_stay(path):
    run = read_run(path)
    assert [(step.step, step.time) for step in run.steps] == [
        (1, 0.5),
        (2, 1.0),
        (3, 3.0),
        (4, 3.5),
    ]
    assert [step.step for step in run.superseded] == [3, 4]
    assert [each.values["epoch"] for each in run.logs] == [1.0]
    assert [each.values["epoch"] for each in run.superseded_logs] == [3.0]
    assert run.traces == ()
    assert run.resumes == (Resume(0, 2, 2.5, 2),)
    assert run.begins == (2,)
    assert run.damaged == {}


def test_a_resume_is_about_the_steps_of_its_own_optimizer(tmp_path):
    place = tmp_path / "run.jsonl"
    both = [plain_step(n, optimizer=k) for n in (1, 2, 3) for k in (0, 1)]
    place.write_text(lines_of(both) + resume_line(Resume(1, 1, 2.0)))
    run = read_run(place)
    assert [(s.optimizer, s.step) for s in run.steps] == [(0, 1), (1, 1), (0, 2), (0, 3)]
    assert [(s.optimizer, s.step) for s in run.superseded] == [(1, 2), (1, 3)]


def test_an_optimizer_that_came_back_with_other_parameters_is_the_same_to_a_resume(tmp_path):
    place = tmp_path / "run.jsonl"
    other = replace(FIRST, names=("embed.weight", "tail.bias"))
    place.write_text(
        START + header_line(LATER) + optimizer_line(other) + resume_line(Resume(0, 1, 2.0))
    )
    run = read_run(place)
    assert [step.step for step in run.steps] == [1]
    assert [step.step for step in run.superseded] == [2]
    assert run.begins == (1, 1)  # Before the session, as far as steps count, and where it resumes.


def test_steps_may_be_superseded_again_and_again(tmp_path):
    place = tmp_path / "run.jsonl"
    place.write_text(START + LOST + BACK + AGAIN + resume_line(Resume(0, 3, 4.0)) + BACK + AGAIN)
    run = read_run(place)
    assert [step.step for step in run.steps] == [1, 2, 3, 4]
    assert [step.step for step in run.superseded] == [3, 4, 4, 3]
    assert [each.step for each in run.resumes] == [2, 3, 2]


@pytest.mark.parametrize("changed", [{"step": "2"}, {"optimizer": None}, {"counted": 1.5}])
def test_a_damaged_resume_costs_that_line(path, changed):
    damaged = json.dumps({**json.loads(BACK), **changed})
    path.write_text(START + damaged + "\n" + AGAIN)
    with pytest.warns(RuntimeWarning, match="resume"):
        run = read_run(path)
    assert run.resumes == ()
    assert list(run.damaged) == [5]


def test_a_file_followed_as_it_grows_comes_once_more_when_handed_out_steps_are_superseded(path):
    path.write_text(START)
    follower = Follower(path)
    assert [step.step for step in follower.poll()] == [1, 2]
    append(path, LOST)
    assert [step.step for step in follower.poll()] == [3, 4]
    append(path, BACK[:20])
    assert (follower.poll(), follower.restarts) == ([], 0)
    append(path, BACK[20:] + AGAIN)
    assert [(step.step, step.time) for step in follower.poll()] == [
        (1, 0.5), (2, 1.0), (3, 3.0), (4, 3.5)
    ]  # fmt: skip
    assert follower.restarts == 1
    append(path, step_line(plain_step(5, time=4.0)))
    assert [step.step for step in follower.poll()] == [5]
    assert (follower.restarts, len(follower.reader.superseded)) == (1, 2)


def test_a_follower_that_comes_late_hands_out_only_what_counts(path):
    follower = Follower(path)
    assert [step.time for step in follower.poll()] == [0.5, 1.0, 3.0, 3.5]
    assert follower.restarts == 0


@pytest.mark.parametrize("most", [1, 200, 100_000])
def test_a_follower_that_reads_in_parts_ends_with_what_counts(path, most, monkeypatch):
    monkeypatch.setattr("gradilocks.runfile.reader.BATCH_BYTES", 256)
    follower, held, restarts = Follower(path), [], 0
    while follower.behind:
        steps = follower.poll(most=most)
        if follower.restarts != restarts:
            held, restarts = [], follower.restarts
        held += steps
    assert [step.time for step in held] == [0.5, 1.0, 3.0, 3.5]


def test_watch_tells_that_the_run_went_back_and_no_old_skip_again(path):
    first = step_line(skipped_step(3, "head.bias"))
    path.write_text(START + first)
    watched = Watched(path)
    watched.poll()
    assert len(list(plain_skips(watched))) == 1
    append(path, step_line(plain_step(4)) + log_line(Logged(4, 2.0, {"epoch": 3.0})))
    watched.poll()
    append(path, resume_line(Resume(0, 3, 2.5)) + step_line(plain_step(4, time=3.0, loss=0.25)))
    watched.poll()
    assert list(plain_skips(watched)) == ["1 step left out: the run went on after step 3"]
    assert list(plain_logs(watched)) == []
    assert watched.own == {}
    (line,) = plain_status(watched, [0])
    assert line.startswith("step 4  loss 0.25")
    assert "skipped 1" in line  # That of step 3, which counts.
    assert [step.step for step, _ in watched.skips] == [3]
    watched.poll()
    assert list(plain_skips(watched)) == []


def test_verdict_counts_and_comparison_go_by_what_counts(path):
    run = read_run(path)
    summary = summarize(run)
    assert (summary.steps, summary.skipped, summary.taken_nonfinite) == (4, 0, 0)
    found = {each.rule: each for each in examine(run).findings}
    assert found["superseded"].title == "2 steps of the file are superseded"
    assert "(after step 2)" in found["superseded"].sentence


def test_the_time_of_superseded_steps_is_no_time_of_a_step(path):
    from gradilocks.report.tracks import tracks

    (track,) = tracks(read_run(path))
    known = [seconds for seconds in track.seconds if seconds == seconds]
    assert known == [0.5, 0.5]  # Not the 2 s from step 2 to step 3, in which two others were.
    assert not track.renumbered


def test_export_leaves_them_out_or_exports_them_alone(path, tmp_path):
    done = run_command("export", path, "--to", "csv")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [row["time"] for row in rows] == ["0.5", "1.0", "3.0", "3.5"]
    done = run_command("export", path, "--to", "csv", "--superseded")
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "run.superseded.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["3", "4"]
    logged = list(csv.DictReader((tmp_path / "run.superseded.logged.csv").read_text().splitlines()))
    assert [row["value"] for row in logged] == ["3.0"]
    path.write_text(START)
    done = run_command("export", path, "--to", "csv", "--superseded", "--force")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no superseded steps" in done.stderr


def test_tensorboard_leaves_out_what_a_sink_says_is_superseded(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    assert isinstance(sink, ResumeSink)
    sink.open(HEADER)
    sink.optimizer(FIRST)
    for step in (plain_step(1), plain_step(2), plain_step(3, loss=9.0)):
        sink.step(step)
    sink.resume(Resume(0, 2, 2.0))
    sink.step(plain_step(3, time=2.5, loss=1.0))
    sink.close(None)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    tag = next(tag for tag in events.Tags()["scalars"] if tag.endswith("loss"))
    assert [(each.step, each.value) for each in events.Scalars(tag)][-2:] == [(2, 2.0), (3, 1.0)]


def test_of_several_optimizers_tensorboard_keeps_all(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    sink.open(HEADER)
    sink.optimizer(FIRST)
    sink.optimizer(SECOND)
    for number in (1, 2, 3):
        sink.step(plain_step(number))
    sink.resume(Resume(1, 1, 2.0))
    sink.close(None)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"scalars": 0}).Reload()
    tag = next(tag for tag in events.Tags()["scalars"] if tag.endswith("loss"))
    assert [each.step for each in events.Scalars(tag)] == [1, 2, 3]
