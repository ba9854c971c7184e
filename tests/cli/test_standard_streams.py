"""Standard output that cannot be written, packages that are missing, odd names: one line each."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.cli.cli_process import COMMAND, SOURCE, environment, run
from tests.runfile.run_files import training, write_run

WORDS = {
    "help": ["--help"],
    "version": ["--version"],
    "completion": ["--show-completion", "bash"],
    "run --help": ["run", "--help"],
    "report": ["report", "run.jsonl", "--force"],
    "report --json": ["report", "run.jsonl", "--json"],
    "watch": ["watch", "run.jsonl", "--once"],
    "compare": ["compare", "run.jsonl", "run.jsonl"],
    "export": ["export", "run.jsonl", "--to", "csv", "--force"],
    "demo": ["demo", "--steps", "1", "--arm", "fp32"],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_run(tmp_path / "run.jsonl", training(30))
    return tmp_path


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_full_device_is_one_line(folder, words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *words], cwd=folder, env=environment(), stdout=full,
            stderr=subprocess.PIPE, text=True, timeout=120,
        )  # fmt: skip
    said = "gradilocks: standard output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("words", WORDS.values(), ids=WORDS)
def test_a_closed_standard_output_is_one_line(folder, words):
    done = subprocess.run(
        [*COMMAND, *words], cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True,
        timeout=120, preexec_fn=lambda: os.close(1),
    )  # fmt: skip
    said = "gradilocks: standard output is closed; there is nowhere to print to.\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_a_script_may_run_without_standard_output(folder):
    (folder / "train.py").write_text("import sys\nsys.exit(3 if sys.stdout is None else 0)\n")
    done = subprocess.run(
        [*COMMAND, "run", "--quiet", "train.py"], cwd=folder, env=environment(),
        stderr=subprocess.PIPE, text=True, timeout=120, preexec_fn=lambda: os.close(1),
    )  # fmt: skip
    assert (done.returncode, "Traceback" in done.stderr) == (3, False)


def test_without_plotly_the_way_to_install_it_is_named(folder):
    (folder / "absent").mkdir()
    (folder / "absent" / "plotly.py").write_text("raise ImportError")
    both = os.pathsep.join([str(folder / "absent"), str(SOURCE)])
    done = run("report", "run.jsonl", cwd=folder, PYTHONPATH=both)
    assert done.returncode == 1
    assert done.stdout.startswith("Healthy. Nothing wrong in 30 steps.\n"), "without a page, too"
    assert done.stderr == "gradilocks: plotly is not installed: pip install plotly\n"
    assert not list(folder.glob("*.html")) + list(folder.glob(".*.part"))


@pytest.mark.parametrize("command", ["report", "watch", "compare", "export", "demo", "run", ""])
def test_a_short_h_is_help_too(command):
    words = command.split()
    short, long = run(*words, "-h"), run(*words, "--help")
    assert (short.returncode, short.stdout) == (0, long.stdout)
    assert "-h, --help" in short.stdout


@pytest.mark.parametrize("command", ["report", "watch", "compare", "export"])
def test_a_run_file_is_called_the_same_everywhere(command):
    assert "RUN.jsonl" in run(command, "--help").stdout


@pytest.mark.parametrize("words", [["report"], ["watch", "--once"], ["export", "--to", "csv"]])
def test_a_newline_in_a_name_stays_in_its_line(words, tmp_path):
    done = run(*words, tmp_path / "a\nb.jsonl")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "a\\nb.jsonl does not exist" in done.stderr


def test_what_was_written_to_a_name_with_a_newline_is_one_line(tmp_path):
    path = write_run(tmp_path / "a\nb.jsonl", training(30, detail_every=0))
    assert run("export", path, "--to", "csv").stdout.count("\n") == 1
    assert run("report", path).stdout.splitlines()[-1].endswith("a\\nb.html")
