"""All commands but `run` and `demo`: what they print, and how they fail."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys

import pytest
import typer

import gradilocks
from gradilocks import __main__ as entry_point
from gradilocks import cli
from view.made_runs import end, header, optimizer, steps

COMMANDS = {"Record": ["run"], "View": ["report", "watch", "ls"], "Analyze": ["audit", "explain", "demo"]}


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with two runs, as the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gradilocks", "words"])
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / f"{name}.jsonl", label=f"train.py {name}")
    return tmp_path


def write_run(path, **fields):
    path.parent.mkdir(exist_ok=True)
    lines = [header(**fields), optimizer(), *steps(), end()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def call(capsys, *words):
    """Exit status, standard output and standard error of a command."""
    capsys.readouterr()
    status = cli.main(list(map(str, words)))
    return status, *capsys.readouterr()


@pytest.mark.parametrize("words", [[], ["--help"]])
def test_help_shows_seven_commands_in_three_groups(capsys, words):
    status, out, err = call(capsys, *words)
    assert (status, err) == (0, "")
    groups, group = {}, ""
    for line in out.splitlines():
        if title := re.match(r"╭─ (\w+) ─", line):
            group = title[1]
        elif command := re.match(r"│ ([a-z]+) ", line):
            groups.setdefault(group, []).append(command[1])
    assert groups == COMMANDS


@pytest.mark.parametrize("command", [name for names in COMMANDS.values() for name in names])
def test_every_command_has_help_and_at_most_eight_options(capsys, command):
    status, out, err = call(capsys, command, "--help")
    assert (status, err) == (0, "")
    (parameters,) = (c.params for name, c in typer.main.get_command(cli.app).commands.items() if name == command)
    options = [parameter for parameter in parameters if parameter.param_type_name == "option"]
    assert len(options) <= 8
    assert all(parameter.help for parameter in parameters)
    assert all(option.opts[0] in out for option in options)


def test_the_version_is_printed(capsys):
    assert call(capsys, "--version") == (0, f"gradilocks {gradilocks.__version__}\n", "")


@pytest.mark.parametrize(
    ("words", "status", "reason"),
    [
        (["reprot"], 2, "No such command 'reprot'. Did you mean 'report'? See gradilocks --help."),
        (["report"], 2, "Missing argument 'FILE...'"),
        (["report", "missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        (["report", "text.txt"], 1, "text.txt is not a run file: it has no header line."),
        (["report", "runs"], 1, "runs: Is a directory"),
        (["report", "runs/a.jsonl", "-o", "runs/b.jsonl"], 2, "runs/b.jsonl does not end with .html."),
        (["report", "runs/a.jsonl", "-o", "text.txt/page.html"], 1, "text.txt: File exists"),
        (["watch", "--once", "missing.jsonl"], 1, "missing.jsonl: No such file or directory"),
        (["ls", "missing"], 1, "missing is not a folder"),
        (["run"], 2, "Missing argument 'SCRIPT"),
        (["run", "missing.py"], 1, "script 'missing.py' does not exist."),
        (["explain", "many"], 2, "Invalid value for 'NUMBER'"),
        (["explain", "inf"], 2, "value must be"),
        (["explain", "1", "--scale", "0"], 2, "scale must be above 0"),
        (["audit", "text.txt:make"], 2, "Write FILE.py:FUNCTION."),
        (["audit", "make.py"], 2, "Write FILE.py:FUNCTION."),
        (["audit", "make.py:other"], 1, "make.py has no function 'other'."),
        (["audit", "make.py:make"], 1, "must return (model, loss_fn, batches), got NoneType."),
        (["demo", "-o", "text.txt"], 1, "text.txt: File exists"),
        (["demo", "--steps", "0"], 2, "Invalid value for '--steps'"),
    ],
)
def test_an_error_is_one_line_without_a_traceback(folder, capsys, words, status, reason):
    (folder / "text.txt").write_text("no run file\n")
    (folder / "make.py").write_text("import argparse\nargparse.ArgumentParser().parse_args()\ndef make(): pass\n")
    before = (folder / "runs" / "b.jsonl").read_text()
    found, _, err = call(capsys, *words)
    assert found == status
    assert err.startswith("gradilocks: ")
    assert err.count("\n") == 1
    assert reason in err
    assert (folder / "runs" / "b.jsonl").read_text() == before


def test_a_report_shows_the_verdict_and_the_command_for_a_page(folder, capsys):
    status, out, err = call(capsys, "report", "runs/a.jsonl")
    assert status == 0
    assert "Healthy: 300 steps, loss 4.01 → 1." in out
    assert err == "gradilocks: with plots: gradilocks report runs/a.jsonl -o page.html\n"


def test_a_report_on_several_runs_compares_them_on_one_page(folder, capsys):
    status, out, err = call(capsys, "report", "runs/a.jsonl", "runs/b.jsonl", "-o", "page.html")
    assert (status, err) == (0, "gradilocks: wrote page.html\n")
    assert "Comparison" in out
    page = (folder / "page.html").read_text()
    assert "train.py a" in page
    assert "train.py b" in page


def test_json_is_all_that_is_printed_to_standard_output(folder, capsys):
    status, out, err = call(capsys, "report", "--json", "runs/a.jsonl", "runs/b.jsonl")
    assert (status, err) == (0, "")
    assert [report["severity"] for report in json.loads(out)] == ["ok", "ok"]


def test_watch_once_prints_the_present_state(folder, capsys):
    status, out, _ = call(capsys, "watch", "--once", "runs/a.jsonl")
    assert status == 0
    assert "lowest loss" in out


def test_ls_lists_the_runs_of_a_folder(folder, capsys):
    for words in (["ls"], ["ls", folder / "runs"]):
        status, out, _ = call(capsys, *words)
        assert status == 0
        assert re.findall(r"^[ab]\.jsonl +train\.py [ab]", out, re.MULTILINE) == [
            "a.jsonl  train.py a",
            "b.jsonl  train.py b",
        ]


def test_names_in_files_cannot_control_the_terminal(folder, capsys):
    path = folder / "runs" / "\x1b[31mred\n.jsonl"
    write_run(path, label="\x1b]0;title\x07[bold]label")
    for words in (["report", path], ["ls"], ["watch", "--once", path], ["report", f"{path}x"]):
        _, out, err = call(capsys, *words)
        assert "\x1b" not in out + err
        assert "\x07" not in out + err
        assert "x1b" in out + err
    assert "[bold]label" in call(capsys, "report", path)[1]


def test_explain_takes_negative_numbers_and_a_scale(capsys):
    status, out, err = call(capsys, "explain", "-6e-8", "--scale", "32768")
    assert (status, err) == (0, "")
    assert "-6e-08 × 32768 = -0.001966" in out
    assert "1 of 11 significant bits" in out


AUDITED = """
import torch
from neighbor import width

