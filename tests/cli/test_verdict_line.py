"""The last line of `gradilocks run` is the verdict of `gradilocks report`, in its colour."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradilocks.cli import run_command
from gradilocks.cli.app import app
from gradilocks.cli.terminal import say
from gradilocks.observe import Summary
from gradilocks.observe.process_end import Ending
from gradilocks.report import examine
from gradilocks.runfile import read_run
from tests.observe.sessions import forked, write

SCRIPT = """
import sys
import torch

torch.manual_seed(0)
rate, fault = float(sys.argv[1]), int(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=rate)
for number in range(1, 41):
    x = torch.randn(16, 8)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), x[:, :1])
    if number == fault:
        loss = loss / 0 * 0
    loss.backward()
    optimizer.step()
if len(sys.argv) > 3:
    sys.exit(sys.argv[3])
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("words", "verdict", "said"),
    [
        (("0.01", "0"), "healthy", "Nothing wrong in 40 steps."),
        (("5", "0"), "in trouble", "The loss diverged: "),
        (("0.01", "31"), "in trouble", "It ended in NaN or Inf: the loss is NaN or Inf since "),
        (("0.01", "0", "no data"), "needs a look", "The run exited with status 1. "),
    ],
)
def test_the_last_line_says_what_the_report_says(words, verdict, said, tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT)
    done = forked("-o", "a.jsonl", "train.py", *words, cwd=tmp_path)
    shown = CliRunner().invoke(app, ["report", "--json", str(tmp_path / "a.jsonl")])
    (found,) = json.loads(shown.stdout)["runs"]
    assert found["verdict"] == verdict
    assert done.told[-1] == f"gradilocks: {verdict}. {found['sentence']}"
    assert found["sentence"].startswith(said)
    if "no data" in words:
        assert "no data" in found["findings"][0]["sentence"]


def test_a_verdict_is_coloured_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for stream, line in [
        (Terminal(), "\x1b[1;31mgradilocks: in trouble.\x1b[0m\n"),
        (io.StringIO(), "gradilocks: in trouble.\n"),
    ]:
        monkeypatch.setattr(sys, "__stderr__", stream)
        say("in trouble.", colour=run_command.COLOURS["in trouble"])
        assert stream.getvalue() == line
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "__stderr__", Terminal())
    say("in trouble.", colour="red")
    assert sys.__stderr__.getvalue() == "gradilocks: in trouble.\n"


@pytest.mark.parametrize(("ended", "verdict"), [(("the loss is NaN",), "in trouble"), ((), "")])
def test_of_a_file_too_large_to_read_again_what_was_counted_is_told(
    ended, verdict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_command, "MOST_READ", 0)
    file = tmp_path / "a.jsonl"
    file.write_text("{}\n")
    summary = Summary(
        path=file, file=file, steps=9, skipped=0, seen=9, failed=False, torch=True, watched=True,
        logs=0, findings=(), unseen=False, taken=0, partly=0, untold=False, rank=0, stopped=False,
        held=0, snapshot=None, left_out=None, bad_endings=ended, ending=Ending("finished", 0),
    )  # fmt: skip
    said, words = run_command.judged(summary, examine)
    assert said == verdict
    assert (words == "It ended in NaN or Inf: the loss is NaN.") is bool(ended)


BROKEN = """
from gradilocks.observe.step_recorder import StepRecorder
read, counted = StepRecorder._read, [0]
def broken(*args):
    counted[0] += 1
    if counted[0] > 25:
        raise OSError("no more")
    read(*args)
StepRecorder._read = broken
"""


def test_a_run_that_could_not_be_watched_to_its_end_is_not_healthy(tmp_path: Path) -> None:
    write(tmp_path, "train.py", BROKEN + SCRIPT)
    done = forked("-o", "a.jsonl", "train.py", "0.01", "31", cwd=tmp_path)  # NaN, unseen.
    assert done.status == 0
    assert "watching ended, the script goes on: OSError: no more" in done.err
    said = (
        "needs a look. Nothing is known of the steps after 25. 1 warning in 25 steps, no problem."
    )
    assert done.told[-1] == f"gradilocks: {said}"
    run = read_run(tmp_path / "a.jsonl")
    assert run.end.unwatched is True
    health = examine(run)
    assert health.verdict == "needs a look"
    assert [f.title for f in health.findings if f.rule == "unwatched"] == [
        "Nothing is known of the steps after 25"
    ]


STOPPED = """
from gradilocks.record import batch
unpack = batch.Batch.unpack
def broken(self):
    if len(made) == 2:
        raise ValueError("no more")
    made.append(self)
    return unpack(self)
made = []
batch.Batch.unpack = broken
"""


def test_nor_is_one_whose_recording_stopped(tmp_path: Path) -> None:
    write(tmp_path, "train.py", STOPPED + SCRIPT)
    words = ("--flush-every", "10", "-o", "a.jsonl", "train.py", "0.01", "0")
    done = forked(*words, cwd=tmp_path)
    assert done.status == 0
    assert done.told[-1].startswith("gradilocks: needs a look. Nothing wrong in ")
    assert "Nothing is known of the steps after those 20." in done.told[-1]


def test_a_run_that_was_watched_to_its_end_says_nothing_of_it(tmp_path: Path) -> None:
    write(tmp_path, "train.py", SCRIPT)
    forked("-o", "a.jsonl", "train.py", "0.01", "0", cwd=tmp_path)
    assert "unwatched" not in (tmp_path / "a.jsonl").read_text()
