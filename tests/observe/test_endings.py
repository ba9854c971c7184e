"""However a script ends, its run file is whole and says how, and the last lines say where it is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from gradilocks import read_run
from gradilocks.report import examine
from tests.observe.sessions import TRAIN, environment, forked, watched, write

ENDS = {
    "exit": ("sys.exit('no data')", 1, "exit", "no data"),
    "error": ("raise ValueError('x')", 1, "error", "ValueError: x"),
    "long error": (
        "raise RuntimeError('\\n  in loading   state_dict for Linear:\\n\\tsize mismatch\\n')",
        1,
        "error",
        "RuntimeError: in loading state_dict for Linear: …",
    ),
    "os._exit": ("import os; os._exit(5)", 5, "exit", None),
    "thread": (
        "import threading, time\n"
        "def late():\n    time.sleep(0.3)\n    optimizer.step()\n"
        "threading.Thread(target=late).start()",
        0,
        "finished",
        None,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_the_run_file_is_whole_and_says_how_the_script_ended(how, tmp_path):
    last, status, said, error = ENDS[how]
    write(tmp_path, "train.py", TRAIN + last)
    # One of them in a process that imports torch itself, as users have it.
    begin = watched if how == "error" else forked
    shown = begin("-o", "a.jsonl", "train.py", cwd=tmp_path)
    run = read_run(tmp_path / "a.jsonl")
    steps = 7 if how == "thread" else 6
    assert shown.status == status
    assert [step.step for step in run.steps] == list(range(1, steps + 1))
    assert (run.torn, run.end.status, run.end.exit, run.end.error) == (0, said, status, error)
    told = shown.err.splitlines()[-3:]
    assert told[0] == f"gradilocks: recorded {steps} steps, none skipped, in a.jsonl"
    assert told[1].startswith("gradilocks: to see it: ")
    assert told[1].endswith("gradilocks report a.jsonl")
    assert told[2] == f"gradilocks: {examine(run).verdict}. {examine(run).sentence}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_script_as_it_would_under_python(number, tmp_path):
    forever = TRAIN.replace("range(6)", "__import__('itertools').count()")
    write(
        tmp_path,
        "train.py",
        forever.replace("optimizer.step()", "optimizer.step()\n    tell(number)"),
    )
    text = (tmp_path / "train.py").read_text()
    tell = "def tell(number):\n    if number == 20:\n        print('there', flush=True)\n"
    (tmp_path / "train.py").write_text(tell + text)
    ends = []
    for words in (["train.py"], ["-m", "gradilocks", "run", "-o", "a.jsonl", "train.py"]):
        running = subprocess.Popen(
            [sys.executable, *words],
            cwd=tmp_path,
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert running.stdout.readline() == "there\n"
        time.sleep(0.05)
        running.send_signal(number)
        _, err = running.communicate(timeout=120)
        ends.append((running.returncode, err))
    (python, plain), (ours, shown) = ends
    assert python == ours == -number
    assert ("KeyboardInterrupt" in plain) == ("KeyboardInterrupt" in shown)
    assert "running/" not in shown
    run = read_run(tmp_path / "a.jsonl")
    assert len(run.steps) >= 20
    assert (run.torn, run.end.status, run.end.exit) == (0, "interrupted", 128 + number)
    assert shown.splitlines()[-2].endswith("report a.jsonl")


def test_a_traceback_from_inside_a_watched_call_has_no_frame_of_ours(tmp_path):
    bad = TRAIN + (
        "def closure():\n    raise KeyError('no data')\n"
        "try:\n    torch.autograd.backward(torch.zeros(()))\n"
        "except RuntimeError as e:\n    first = e\n"
        "optimizer.step(closure)\n"
    )
    write(tmp_path, "train.py", bad)
    shown = forked("train.py", cwd=tmp_path)
    assert "KeyError: 'no data'" in shown.err
    assert "gradilocks/observe" not in shown.err


def test_a_fresh_name_under_runs_is_found_each_time(tmp_path):
    write(
        tmp_path, "train.py", TRAIN + "import os; os.makedirs('elsewhere'); os.chdir('elsewhere')"
    )
    forked("train.py", cwd=tmp_path)
    (tmp_path / "elsewhere").rmdir()
    forked("train.py", cwd=tmp_path)
    files = list((tmp_path / "runs").glob("train-*.jsonl"))
    assert len(files) == 2
    assert all(len(read_run(file).steps) == 6 for file in files)


def test_append_goes_on_and_force_begins_anew(tmp_path):
    write(tmp_path, "train.py", TRAIN)
    for option, steps in ((None, 6), ("--append", 12), ("--force", 6)):
        shown = forked(*([option] if option else []), "-o", "a.jsonl", "train.py", cwd=tmp_path)
        assert shown.status == 0
        assert len(read_run(tmp_path / "a.jsonl").steps) == steps


def test_a_folder_that_is_gone_when_it_is_needed_stops_the_watching_and_not_the_script(tmp_path):
    gone = "import os\nos.rmdir('new')\nopen('new', 'w').close()\n"
    write(tmp_path, "train.py", gone + TRAIN + "print('trained')")
    shown = forked("-o", "new/a.jsonl", "train.py", cwd=tmp_path)
    assert (shown.status, shown.out) == (0, "trained\n")
    assert any("watching ended, the script goes on" in line for line in shown.told)
    assert shown.told[-1].startswith("gradilocks: nothing could be recorded in new")


ENDS_TWICE = """
import os, signal, sys
from pathlib import Path
from gradilocks.observe.process_end import ProcessEnd