def make():
    model = torch.nn.Linear(width, 1)
    return model, lambda model, batch: 1e-6 * model(batch).mean(), [torch.ones(8, width)] * 3
"""


def test_an_audit_recommends_a_format_and_is_listed_by_ls(folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "neighbor.py").write_text("width = 4\n")
    (folder / "make.py").write_text(AUDITED)
    status, out, err = call(capsys, "audit", "-o", "runs/audit.jsonl", "--batches", "2", "make.py:make")
    assert (status, err) == (0, "gradilocks: wrote runs/audit.jsonl\n")
    assert "fp16 holds the gradients with a loss scale of 2^" in out
    assert json.loads((folder / "runs" / "audit.jsonl").read_text())["batches"] == 2
    assert "make.py:make" in call(capsys, "ls")[1].partition("Audits")[2]


@pytest.mark.parametrize(
    ("package", "words"),
    [("plotly", ["report", "runs/a.jsonl", "-o", "page.html"]), ("jinja2", ["report", "runs/a.jsonl", "-o", "a.html"])],
)
def test_a_missing_package_is_named_with_the_command_that_installs_it(folder, capsys, monkeypatch, package, words):
    monkeypatch.setitem(sys.modules, package, None)
    status, _, err = call(capsys, *words)
    assert status == 1
    assert err == f"gradilocks: {package} is not installed: pip install 'gradilocks[report]'\n"


def test_without_typer_the_command_says_how_to_install_it(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "gradilocks.cli")
    assert entry_point.main() == 1
    assert capsys.readouterr().err == "gradilocks: typer is not installed: pip install 'gradilocks[cli]'\n"


def test_an_interrupt_ends_a_command_with_130(folder, capsys, monkeypatch):
    def interrupt(folder):
        raise KeyboardInterrupt

    monkeypatch.setattr("gradilocks.view.ls.list_runs", interrupt)
    assert call(capsys, "ls") == (130, "", "")


def test_a_defect_of_this_package_shows_its_traceback(folder, monkeypatch):
    monkeypatch.setattr("gradilocks.view.ls.list_runs", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["ls"])


def test_characters_that_standard_output_does_not_have_are_escaped(folder, monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    assert cli.main(["report", "runs/a.jsonl"]) == 0
    stream.flush()
    assert b"loss 4.01 \\u2192 1." in stream.buffer.getvalue()


def test_python_dash_m_and_a_reader_that_goes_away(folder):
    command = [sys.executable, "-m", "gradilocks", "report", "--json", *["runs/a.jsonl"] * 50]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
