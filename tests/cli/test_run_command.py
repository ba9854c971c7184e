"""`gradilocks run`: exit codes, run files, the last lines."""

from __future__ import annotations

import shlex
import subprocess
import sys

import pytest

from cli.commands import TRAINING, records, run_command
from gradilocks.view import columns, findings, runfile


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    return tmp_path


def said(finished):
    """The lines of gradilocks on standard error."""
    return [line.removeprefix("gradilocks: ") for line in finished.err.splitlines() if line.startswith("gradilocks: ")]


def test_the_last_lines_give_the_verdict_the_numbers_and_the_next_command(folder):
    done = run_command("run", "-o", "a run.jsonl", "train.py", "--lr", "3e-4", cwd=folder)
    assert (done.status, done.out) == (0, "")
    run = runfile.read(folder / "a run.jsonl")
    verdict, numbers, following = said(done)
    assert verdict == findings.verdict(run).text
    assert verdict.startswith("Healthy: 40 steps, loss 3.311 → ")
    assert numbers.startswith("steps 40; loss 3.311 → ")
    assert "no limit" not in numbers
    command = following.removeprefix("next: ")
    assert command == "gradilocks report 'a run.jsonl'"
    shown = run_command(*shlex.split(command)[1:], cwd=folder, COLUMNS="200")
    assert shown.status == 0
    assert verdict in shown.out
    facts = columns.facts(run, columns.summarize(run, columns.columns(run)[0]))
    assert set(numbers.split("; ")) <= {f"{name} {value}" for name, value in facts.items()}
    assert all(value in shown.out for value in facts.values())


def test_the_culprit_of_a_step_that_the_script_left_out_is_in_the_last_lines(folder):
    clip = "if torch.nn.utils.clip_grad_norm_(model.parameters(), 9.0).isfinite():"
    (folder / "train.py").write_text(TRAINING.replace("    optimizer.step()", f"    {clip}\n        optimizer.step()"))
    found, verdict, _, culprit, _ = said(run_command("run", "train.py", "--nan-in-step=39", cwd=folder))
    assert found == culprit
    assert culprit.startswith("step 39: first NaN: in the script's own code after Sequential (forward)")
    assert verdict.startswith("Healthy: 39 steps")


def test_a_file_that_ends_early_is_said_before_the_verdict(folder):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))\n"
    (folder / "train.py").write_text(limit + TRAINING)
    done = run_command("run", "-o", "a.jsonl", "train.py", cwd=folder)
    assert done.status == 0
    assert said(done)[0].endswith("a.jsonl could not be written to the end; the numbers are those of its steps")


def test_the_verdict_is_in_the_run_file_and_in_ls(folder):
    run_command("run", "-o", "runs/a.jsonl", "train.py", cwd=folder)
    first, last = records(folder / "runs" / "a.jsonl", "end")
    assert "verdict" not in first
    assert last == {**first, "verdict": last["verdict"], "severity": "ok"}
    assert last["verdict"] in run_command("ls", cwd=folder, COLUMNS="200").out


def test_name_and_label_of_the_run_show_the_script_and_its_arguments(folder):
    done = run_command("run", "train.py", "--lr", "3e-4", cwd=folder)
    (path,) = (folder / "runs").glob("*.jsonl")
    assert path.name.startswith("train-2")
    (header,) = records(path, "header")
    assert (header["label"], header["source"]) == ("train.py --lr 3e-4", "run")
    assert said(done)[-1] == f"next: gradilocks report runs/{path.name}"


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("import sys; sys.exit(7)", 7),
        ("import sys; sys.stderr.close(); sys.exit(5)", 5),
    ],
)
def test_the_exit_code_is_that_of_the_script(folder, script, status):
    (folder / "train.py").write_text(f"{TRAINING}\n{script}\n")
    assert run_command("run", "train.py", cwd=folder).status == status
    (path,) = (folder / "runs").glob("*.jsonl")
    assert records(path, "end")[-1]["exit_code"] == status


def test_the_exit_code_stands_if_there_can_be_no_verdict(folder):
    (folder / "train.py").write_text(f"{TRAINING}\nsys.modules['gradilocks.view.report'] = None\nsys.exit(5)\n")
    done = run_command("run", "train.py", cwd=folder)
    assert done.status == 5
    assert said(done)[-1].startswith("no verdict: ModuleNotFoundError: ")


def test_what_follows_the_script_belongs_to_the_script(folder):
    (folder / "train.py").write_text("import sys\nprint(sys.argv)\n")
    done = run_command("run", "-q", "train.py", "--help", "-o", "x", "--", "-q", cwd=folder)
    assert done.out == "['train.py', '--help', '-o', 'x', '--', '-q']\n"
    assert done.err == ""


