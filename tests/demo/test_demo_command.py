"""``gradilocks demo`` as a user meets it: a fresh process, what it prints, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

import gradilocks
from tests.cli.cli_process import COMMAND, SOURCE, OnATerminal, environment, run, start, wait_until

ESCAPE = "\x1b"
SHORT = ["--steps", "2", "--arm", "fp32"]


def left(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def all_arms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with three steps of every arm, and what was printed meanwhile."""
    folder = tmp_path_factory.mktemp("demo")
    done = run("demo", "--steps", "3", "-o", folder / "runs", FORCE_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "runs", done.stdout


def test_every_arm_leaves_its_run_file_and_its_page(all_arms: tuple[Path, str]) -> None:
    folder, _ = all_arms
    arms = ("fp32", "too-small", "just-right", "too-large", "clipped")
    files = {f"{arm}-0.jsonl" for arm in arms} | {f"{arm}.html" for arm in arms}
    assert left(folder) == files | {"report.html", "summary.json"}
    assert len(gradilocks.read_run(folder / "clipped-0.jsonl").steps) == 3
    assert gradilocks.read_run(folder / "fp32-0.jsonl").header.command[:2] == ("gradilocks", "demo")


def test_the_summary_says_what_the_run_files_say(all_arms: tuple[Path, str]) -> None:
    folder, _ = all_arms
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["seeds"] == [0]
    assert summary["setup"]["steps"] == 3
    assert summary["versions"]["gradilocks"] == gradilocks.__version__
    assert summary["versions"]["torch"]
    for result in summary["runs"]:
        steps = gradilocks.read_run(result["path"]).steps
        assert result["first_loss"] == pytest.approx(steps[0].loss)
        assert result["final_loss"] == pytest.approx(steps[-1].loss)
        assert result["scale_last"] == steps[-1].scale


def test_in_a_pipe_there_are_plain_lines_a_table_and_three_verdicts(
    all_arms: tuple[Path, str],
) -> None:
    folder, printed = all_arms
    assert ESCAPE not in printed
    assert "\r" not in printed
    assert printed.isascii()
    assert "clipped-0     step 3/3  loss " in printed
    lines = printed.splitlines()
    for arm in ("fp32", "too small", "just right", "too large", "too large, clipped"):
        assert any(line.startswith(f"{arm}  ") for line in lines), arm
    for bear in ("Too small: ", "Too large: ", "Just right: "):
        assert sum(line.startswith(bear) for line in lines) == 1
    assert f"the page     {folder / 'report.html'}" in lines
    assert max(map(len, lines)) < 200


def test_verdicts_are_those_of_the_summary(all_arms: tuple[Path, str]) -> None:
    folder, printed = all_arms
    for verdict in json.loads((folder / "summary.json").read_text())["verdicts"]:
        words = {True: "holds", False: "DOES NOT HOLD"}[verdict["holds"]]
        assert f"{verdict['name'].capitalize()}: {words}\n" in printed


@pytest.mark.long  # Trains twice; that a file of somebody else's is safe runs with the others.
def test_a_second_run_replaces_its_own_files_and_leaves_all_others(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "fp32-9.jsonl").write_text("mine too")
    assert run("demo", *SHORT, "--quiet", "--seed", "4", "-o", tmp_path).returncode == 0
    done = run("demo", "--steps", "1", "--arm", "fp32", "--quiet", "--seed", "5", "-o", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert left(tmp_path) == {
        "notes.txt", "fp32-9.jsonl", "fp32-5.jsonl", "fp32.html", "report.html", "summary.json",
    }  # fmt: skip
    assert (tmp_path / "fp32-9.jsonl").read_text() == "mine too"
    assert json.loads((tmp_path / "summary.json").read_text())["setup"]["steps"] == 1


def test_a_file_of_somebody_else_is_never_replaced(tmp_path: Path) -> None:
    for name in ("summary.json", "report.html", "fp32-0.jsonl", "fp32.html"):
        path = tmp_path / name
        path.write_text('{"mine": true}\n')
        for force in ((), ("--force",)):
            done = run("demo", *SHORT, *force, "-o", tmp_path)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == (
                f"gradilocks: {path} is there and was not written by the demo; choose another "
                "folder with -o.\n"
            )
            assert left(tmp_path) == {name}
        path.unlink()


def test_another_run_file_is_not_replaced_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "fp32-0.jsonl"
    gradilocks.Recorder(path, command=["mine"]).close()
    done = run("demo", *SHORT, "-o", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        f"gradilocks: {path} is there and was not written by the demo; choose another folder "
        "with -o, or replace it with --force.\n"
    )
    assert gradilocks.read_run(path).header.command == ("mine",)
    assert run("demo", *SHORT, "--quiet", "--force", "-o", tmp_path).returncode == 0
    assert gradilocks.read_run(path).header.command != ("mine",)


def test_a_folder_that_is_none_or_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "report.html").mkdir()
    for folder, why in (
        (tmp_path / "file", "is a file; expected a folder, as"),
        (tmp_path / "file" / "below", "cannot be written: Not a directory."),
        (Path("/proc/demo"), "cannot be written: "),
        (tmp_path, "report.html is there and was not written by the demo; choose another folder"),
    ):
        done = run("demo", *SHORT, "-o", folder)
        assert (done.returncode, done.stdout) == (1, "")
        assert why in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_read_only_folder_is_one_clear_line(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    if os.access(tmp_path, os.W_OK):
        tmp_path.chmod(0o755)
        pytest.skip("this user may write to read-only folders")
    done = run("demo", *SHORT, "-o", tmp_path)
    tmp_path.chmod(0o755)
    assert done.stderr == f"gradilocks: -o {tmp_path} cannot be written: Permission denied.\n"


def test_it_runs_without_numpy_and_without_a_word_about_it(tmp_path: Path) -> None:
    missing = tmp_path / "numpy"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ModuleNotFoundError('numpy')")
    path = os.pathsep.join([str(SOURCE), str(tmp_path)])
    done = run("demo", *SHORT, "-o", tmp_path / "runs", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_an_interrupt_says_what_was_done_and_leaves_the_run_files(tmp_path: Path) -> None:
    words = ("--steps", "100000", "--arm", "fp32", "--arm", "clipped", "-o", tmp_path)
    with start("demo", *words) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if " 1/100000 " in line:
                break
        for name in ("fp32-0.jsonl", "clipped-0.jsonl"):
            wait_until((tmp_path / name).exists, "the run file")
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert complaint.startswith("gradilocks: interrupted after 0:")
    assert " at step " in complaint
    assert complaint.endswith(
        f"The run files are in {tmp_path}; no page and no summary was written.\n"
    )
    assert complaint.count("\n") == 1
    assert left(tmp_path) == {"fp32-0.jsonl", "clipped-0.jsonl"}
    for name in left(tmp_path):
        end = gradilocks.read_run(tmp_path / name).end
        assert end is not None
        assert end.status == "interrupted"


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_an_interrupt_before_the_first_step_is_one_line(tmp_path: Path) -> None:
    with start("demo", "-o", tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=120)
    assert process.returncode == 130
    assert complaint == "gradilocks: interrupted before the first step.\n"


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe in another way")
def test_a_reader_that_goes_away_leaves_no_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--steps", "20", "--arm", "fp32", "-o", str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        complaint = process.stderr.read()
    assert complaint == ""
    assert process.returncode == 1


def test_on_a_terminal_there_is_a_bar_an_arm_and_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    words = ("--steps", "100000", "--arm", "fp32", "--arm", "too-small", "-o", "runs")
    terminal = OnATerminal("demo", *words, cwd=tmp_path)
    terminal.wait_for("skipped")
    terminal.wait_for("too small")
    wait_until(lambda: (tmp_path / "runs" / "fp32-0.jsonl").exists(), "the run file")
    wait_until(lambda: "2^0" in terminal.read() or "4." in terminal.read(), "a loss on the screen")
    terminal.press_ctrl_c()
    assert terminal.close() == 130
    assert "Traceback" not in terminal.seen
    assert "gradilocks: interrupted after " in terminal.seen.replace("\r\n", "")
