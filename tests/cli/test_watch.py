"""``gradilocks watch`` in pipes and on terminals, over finished, growing and missing files."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gradilocks.cli.watch_view import Watched, plain_skips
from gradilocks.runfile import End, Logged, Step, end_line, log_line, process_here, step_line
from tests.cli.cli_process import OnATerminal, run, start
from tests.runfile.run_files import (
    END,
    FIRST,
    HEADER,
    LATER,
    NAMES,
    SECOND,
    STEP,
    lines_of,
    plain_step,
    skipped_step,
    training,
    write_run,
)

FINISHED = End(20.0, "finished", 0, None)
ESCAPE = "\x1b"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.jsonl"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_a_long_name_keeps_the_number_of_its_block(path):
    name = "model.language_model.model.layers.27.self_attn.q_proj.weight"
    write_run(path, [skipped_step(1, name, finite_gradients=5)])
    watched = Watched(path)
    watched.poll()
    (line,) = plain_skips(watched)
    assert line == "step 1 skipped: Inf in m.l.model.layers.27.self_attn.q_proj.weight; scale 2^10"


# --- in a pipe -----------------------------------------------------------------------------------


def test_a_finished_file_in_a_pipe_is_its_skips_its_last_step_and_its_end(path):
    write_run(path, training(250), end=FINISHED)
    done = run("watch", path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == f"{path}: train.py --lr 3e-4"
    assert lines[1] == "step 100 skipped: Inf in 2 gradients; scale 2^16"
    assert lines[2] == "step 200 skipped: Inf in 2 gradients; scale 2^15"
    assert re.fullmatch(
        r"step 250  loss \S+  norm \S+ of 1  scale 2\^14  64 steps/s  skipped 2  clipped \d+%",
        lines[3],
    )
    assert lines[4:] == ["finished after 0:00:20"]
    assert done.stdout.isascii()


def test_once_shows_a_run_that_goes_on_and_leaves(path):
    write_run(path, training(50))
    done = run("watch", path, "--once")
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("step 50  loss ")


def test_once_in_a_pipe_says_that_a_run_is_silent(path):
    write_run(path, training(20))
    long_ago = time.time() - 3700
    os.utime(path, (long_ago, long_ago))
    lines = run("watch", path, "--once").stdout.splitlines()
    assert lines[-2].startswith("step 20  loss ")
    assert re.fullmatch(r"nothing new for 1:01:\d\d: slow, waiting or killed", lines[-1])


def test_once_in_a_pipe_says_how_a_run_has_ended(path):
    write_run(path, training(20), end=END)
    os.utime(path, (0, 0))
    lines = run("watch", path, "--once").stdout.splitlines()
    assert lines[-1] == "ended with ValueError: no after 0:00:09"
    write_run(path, end=FINISHED)
    assert run("watch", path, "--once").stdout.splitlines()[-1] == "finished after 0:00:20"


def test_a_growing_file_yields_lines_as_they_come_and_ends_with_the_run(path):
    write_run(path, map(plain_step, range(1, 4)))
    with start("watch", path, "--every", "0.05") as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(str(path))
        assert process.stdout.readline().startswith("step 3  loss 1.333")
        half = step_line(skipped_step(4, *NAMES))
        append(path, half[:30])
        time.sleep(0.2)
        append(path, half[30:])
        assert process.stdout.readline() == ("step 4 skipped: Inf in 2 gradients; scale 2^10\n")
        assert process.stdout.readline().startswith("step 4  loss 1  norm 0.5 of 1")
        append(path, end_line(END))
        rest, complaint = process.communicate(timeout=60)
    assert (rest, complaint) == ("ended with ValueError: no after 0:00:09\n", "")
    assert process.returncode == 0


def test_a_file_written_by_a_real_process_is_followed_to_its_end(path, tmp_path):
    text = tmp_path / "text"
    text.write_text(lines_of(training(400), end=FINISHED))
    writer = (
        "import sys, time\n"
        "with open(sys.argv[2], 'wb', buffering=0) as out:\n"
        "    for line in open(sys.argv[1], 'rb'):\n"
        "        out.write(line[:40]); out.write(line[40:]); time.sleep(0.002)\n"
    )
    with (
        start("watch", path, "--every", "0.05") as process,
        subprocess.Popen([sys.executable, "-c", writer, str(text), str(path)]),
    ):
        printed, complaint = process.communicate(timeout=120)
    lines = printed.splitlines()
    assert [line for line in lines if "skipped:" in line] == [
        f"step {n} skipped: Inf in 2 gradients; scale 2^{e}"
        for n, e in ((100, 16), (200, 15), (300, 14), (400, 13))
    ]
    assert lines[-1] == "finished after 0:00:20"
    assert complaint == "" or complaint.startswith("Waiting for")


def test_several_optimizers_have_a_line_each(path):
    write_run(path, [plain_step(1), plain_step(1, optimizer=1), STEP])
    lines = run("watch", path, "--once").stdout.splitlines()
    assert lines[1] == "step 7 of optimizer 1 skipped: NaN and Inf in scale; scale 2^16"
    assert lines[2].startswith("step 1 of optimizer 0  loss 4")
    assert lines[3].startswith("step 7 of optimizer 1  loss 2.25")


def test_a_file_begun_again_is_shown_anew(path):
    write_run(path, map(skipped_step, range(1, 6)))
    with start("watch", path, "--every", "0.05") as process:
        assert process.stdout is not None
        while "skipped 5" not in process.stdout.readline():
            pass
        write_run(path, [plain_step(1)], header=LATER, end=FINISHED)
        rest, _ = process.communicate(timeout=60)
    assert rest.splitlines()[0].endswith("skipped 0  clipped 0%")


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_in_a_pipe_is_a_quiet_end(path):
    write_run(path, [plain_step(1)])
    with start("watch", path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, complaint = process.communicate(timeout=60)
    assert (rest, complaint, process.returncode) == ("", "", 0)


def test_a_reader_that_goes_away_leaves_no_traceback(path):
    write_run(path, training(30_000, detail_every=0), end=FINISHED)
    with start("watch", path) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 1


def turned_nan(since: int, steps: int = 100) -> list[Step]:
    bad = {"loss": None, "norm": None, "nan": 3}
    return [plain_step(n, **(bad if n >= since else {})) for n in range(1, steps + 1)]


@pytest.mark.parametrize("since", [1, 61])
def test_a_run_that_turned_nan_says_since_when(path, since):
    write_run(path, turned_nan(since), end=FINISHED)
    line = run("watch", path).stdout.splitlines()[-2]
    assert f"loss NaN since step {since}  norm NaN since step {since} of 1  " in line
    assert line.endswith(f"taken with NaN or Inf {101 - since}")
    assert run("watch", path).stdout.splitlines()[-1] == (
        f"finished after 0:00:20, in NaN or Inf: the loss is NaN or Inf since step {since} of 100, "
        f"and the weights are spoilt since step {since} at the latest; forward or loss, module "
        "unknown"
    )


def test_one_overflow_at_the_end_is_a_skip_and_no_more(path):
    write_run(path, [plain_step(1), skipped_step(2, "a")])
    line = run("watch", path, "--once").stdout.splitlines()[-1]
    assert "norm 0.5 of 1" in line
    assert "NaN" not in line


def test_a_loss_that_nobody_knew_is_not_called_nan(path):
    steps = [plain_step(n, loss=None) for n in range(1, 5)]
    write_run(path, [*steps, *(plain_step(n, loss=None, norm=None, nan=1) for n in range(5, 9))])
    assert "loss -  norm NaN since step 5" in run("watch", path, "--once").stdout


# --- files that are not there, or are something else ---------------------------------------------


def test_a_file_that_is_not_there_yet_is_waited_for(path):
    with start("watch", path, "--every", "0.05") as process:
        assert process.stderr is not None
        told = process.stderr.readline()
        assert told == f"Waiting for {path} to be there. Ctrl-C stops waiting.\n"
        write_run(path, [plain_step(1)], end=FINISHED)
        printed, complaint = process.communicate(timeout=60)
    assert printed.splitlines()[-1] == "finished after 0:00:20"
    assert (complaint, process.returncode) == ("", 0)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_ctrl_c_while_waiting_says_what_for(path):
    with start("watch", path) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=60)
    assert complaint == f"gradilocks: interrupted while waiting for {path}.\n"
    assert process.returncode == 130


@pytest.mark.parametrize("option", ["--once", "--no-wait"])
def test_a_missing_file_can_be_refused(path, option):
    done = run("watch", path, option)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"gradilocks: {path} does not exist. Run files are usually under runs/.\n"


@pytest.mark.parametrize("content", [b"\x89PNG\r\n\x1a\n", b"hello\n", b'{"a":1}\n'])
def test_a_file_that_is_no_run_file_is_one_line(path, content):
    path.write_bytes(content)
    done = run("watch", path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"gradilocks: {path} is no run file: ")
    assert done.stderr.count("\n") == 1


def test_a_path_that_can_never_be_a_file_is_not_waited_for(path, tmp_path):
    path.touch()
    for place, why in (
        (path / "run.jsonl", "cannot be read: Not a directory."),
        (tmp_path / ("x" * 300), "cannot be read: File name too long."),
        (tmp_path, f"is a folder; expected a run file, as {tmp_path / 'run.jsonl'}."),
    ):
        done = run("watch", place)
        assert (done.returncode, done.stderr) == (1, f"gradilocks: {place} {why}\n")


def test_once_over_an_empty_file_says_so(path):
    path.touch()
    done = run("watch", path, "--once")
    assert (done.returncode, "is empty" in done.stderr) == (1, True)


def test_once_over_half_a_header_says_so(path):
    path.write_text(lines_of()[:60])
    done = run("watch", path, "--once")
    assert (done.returncode, done.stdout) == (1, "")
    assert "holds only half a header line" in done.stderr


@pytest.mark.parametrize("every", ["0", "-1", "soon", "nan"])
def test_a_bad_interval_is_a_usage_error(path, every):
    done = run("watch", path, "--every", every)
    assert done.returncode == 2
    assert f"expected seconds from 0.05 to 3600, got '{every}'." in done.stderr


# --- on a terminal -------------------------------------------------------------------------------

terminal = pytest.mark.skipif(os.name == "nt", reason="Windows has no pseudo-terminals")


def on_a_terminal(path: Path, *options: str, **more: object) -> OnATerminal:
    return OnATerminal("watch", path.name, *options, cwd=path.parent, **more)


def screen(text: str) -> list[str]:
    """The last picture, without control codes."""
    redrawn = text.replace("\r", "").rpartition("\x1b[2K")[2]
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", redrawn).splitlines()
    begin = max(at for at, line in enumerate(lines) if line.startswith("run.jsonl"))
    return [line.rstrip() for line in lines[begin:]]


@terminal
def test_a_terminal_shows_a_picture_that_moves_until_the_run_ends(path):
    write_run(path, training(250))
    shown = on_a_terminal(path, "--every", "0.05")
    shown.wait_for("step 250")
    append(path, step_line(plain_step(251)) + end_line(FINISHED))
    assert shown.close() == 0
    lines = screen(shown.seen)
    assert lines[1].startswith("step 251  0:00:20  ")
    assert lines[1].endswith("finished")
    assert lines[3].startswith("loss    0.01594")
    assert "least 0.01594 at step 251" in lines[3]
    assert "limit 1, clipped" in lines[4]
    assert "2^10 to 2^16" in lines[5]
    assert lines[7] == "skipped 2          0.80% of the steps: nonfinite 2"
    assert lines[9:12] == [
        "last skips",
        "  step 200  Inf in 2 gradients; scale 2^15",
        "  step 100  Inf in 2 gradients; scale 2^16",
    ]


@terminal
@pytest.mark.parametrize(("columns", "lines"), [(30, 10), (50, 24), (200, 50)])
def test_the_picture_keeps_inside_the_terminal(path, columns, lines):
    write_run(path, training(1000), end=FINISHED)
    shown = on_a_terminal(path, columns=columns, lines=lines)
    assert shown.close() == 0
    drawn = screen(shown.seen)
    assert max(map(len, drawn)) <= columns
    assert len(drawn) <= lines + 1
    assert any("▁" in line or "█" in line for line in drawn)


@terminal
@pytest.mark.parametrize("columns", [40, 60, 100])
def test_nan_is_in_sight_at_any_width(path, columns):
    write_run(path, turned_nan(61), end=FINISHED)
    shown = on_a_terminal(path, columns=columns)
    assert shown.close() == 0
    lines = screen(shown.seen)
    for row in (
        "loss    NaN since step 61",
        "norm    NaN since step 61",
        "spoilt  40         taken",
    ):
        assert [line for line in lines if line.startswith(row)], row
    assert [line for line in lines if "finished, in NaN or Inf" in line]
    assert max(map(len, lines)) <= columns


@terminal
def test_a_number_that_stays_the_same_is_a_flat_line(path):
    steps = [plain_step(n, loss=0.1, norm=0.3, lr=0.1 + 1e-9 * (n % 3)) for n in range(1, 2000)]
    write_run(path, steps, end=FINISHED)
    shown = on_a_terminal(path)
    assert shown.close() == 0
    rows = [line for line in screen(shown.seen) if line.startswith(("loss", "norm", "lr"))]
    assert len(rows) == 3
    for row in rows:
        assert {c for c in row if c in "▁▂▃▄▅▆▇█"} == {"▁"}


@terminal
def test_ctrl_c_on_a_terminal_leaves_the_picture_and_says_that_the_run_is_alone(path):
    write_run(path, training(50))
    shown = on_a_terminal(path)
    shown.wait_for("step 50")
    shown.press_ctrl_c()
    assert shown.close() == 0
    assert screen(shown.seen)[-1] == "No longer watching; the run was left alone."
    assert "Traceback" not in shown.seen
    assert "\x1b[?25h" in shown.seen  # the cursor is back


@terminal
def test_once_on_a_terminal_draws_one_picture(path):
    write_run(path, training(50))
    shown = on_a_terminal(path, "--once")
    assert shown.close() == 0
    assert shown.seen.count("train.py") == 1


@terminal
def test_control_codes_in_names_do_not_reach_the_terminal(path):
    evil = "w\x1b]0;title\x07\x1b[2Jx"
    header = HEADER.__class__(**{**HEADER.__dict__, "command": ("train.py", evil)})
    info = FIRST.__class__(0, "AdamW", (evil,), (1,), ("float32",))
    write_run(path, [skipped_step(1, evil)], header=header, optimizers=[info, SECOND], end=FINISHED)
    shown = on_a_terminal(path)
    assert shown.close() == 0
    assert "\x1b]0;" not in shown.seen
    assert "w?]0;title??[2Jx" in shown.seen
    assert ESCAPE not in run("watch", path).stdout


@terminal
@pytest.mark.parametrize("columns", [60, 100])
def test_a_file_that_has_been_silent_for_long_says_so(path, columns):
    write_run(path, training(20))
    long_ago = time.time() - 3700
    os.utime(path, (long_ago, long_ago))
    shown = on_a_terminal(path, columns=columns)
    shown.wait_for("nothing new for 1:01:")
    shown.wait_for("slow, waiting or killed")
    shown.press_ctrl_c()
    assert shown.close() == 0


@terminal
def test_a_picture_is_drawn_without_unicode_where_the_terminal_has_none(path):
    write_run(path, [*training(50), skipped_step(51, "gewöhnlich")], end=FINISHED)
    shown = on_a_terminal(path, columns=50, PYTHONIOENCODING="ascii")
    assert shown.close() == 0
    assert shown.seen.isascii()
    assert "gew\\xf6hnlich" in shown.seen


# --- a run that was killed, and numbers of the script's own --------------------------------------

GONE = {**(process_here() or {}), "began": 1}
"""A process with the number of one that runs, which is another one."""


@pytest.mark.skipif(process_here() is None, reason="the system has no /proc")
@pytest.mark.parametrize("steps", [0, 20])
def test_once_in_a_pipe_says_that_a_run_was_killed(path, steps):
    write_run(path, training(steps), header=replace(HEADER, process=GONE))
    lines = run("watch", path, "--once").stdout.splitlines()
    assert lines[-1] == "killed: its process is gone, and it has written no end"
    write_run(path, training(steps), header=replace(HEADER, process=process_here()))
    lines = run("watch", path, "--once").stdout.splitlines()
    assert not lines[-1].startswith("killed")


@pytest.mark.skipif(process_here() is None, reason="the system has no /proc")
def test_watching_ends_with_a_run_that_was_killed_in_a_pipe_and_on_a_terminal(path, tmp_path):
    bad = {"loss": None, "loss_nonfinite": True, "norm": None, "nan": 2}
    steps = [*training(20), *(plain_step(n, **bad) for n in range(21, 31))]
    write_run(path, steps, header=replace(HEADER, process=GONE))
    done = run("watch", path)
    assert done.returncode == 0
    assert "killed: its process is gone" in done.stdout
    assert "in NaN or Inf: the loss is NaN or Inf since step 21" in done.stdout
    screen = OnATerminal("watch", path, cwd=tmp_path, columns=100)
    assert screen.close() == 0
    assert "killed: its process is gone, and it has written no end" in screen.seen


@pytest.mark.skipif(process_here() is None, reason="the system has no /proc")
def test_a_killed_run_that_was_resumed_goes_on(path):
    text = lines_of(training(5), header=replace(HEADER, process=GONE))
    resumed = lines_of([plain_step(6)], header=replace(LATER, process=process_here()))
    path.write_text(text + resumed)
    lines = run("watch", path, "--once").stdout.splitlines()
    assert lines[-1].startswith("step 6 ")


def test_numbers_of_the_scripts_own_are_lines_in_a_pipe_and_rows_on_a_terminal(path, tmp_path):
    write_run(path, training(50))
    append(path, log_line(Logged(50, 1.0, {"val_loss": 0.25, "accuracy": None})))
    append(path, log_line(Logged(60, 1.0, {"val_loss": 0.125, "x" * 40: 3.0})))
    append(path, end_line(FINISHED))
    lines = run("watch", path).stdout.splitlines()
    assert "step 50 logged: val_loss 0.25, accuracy NaN or Inf" in lines
    screen = OnATerminal("watch", path, "--once", cwd=tmp_path, columns=100)
    assert screen.close() == 0
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen.seen)
    assert re.search(r"^val_loss +0\.125 .*at step 60", shown, flags=re.MULTILINE)
    assert re.search(r"^accuracy +NaN or Inf ", shown, flags=re.MULTILINE)
    assert re.search(r"^x{23}… +3 ", shown, flags=re.MULTILINE)


def test_a_damaged_line_is_said_and_the_run_is_shown(path, tmp_path):
    text = lines_of(training(20), end=FINISHED).splitlines(keepends=True)
    path.write_text("".join([*text[:10], "wreck\n", *text[10:]]))
    done = run("watch", path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "finished after 0:00:20")
    assert "line 11 is damaged and was left out (not JSON)" in done.stderr
    screen = OnATerminal("watch", path, "--once", cwd=tmp_path, columns=100)
    assert screen.close() == 0
    assert "line 11 is damaged and was left out" in screen.seen


@pytest.mark.parametrize(("scale", "words"), [(1.0, "scale none"), (1024.0, "scale 2^10")])
def test_a_run_without_a_scale_is_said_to_have_none(path, scale, words):
    write_run(path, [step._replace(scale=scale) for step in training(20)])
    assert words in run("watch", path, "--once").stdout
