"""The command line, as a user meets it: a fresh process, its output and its exit status."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradilocks
from gradilocks.cli.interrupts import HeldInterrupts

ESCAPE = "\x1b"
COMMAND = [sys.executable, "-m", "gradilocks"]
TIMEOUT = 120.0


def environment() -> dict[str, str]:
    """This process's, with this checkout's package first and nothing that forces colours."""
    source = str(Path(gradilocks.__file__).parent.parent)
    kept = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    return {**kept, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env={**environment(), **more},
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )


def test_help_lists_each_command_with_a_line() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert "  Train a small GPT in emulated fp16 under GradientControl." in done.stdout
    assert done.stderr == ""


def test_no_command_prints_the_help() -> None:
    assert run().stdout == run("--help").stdout


def test_version_is_that_of_the_package() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout) == (0, f"gradilocks {gradilocks.__version__}\n")


def test_help_and_version_do_not_wait_for_torch() -> None:
    script = (
        "import sys; from gradilocks.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    for arguments in (["--version"], ["demo", "--help"]):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def test_demo_quiet_prints_nothing_and_writes_the_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    done = run("demo", "--steps", "3", "--quiet", "--json", str(path), "--scale", "4096")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    summary = json.loads(path.read_text())
    assert summary["steps"] == 3
    assert summary["skipped"] == 0
    assert summary["scale_last"] == 4096.0
    assert summary["settings"]["scale"] == 4096.0


def test_demo_in_a_pipe_is_plain_lines_and_ends_with_the_table_and_what_to_do_next() -> None:
    done = run("demo", "--steps", "3", FORCE_COLOR="1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    assert "\r" not in done.stdout
    assert done.stdout.isascii()
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
    ]
    for row in ("steps", "skipped", "clipped", "scale", "loss"):
        assert any(line.startswith(f"  {row}  ") for line in lines), row
    assert "Next:" in lines
    assert any(line.endswith("gradilocks demo --help") for line in lines)


def test_demo_runs_without_numpy_and_without_a_word_about_it(tmp_path: Path) -> None:
    missing = tmp_path / "numpy"
    missing.mkdir()
    (missing / "__init__.py").write_text("raise ModuleNotFoundError('numpy')")
    path = os.pathsep.join([environment()["PYTHONPATH"], str(tmp_path)])
    done = run("demo", "--steps", "1", PYTHONPATH=path)
    assert (done.returncode, done.stderr) == (0, "")


def test_demo_names_the_culprits_of_skipped_steps() -> None:
    done = run("demo", "--steps", "2", "--scale", "1e30")
    assert done.returncode == 0, done.stderr
    assert "culprits" in done.stdout
    assert "head." in done.stdout


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "'--steps': expected a whole number of at least 1, got '0'."),
        (["--steps", "many"], "'--steps': expected a whole number of at least 1, got 'many'."),
        (["--batch-accumulation", "1.5"], "expected a whole number from 1 to 1048576, got '1.5'."),
        (["--scale", "huge"], "'--scale': expected dynamic, none or a number from"),
        (["--scale", "nan"], "got 'nan'."),
        (["--clip", "-1"], "'--clip': expected none or a number from"),
        (["--colour"], "No such option: --colour"),
        (["--seed"], "--seed"),
        (["now"], "now"),
    ],
)
def test_a_bad_option_is_one_clear_line_and_status_2(arguments: list[str], expected: str) -> None:
    done = run("demo", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert "--help'.\n" in done.stderr


def test_an_unknown_command_is_one_clear_line_and_status_2() -> None:
    done = run("dmeo")
    assert done.returncode == 2
    assert done.stderr.startswith("gradilocks: No such command 'dmeo'")
    assert done.stderr.count("\n") == 1


def test_a_json_path_that_cannot_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    taken = tmp_path / "taken.json"
    taken.write_text("keep me")
    for path, why in (
        (tmp_path / "absent" / "summary.json", "cannot be written: No such file or directory."),
        (tmp_path, "is a folder; give the path of a new file."),
        (taken, "is already there; give the path of a new file."),
    ):
        done = run("demo", "--json", str(path))
        assert done.returncode == 1
        assert done.stderr == f"gradilocks: --json {path} {why}\n"
        assert done.stdout == ""
    assert taken.read_text() == "keep me"


def restore_interrupts() -> None:
    """A test run in the background of a shell hands its children an ignored SIGINT."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_an_interrupt_says_what_was_done_and_exits_with_130(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with subprocess.Popen(
        [*COMMAND, "demo", "--steps", "1000000", "--json", str(path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_interrupts,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step "):
                break
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert complaint.startswith("gradilocks: interrupted after ")
    assert "of 1000000 steps: 0 skipped" in complaint
    assert complaint.endswith(f"{path} was not written.\n")
    assert complaint.count("\n") == 1
    assert not path.exists()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_an_interrupt_while_torch_is_imported_is_held_until_it_can_be_clean() -> None:
    with subprocess.Popen(
        [*COMMAND, "demo"],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=restore_interrupts,
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, complaint = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 130
    assert complaint.startswith("gradilocks: interrupted after ")
    assert complaint.count("\n") == 1


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own SIGINT handler for the test, the former one after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_an_interrupt_is_held_until_released() -> None:
    with HeldInterrupts() as interrupts:
        interrupts.release()
    with HeldInterrupts() as interrupts:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            interrupts.release()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        interrupts.release()


@pytest.mark.usefixtures("default_handler")
def test_an_interrupt_is_held_no_longer_than_the_block() -> None:
    block = HeldInterrupts()
    block.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        block.__exit__(None, None, None)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_a_second_interrupt_is_not_held() -> None:
    block = HeldInterrupts()
    block.__enter__()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    block.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


@pytest.mark.usefixtures("default_handler")
def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with HeldInterrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)


@pytest.mark.skipif(os.name == "nt", reason="Windows reports a closed pipe in another way")
def test_a_reader_that_goes_away_leaves_no_traceback() -> None:
    with subprocess.Popen(
        [*COMMAND, "demo", "--steps", "20"],
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
