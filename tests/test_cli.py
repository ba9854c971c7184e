"""The command line, as a user meets it: a fresh process, its output and its exit status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gradilocks
from gradilocks.cli.terminal import held_interrupts

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
    assert re.search(r"^  demo +Run the Goldilocks experiment", done.stdout, re.MULTILINE)
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


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--steps", "0"], "'--steps': expected a whole number of at least 1, got '0'."),
        (["--steps", "many"], "'--steps': expected a whole number of at least 1, got 'many'."),
        (["--seed", "-1"], "'--seed': expected a whole number from 0 to"),
        (["--arm", "tiny"], "'--arm': expected fp32, too-small, just-right, too-large or clipped,"),
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


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own SIGINT handler for the test, the former one after it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_an_interrupt_is_held_no_longer_than_the_block() -> None:
    with held_interrupts():
        pass
    reached = []

    def interrupted() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
        reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_a_second_interrupt_is_not_held() -> None:
    reached = []

    def interrupted_twice() -> None:
        with held_interrupts():
            signal.raise_signal(signal.SIGINT)
            reached.append(1)
            signal.raise_signal(signal.SIGINT)
            reached.append(2)

    with pytest.raises(KeyboardInterrupt):
        interrupted_twice()
    assert reached == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_an_ignored_interrupt_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with held_interrupts():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        signal.raise_signal(signal.SIGINT)
