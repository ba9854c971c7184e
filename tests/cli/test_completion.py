"""Shell completion, and the help of every command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gradilocks.cli.app import app
from gradilocks.cli.options import complete_run_file
from tests.cli.cli_process import COMMAND, environment, run
from tests.runfile.run_files import write_run

COMMANDS = [
    command.name or command.callback.__name__.replace("_", "-")
    for command in app.registered_commands
    if command.callback is not None
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_named_shell_is_printed(shell):
    done = run("--show-completion", shell)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"_GRADILOCKS_COMPLETE=complete_{shell}" in done.stdout


def test_the_shell_around_is_found():
    line = f"'{sys.executable}' -m gradilocks --show-completion; true"
    done = subprocess.run(
        ["bash", "-c", line], env=environment(), capture_output=True, text=True, timeout=60
    )
    assert "complete -o default -F _gradilocks_completion gradilocks" in done.stdout


def test_where_there_is_no_shell_the_way_out_is_named(tmp_path):
    # A process whose parents are no shells: what looks for one sees this file instead of /proc.
    (tmp_path / "shellingham.py").write_text(
        "class ShellDetectionFailure(Exception): pass\n"
        "def detect_shell(): raise ShellDetectionFailure\n"
    )
    both = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    done = run("--show-completion", PYTHONPATH=both)
    assert (done.returncode, done.stdout) == (2, "")
    assert "found no shell around this process. Name the shell: gradilocks" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_shell_without_a_script_is_a_usage_error():
    done = run("--install-completion", "tcsh")
    assert done.returncode == 2
    assert "expected bash, zsh, fish, powershell or pwsh, got 'tcsh'." in done.stderr


def test_completion_is_installed_where_bash_reads_it(tmp_path):
    done = run("--install-completion", "bash", HOME=str(tmp_path))
    script = tmp_path / ".bash_completions" / "gradilocks.sh"
    assert done.stdout == (
        f"Completion for bash is installed in {script}. It works in the next shell.\n"
    )
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_a_home_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").touch()
    done = run("--install-completion", "fish", HOME=str(tmp_path / "file"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gradilocks: completion cannot be installed: ")
    assert done.stderr.count("\n") == 1


def test_bash_completes_commands_and_complete_run_file(tmp_path):
    (tmp_path / "runs").mkdir()
    for name in ("a one.jsonl", "b.jsonl"):
        write_run(tmp_path / "runs" / name)
    (tmp_path / "runs" / "notes.txt").touch()
    program = tmp_path / "gradilocks"
    program.write_text(f'#!/bin/sh\nexec "{COMMAND[0]}" -m gradilocks "$@"\n')
    program.chmod(0o755)
    line = (
        'eval "$(gradilocks --show-completion bash)"\n'
        'ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _gradilocks_completion gradilocks;'
        ' printf "%s|" "${COMPREPLY[@]}"; echo; }\n'
        "ask gradilocks wat; ask gradilocks watch ru; ask gradilocks export runs/b; "
        "ask gradilocks report runs/b; ask gradilocks export runs/b.jsonl --to pa"
    )
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=environment(PATH=f"{tmp_path}:{os.environ['PATH']}"),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.splitlines() == [
        "watch|",
        "runs/a one.jsonl|runs/b.jsonl|",
        "runs/b.jsonl|",
        "runs/b.jsonl|",
        "parquet|",
    ]


def test_run_files_and_folders_are_offered_and_a_sole_folder_is_entered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/deep/x.jsonl", "runs/deep/y.jsonl", "r.jsonl", ".hidden.jsonl", "r.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert complete_run_file("") == ["r.jsonl", "runs/"]
    assert complete_run_file("ru") == ["runs/deep/x.jsonl", "runs/deep/y.jsonl"]
    assert complete_run_file("runs/deep/y") == ["runs/deep/y.jsonl"]
    assert complete_run_file(".h") == [".hidden.jsonl"]
    assert complete_run_file("absent/") == []
    assert complete_run_file(str(tmp_path / "r.j")) == [str(tmp_path / "r.jsonl")]


def test_the_help_lists_every_command_with_one_whole_line():
    done = run("--help")
    lines = done.stdout.splitlines()
    listed = lines[lines.index("Commands:") + 1 :]
    assert [line.split()[0] for line in listed] == COMMANDS
    for line in listed:
        assert line.endswith("."), line
        assert not line.endswith("..."), line


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_fits_80_columns_and_has_examples(command):
    done = run(command, "--help", COLUMNS="80")
    assert done.returncode == 0
    assert "Examples:\n" in done.stdout
    assert f"gradilocks {command}" in done.stdout.split("Examples:")[1]
    # An example may be as long as it takes; all else was wrapped.
    long = [line for line in done.stdout.splitlines() if len(line) > 80]
    assert all(line.strip().startswith("gradilocks ") for line in long)
    assert max(map(len, done.stdout.splitlines())) <= 90


@pytest.mark.parametrize("command", ["watch", "compare", "export"])
def test_commands_that_read_files_import_neither_torch_nor_plotly(command, tmp_path):
    path = write_run(tmp_path / "run.jsonl")
    arguments = {
        "watch": [path, "--once"],
        "compare": [path, path],
        "export": [path, "--to", "csv"],
    }[command]
    script = (
        "import sys; from gradilocks.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or bool({'torch', 'plotly', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, command, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