def conclude(ending):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    Path("ended.txt").write_text(ending.status)

ProcessEnd(conclude).prepare()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_that_comes_while_the_file_is_closed_waits_for_that(name, tmp_path):
    """torchrun ends survivors of a rank that failed just when their own collective has failed."""
    command = [sys.executable, "-c", ENDS_TWICE, name]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), timeout=120)
    assert done.returncode == -getattr(signal, name)
    assert (tmp_path / "ended.txt").read_text() == "finished"


def test_with_force_the_report_on_the_run_goes_with_it_and_no_other_page(tmp_path):
    write(tmp_path, "train.py", TRAIN)
    forked("-o", "a.jsonl", "train.py", cwd=tmp_path)
    forked("a.jsonl", cwd=tmp_path, command="report")
    first = (tmp_path / "a.html").read_bytes()
    forked("--force", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    shown = forked("a.jsonl", cwd=tmp_path, command="report")
    assert (shown.status, shown.err) == (0, "")
    assert (tmp_path / "a.html").read_bytes() != first
    (tmp_path / "a.html").write_bytes(first)  # Of a run that is no more.
    forked("--force", "-o", "a.jsonl", "train.py", cwd=tmp_path)
    assert (tmp_path / "a.html").read_bytes() == first
    shown = forked("a.jsonl", cwd=tmp_path, command="report")
    assert shown.status == 1
    assert "is no report on these runs" in shown.err
    assert shown.out.startswith("Healthy.")


OWN = """
import gradilocks
import torch

model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
control = gradilocks.GradientControl(optimizer, model=model, record="own.jsonl")
for number in range(3):
    control.backward(model(torch.ones(3, 4)).square().mean())
    control.step()
    control.zero_grad()
raise KeyError("x")
"""


def test_a_scripts_own_run_file_ends_as_it_does_under_python(tmp_path):
    write(tmp_path, "train.py", OWN)
    assert forked("train.py", cwd=tmp_path, command="python").status == 1
    alone = read_run(tmp_path / "own.jsonl").end
    (tmp_path / "own.jsonl").unlink()
    assert forked("-o", "a.jsonl", "train.py", cwd=tmp_path).status == 1
    end = read_run(tmp_path / "own.jsonl").end
    assert (end.status, end.exit, end.error) == (alone.status, alone.exit, alone.error)
    assert (end.status, end.error) == ("error", "KeyError: 'x'")
    assert read_run(tmp_path / "a.jsonl").end.status == "error"
