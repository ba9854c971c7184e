"""`gradilocks.log` in a watched script, and what the header then tells; what feeds a sink live."""

from __future__ import annotations

import json
import math
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gradilocks import read_run
from gradilocks.report import list_runs, report_on
from tests.integrations.wandb_file import history
from tests.observe.sessions import forked, write

SCRIPT = """
import sys
import torch
import gradilocks

torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
control = gradilocks.GradientControl(optimizer) if "control" in sys.argv else None
gradilocks.log(before=1)
for number in range(1, 7):
    optimizer.zero_grad()
    loss = model(torch.randn(3, 4)).square().mean()
    if control is None:
        loss.backward()
        optimizer.step()
    else:
        control.backward(loss)
        control.step()
    if number % 3 == 0:
        with torch.inference_mode():
            seen = model(torch.ones(2, 4)).square().mean()
        (control or gradilocks).log({"val/loss": seen}, number=number)
print(float(loss), "recorder" in str(control and control.recorder))
"""


@pytest.mark.parametrize("words", [(), ("control",)], ids=["plain", "control"])
def test_a_watched_script_logs_to_its_run_file_and_trains_as_before(tmp_path, words):
    write(tmp_path, "train.py", SCRIPT)
    done = forked("-o", "a.jsonl", "train.py", *words, cwd=tmp_path)
    assert done.status == 0, done.err
    run = read_run(tmp_path / "a.jsonl")
    assert run.logged["before"] == [(0, 1.0)]
    assert run.logged["number"] == [(3, 3.0), (6, 6.0)]
    assert [step for step, _ in run.logged["val/loss"]] == [3, 6]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    order = [kind for kind in kinds if kind in ("step", "log")]
    assert order == ["log", *["step"] * 3, "log", *["step"] * 3, "log"]
    alone = forked("train.py", *words, cwd=tmp_path, command="python")
    assert (alone.status, alone.out) == (0, done.out), alone.err


def test_a_watched_script_that_records_by_itself_has_its_numbers_once_in_either_file(tmp_path):
    own = SCRIPT.replace("Control(optimizer)", "Control(optimizer, record='own.jsonl')")
    own = own.replace("(control or gradilocks)", "gradilocks")
    write(tmp_path, "train.py", own)
    done = forked("-o", "a.jsonl", "train.py", "control", cwd=tmp_path)
    assert done.status == 0, done.err
    for name in ("a.jsonl", "own.jsonl"):
        assert read_run(tmp_path / name).logged["number"] == [(3, 3.0), (6, 6.0)], name
    watched = read_run(tmp_path / "own.jsonl")
    (tmp_path / "own.jsonl").unlink()
    alone = forked("train.py", "control", cwd=tmp_path, command="python")
    assert (alone.status, alone.out) == (0, done.out), alone.err
    assert read_run(tmp_path / "own.jsonl").logged == watched.logged


def test_a_bad_value_stops_a_script_alike_with_and_without_a_watch(tmp_path):
    write(tmp_path, "train.py", "import gradilocks\ngradilocks.log(loss='high')\n")
    for done in (
        forked("-o", "a.jsonl", "train.py", cwd=tmp_path),
        forked("train.py", cwd=tmp_path, command="python"),
    ):
        assert done.status == 1
        assert "TypeError: loss must be a number" in done.err


def test_the_header_tells_of_the_arguments_and_of_the_scripts_repository(tmp_path):
    project = tmp_path / "project"
    write(project, "train.py", SCRIPT)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    done = forked("-o", "a.jsonl", "project/train.py", "control", "--lr", "3", cwd=tmp_path)
    assert done.status == 0, done.err
    header = read_run(tmp_path / "a.jsonl").header
    assert header.config == {"argv": ["project/train.py", "control", "--lr", "3"]}
    assert len(header.git["commit"]) == 40
    assert header.git["dirty"] is False
    assert header.process["pid"] > 0


def test_tensorboard_is_fed_while_the_script_runs(tmp_path):
    write(tmp_path, "train.py", SCRIPT)
    done = forked("-o", "runs/a.jsonl", "--to", "tensorboard", "train.py", cwd=tmp_path)
    assert done.status == 0, done.err
    folder = tmp_path / "runs" / "a.tensorboard"
    fed = "gradilocks: feeding TensorBoard: tensorboard --logdir runs/a.tensorboard"
    assert fed in done.told
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert [event.value for event in events.Scalars("log/number")] == [3.0, 6.0]
    again = forked("-o", "runs/a.jsonl", "--force", "--to", "tensorboard", "train.py", cwd=tmp_path)
    assert again.status == 0, again.err
    assert len(list(folder.iterdir())) == 1  # The earlier run's went with its run file.


def test_a_folder_with_somebody_elses_events_is_refused_before_the_script_runs(tmp_path):
    write(tmp_path, "train.py", "print('ran')\n")
    foreign = tmp_path / "a.tensorboard" / "events.out.tfevents.1700000000.host"
    foreign.parent.mkdir()
    foreign.write_text("theirs")
    done = forked("-o", "a.jsonl", "--to", "tensorboard", "train.py", cwd=tmp_path)
    assert (done.status, done.out) == (1, "")
    assert "did not write" in done.err
    assert foreign.read_text() == "theirs"


def test_weights_and_biases_hears_of_every_step_before_it_ends_itself(tmp_path):
    """wandb takes its own service down as Python leaves, before a run file is closed."""
    pytest.importorskip("wandb", reason="wandb is not installed")
    quiet = {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DISABLE_CODE": "true"}
    write(tmp_path, "train.py", f"import os\nos.environ.update({quiet})\n{SCRIPT}")
    done = forked("-o", "a.jsonl", "--to", "wandb", "train.py", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "hears nothing more" not in done.err
    rows = history(tmp_path)
    steps = [row["gradilocks/step"] for row in rows if "gradilocks/norm" in row]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert [row["gradilocks/log/number"] for row in rows if "gradilocks/log/number" in row] == [
        3,
        6,
    ]


ONE_AFTER_ANOTHER = """
import torch, gradilocks

torch.manual_seed(0)
kept = []
for rate in (0.0, 0.1):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), rate)
    kept.append(optimizer)
    for number in range(1, 7):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().mean() * (1 if rate else 1000)
        loss.backward()
        optimizer.step()
        if number % 2 == 0:
            gradilocks.log(seen=loss)
"""


def test_of_models_trained_one_after_another_each_logs_at_its_own_steps(tmp_path):
    write(tmp_path, "train.py", ONE_AFTER_ANOTHER)
    forked("-o", "runs/a.jsonl", "train.py", cwd=tmp_path)
    run = read_run(tmp_path / "runs/a.jsonl")
    assert [step for step, _ in run.logged["seen"]] == [2, 4, 6, 2, 4, 6]
    (listed,) = list_runs(tmp_path / "runs")
    assert listed.last_loss == pytest.approx(run.steps[-1].loss, rel=0.2)
    drawn = report_on(run, "a").resources.logged["seen"]
    assert list(drawn.places.at) == [2, 4, 6, 2, 2, 4, 6]
    assert [math.isnan(value) for value in drawn.values].index(True) == 3  # There it begins anew.