def test_a_module_runs_as_with_python_dash_m(folder):
    (folder / "package").mkdir()
    (folder / "package" / "train.py").write_text(f"{TRAINING}\nprint(__package__, sys.argv[1:])\n")
    done = run_command("run", "-m", "package.train", "--epochs", "3", cwd=folder)
    assert done.out == "package ['--epochs', '3']\n"
    (path,) = (folder / "runs").glob("train-*.jsonl")
    assert records(path, "header")[0]["label"] == "package.train --epochs 3"


def test_a_script_without_steps_leaves_no_file(folder):
    (folder / "train.py").write_text("print('nothing to train')\n")
    done = run_command("run", "-o", "a.jsonl", "train.py", cwd=folder)
    assert done.out == "nothing to train\n"
    assert said(done) == ["train.py took no optimizer step; nothing was recorded"]
    assert not (folder / "a.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        (["-o", "existing.jsonl"], 1, "existing.jsonl exists. Pass --overwrite, --append or another -o FILE."),
        (["-o", "train.py/a.jsonl"], 1, "train.py/a.jsonl cannot be written: "),
        (["-o", "a.jsonl", "--overwrite", "--append"], 2, "--overwrite and --append cannot be combined."),
        (["--guard", "pause"], 2, "Invalid value for '--guard'"),
        (["--no-such-option"], 2, "No such option: --no-such-option"),
    ],
)
def test_what_cannot_work_fails_in_one_line_before_the_script_starts(folder, options, status, reason):
    (folder / "train.py").write_text("print('started')\n")
    (folder / "existing.jsonl").write_text("kept")
    done = run_command("run", *options, "train.py", cwd=folder)
    assert (done.status, done.out) == (status, "")
    assert len(done.err.splitlines()) == 1
    assert reason in done.err
    assert (folder / "existing.jsonl").read_text() == "kept"


def test_a_file_is_overwritten_or_continued_on_request(folder):
    for option, sessions in (("-q", 1), ("--append", 2), ("--overwrite", 1)):
        assert run_command("run", option, "-o", "a.jsonl", "train.py", cwd=folder).status == 0
        assert len(records(folder / "a.jsonl", "header")) == sessions
        assert len(runfile.read(folder / "a.jsonl").steps[0]) == sessions * 40  # None is replaced.


def test_a_culprit_is_named_at_the_end(folder):
    done = run_command("run", "-o", "a.jsonl", "train.py", "--nan-in-step=7", cwd=folder)
    (culprit, *_) = records(folder / "a.jsonl", "culprit")
    assert culprit["text"].startswith("first NaN: ")
    assert culprit["text"] in said(done)[-3]
    assert said(done)[-3].startswith("Problem: Weights contain NaN or Inf since step 7")


def test_guarded_steps_are_skipped_and_their_culprit_is_named(folder):
    done = run_command("run", "--guard", "skip", "-o", "a.jsonl", "train.py", "--nan-in-step=7", cwd=folder)
    assert [line["step"] for line in records(folder / "a.jsonl", "step") if line["skipped"]] == [7]
    assert any("skipped 1 (2.5%)" in line for line in said(done))
    assert any("first NaN: " in line for line in said(done)[-3:])


def test_options_reach_the_recorder(folder):
    run_command("run", "--no-trace", "--detail-every", "0", "-o", "a.jsonl", "train.py", "--nan-in-step=7", cwd=folder)
    assert not any("norms" in line for line in records(folder / "a.jsonl", "step"))
    assert not any(line.get("known") for line in records(folder / "a.jsonl", "culprit"))


def test_only_rank_0_prints_and_adds_the_verdict(folder):
    done = run_command("run", "-o", "a.jsonl", "train.py", cwd=folder, RANK="1", WORLD_SIZE="2")
    assert (done.status, done.out, done.err) == (0, "", "")
    (end,) = records(folder / "a.rank1.jsonl", "end")
    assert "verdict" not in end


def test_a_quiet_run_prints_nothing_but_adds_the_verdict(folder):
    done = run_command("run", "-q", "-o", "a.jsonl", "train.py", cwd=folder)
    assert (done.out, done.err) == ("", "")
    assert records(folder / "a.jsonl", "end")[-1]["severity"] == "ok"


def test_neither_torch_nor_numpy_is_imported_before_the_script(tmp_path):
    (tmp_path / "train.py").write_text("import sys\nprint([m for m in ('torch', 'numpy') if m in sys.modules])\n")
    command = [sys.executable, "-m", "gradilocks", "run", "-q", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"
