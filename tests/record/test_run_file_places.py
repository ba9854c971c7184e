"""Where a run file is put: in a folder, by a name of its own, or in the place of one that holds
nothing of a run."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

import gradilocks.record.recorder as recorder_module
from gradilocks import GradientControl, GradScaler, Recorder, read_run
from gradilocks.errors import BadRunFile
from gradilocks.record.environment import program_here
from gradilocks.runfile import process_here
from tests.observe.sessions import forked, write
from tests.record.recorded import recorded, small_model

TRAIN = """
import sys
import torch
import gradilocks

model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
control = gradilocks.GradientControl(optimizer, model=model, record=sys.argv[1])
for _ in range(3):
    if "crash" in sys.argv:
        raise KeyError("no data")
    control.backward(model(torch.randn(2, 4)).square().mean())
    control.step()
    control.zero_grad()
print(control.recorder.path)
"""


def test_a_script_that_records_to_a_folder_runs_twice_under_the_names_of_gradilocks_run(tmp_path):
    write(tmp_path, "fit.py", TRAIN)
    told = [forked("fit.py", "runs/", cwd=tmp_path, command="python") for _ in range(2)]
    assert [done.status for done in told] == [0, 0], told[-1].err
    paths = [Path(done.out.strip()) for done in told]
    assert len(set(paths)) == 2
    for path in paths:
        assert re.fullmatch(r"runs/fit-\d{8}-\d{6}(-2)?\.jsonl", path.as_posix())
        assert len(read_run(tmp_path / path).steps) == 3
    watched = forked("fit.py", "runs", cwd=tmp_path)
    assert watched.status == 0, watched.err
    assert len(list((tmp_path / "runs").glob("fit-*.jsonl"))) == 4  # Its own, and that of `run`.


def test_every_way_to_record_takes_a_folder(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = f"{tmp_path}/new/"  # Not there yet: the slash says what it is.
    control = GradientControl(optimizer, model=model, record=made)
    later = GradientControl(optimizer, model=model)
    later.attach(tmp_path / "new", exists="append")  # Nothing to go on in: a name of its own too.
    scaler = GradScaler("cpu", record=made)
    with Recorder(made, exists="replace") as recorder:
        recorders = [control.recorder, later.recorder, scaler.recorder, recorder]
        paths = [each.path for each in recorders]
        assert len(set(paths)) == 4
        assert {path.parent for path in paths} == {tmp_path / "new"}
        assert all(path.name.startswith(f"{program_here()}-") for path in paths)
        assert sorted(paths) == sorted((tmp_path / "new").iterdir())
    for each in recorders:
        each.close()


def test_a_name_that_another_process_takes_meanwhile_is_left_to_it(tmp_path, monkeypatch):
    with Recorder(tmp_path / "a.jsonl") as other:
        names = iter(["a.jsonl", "a-2.jsonl"])
        monkeypatch.setattr(recorder_module, "fresh_file", lambda folder, _: folder / next(names))
        with Recorder(tmp_path) as recorder:
            assert recorder.path == tmp_path / "a-2.jsonl"
        assert other.recording
    assert read_run(tmp_path / "a.jsonl").end.status == "finished"


def test_other_ranks_name_no_file_in_a_folder(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="all_ranks needs the name of a file"):
        Recorder(tmp_path, all_ranks=True)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    recorder = Recorder(f"{tmp_path}/runs/")
    assert (recorder.path, recorder.recording) == (tmp_path / "runs", False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("/a/train.py", "train"),
        ("/a/package/__main__.py", "package"),
        (None, "run"),
    ],
)
def test_a_run_is_named_by_what_runs(monkeypatch, file, name):
    import __main__

    monkeypatch.setattr(__main__, "__file__", file, raising=False)
    assert program_here() == name


def test_a_run_that_crashed_before_its_first_step_keeps_nobody_from_its_name(tmp_path):
    write(tmp_path, "fit.py", TRAIN)
    crashed = forked("fit.py", "a.jsonl", "crash", cwd=tmp_path, command="python")
    assert crashed.status == 1
    assert read_run(tmp_path / "a.jsonl").end.status == "error"
    done = forked("fit.py", "a.jsonl", cwd=tmp_path, command="python")
    assert done.status == 0, done.err
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) == 3
    assert run.resumed == ()
    again = forked("fit.py", "a.jsonl", cwd=tmp_path, command="python")
    assert "exists already and is not overwritten" in again.err


def test_gradilocks_run_takes_such_a_place_too(tmp_path):
    write(tmp_path, "fit.py", TRAIN)
    Recorder(tmp_path / "b.jsonl").close()
    words = "-o", "b.jsonl", "fit.py", "a.jsonl"
    done = forked(*words, cwd=tmp_path)
    assert done.status == 0, done.err
    assert len(read_run(tmp_path / "b.jsonl").steps) == 3
    again = forked(*words, cwd=tmp_path)
    assert (again.status, again.out) == (1, "")
    assert "is there already" in again.err


def header_alone(path, **process):
    """A run file without an end, whose process is this one but for what is told."""
    recorder = Recorder(path)
    recorder.close()
    header = json.loads(path.read_text().splitlines()[0])
    header["process"] = {**header["process"], **process}
    path.write_text(json.dumps(header) + "\n")


@pytest.mark.skipif(process_here() is None, reason="the system does not tell of processes")
def test_a_header_alone_is_replaced_only_if_its_process_is_known_to_be_gone(tmp_path):
    path = tmp_path / "a.jsonl"
    gone = {"began": process_here()["began"] + 1}
    for alive in ({}, {"boot": "of another machine"}):
        header_alone(path, **alive)
        with pytest.raises(BadRunFile, match="exists already"):
            Recorder(path)
        path.unlink()
    header_alone(path, **gone)
    recorded(path, steps=2)[0].recorder.close()
    assert len(read_run(path).steps) == 2
    path.unlink()
    header_alone(path, **gone)
    with Recorder(path, exists="append"):  # Another session has begun, which goes on.
        pass
    with path.open() as file:
        lines = file.readlines()
    path.write_text("".join(lines[:-1]))  # It has no end, and its process is this one.
    with pytest.raises(BadRunFile, match="exists already"):
        Recorder(path)


@pytest.mark.parametrize(
    "more",
    [
        '{"kind": "log", "step": 0, "time": 0.1, "values": {"loss": 1.0}}\n',
        '{"kind": "of another version"}\n',
        '{"kind": "step", "st',
        "damaged\n",
    ],
)
def test_what_may_be_of_worth_is_not_replaced(tmp_path, more):
    path = tmp_path / "a.jsonl"
    Recorder(path).close()
    with path.open("a") as file:
        file.write(more)
    before = path.read_bytes()
    with pytest.raises(BadRunFile, match="exists already"):
        Recorder(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("held", ["", "theirs\n", '{"kind": "header"}\n'])
def test_what_is_surely_no_run_file_is_never_replaced(tmp_path, held):
    path = tmp_path / "a.jsonl"
    path.write_text(held)
    with pytest.raises(BadRunFile):
        Recorder(path)
    assert path.read_text() == held


def test_of_two_that_would_replace_the_same_file_one_is_refused(tmp_path, monkeypatch):
    """Both have looked, and found that they may; the second then finds the first at it."""
    import gradilocks.record.file_writer as file_writer

    path = tmp_path / "a.jsonl"
    Recorder(path).close()
    looked = []

    def look(path, real=file_writer.is_abandoned):
        found = real(path)
        if not looked:
            looked.append(True)
            looked.append(Recorder(path))  # Another comes between the look and the writing.
        return found

    monkeypatch.setattr(file_writer, "is_abandoned", look)
    with pytest.raises(BadRunFile, match="exists already"):
        Recorder(path)
    first = looked[1]
    assert first.recording
    first.log(seen=1)
    first.close()
    assert read_run(path).logged == {"seen": [(0, 1.0)]}
