"""`gradilocks report`, as a user meets it: what it prints, writes, refuses, and how it exits."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradilocks
from gradilocks.cli import main
from tests.report.made_runs import NAMES, SKIPPED, header, made_run, write


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write(made_run(plant={100: {"norm": 50.0}}), tmp_path / "run.jsonl")


def test_it_prints_verdict_findings_and_where_the_page_is(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_file)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == (
        "Needs a look. 1 spike of the gradient norm. 1 warning in 300 steps, no problem."
    )
    assert "warning: 1 spike of the gradient norm" in lines
    assert lines[-1] == f"Report: {run_file.with_suffix('.html')}"
    assert err == ""
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in lines)
    assert run_file.with_suffix(".html").read_text(encoding="utf-8").startswith("<!doctype html>")


def test_json_is_the_same_for_programs_and_writes_no_page(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_file), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (one,) = found["runs"]
    assert (found["page"], one["verdict"]) == (None, "needs a look")
    assert one["findings"][0]["rule"] == "spikes"
    assert one["findings"][0]["step"] == 100
    assert not run_file.with_suffix(".html").exists()


def test_json_with_a_page_writes_both(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = run_file.with_name("page.html")
    assert main(["report", str(run_file), "--json", "-o", str(page)]) == 0
    assert json.loads(capsys.readouterr().out)["page"] == str(page)
    assert page.exists()


def test_several_runs_go_into_one_page(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write(made_run(header=header(started=7.0)), tmp_path / "other.jsonl")
    assert main(["report", str(run_file), str(other)]) == 0
    out = capsys.readouterr().out
    assert "run: Needs a look." in out
    assert "other: Healthy." in out
    assert (tmp_path / "report.html").exists()


def test_runs_of_one_name_are_told_apart_by_their_folders(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        files.append(str(write(made_run(), tmp_path / name / "run.jsonl")))
    assert main(["report", *files]) == 0
    out = capsys.readouterr().out
    assert "a/run: Healthy." in out
    assert "b/run: Healthy." in out


def test_its_own_page_on_the_same_run_is_replaced(run_file: Path) -> None:
    page = run_file.with_suffix(".html")
    assert main(["report", str(run_file)]) == 0
    before = page.read_text(encoding="utf-8")
    write(made_run(310), run_file)  # The run went on.
    assert main(["report", str(run_file)]) == 0
    assert page.read_text(encoding="utf-8") != before


@pytest.mark.parametrize("content", ['<meta name="generator" content="gradilocks demo">', ""])
def test_another_page_is_left_alone_without_force(
    run_file: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    page = run_file.with_suffix(".html")
    page.write_text(content)
    assert main(["report", str(run_file)]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "is already there and is no report on these runs" in err
    assert "--force" in err
    assert page.read_text() == content
    assert main(["report", str(run_file), "--force"]) == 0
    assert "<!doctype html>" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("words", [(), ("--json", "-o", "page.html")])
def test_a_file_system_that_is_read_only_keeps_the_page_and_not_the_findings(
    words: tuple[str, ...],
    run_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(run_file.parent)
    opened = Path.open

    def refuse(self: Path, *args: object, **kwargs: object) -> object:
        if self.suffix != ".part":
            return opened(self, *args, **kwargs)  # type: ignore[arg-type]
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    for method in ("open", "unlink"):
        monkeypatch.setattr(Path, method, refuse)
    assert main(["report", str(run_file), *words]) == 1
    shown = capsys.readouterr()
    assert shown.err.count("\n") == 1
    assert "cannot be written: Read-only file system." in shown.err
    if words:
        assert json.loads(shown.out)["page"] is None
        assert json.loads(shown.out)["runs"][0]["findings"]
    else:
        assert "spike" in shown.out.lower()
        assert "Report: " not in shown.out


def test_a_report_on_another_run_is_left_alone(run_file: Path, tmp_path: Path) -> None:
    other = write(made_run(header=header(started=7.0)), tmp_path / "other.jsonl")
    page = tmp_path / "page.html"
    assert main(["report", str(run_file), "-o", str(page)]) == 0
    assert main(["report", str(other), "-o", str(page)]) == 1


def test_the_run_file_itself_is_never_overwritten(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run_file.read_bytes()
    assert main(["report", str(run_file), "-o", str(run_file), "--force"]) == 1
    assert "is the run file itself" in capsys.readouterr().err
    assert run_file.read_bytes() == before


def test_a_run_file_named_twice_is_refused(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_file), str(run_file)]) == 1
    assert "is given twice" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_one_line(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(run_file), "-o", str(run_file.parent)]) == 1
    assert "is a folder" in capsys.readouterr().err
    assert main(["report", str(run_file), "-o", str(run_file.parent / "no" / "a.html")]) == 1
    err = capsys.readouterr().err
    assert "cannot be written: No such file or directory." in err
    assert err.count("\n") == 1


BAD = {
    "empty": b"",
    "binary": bytes(range(256)) * 64,
    "other json": b'{"a": 1}\n',
    "torn header": b'{"kind": "header", "gradil',
    "text": b"step,loss\n1,2\n",
}


@pytest.mark.parametrize("content", BAD.values(), ids=list(BAD))
def test_a_file_that_is_no_run_file_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_bytes(content)
    assert main(["report", str(path)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("gradilocks: ")
    assert "bad.jsonl" in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_number_of_the_wrong_kind_costs_its_line_and_is_said(
    run_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    text = run_file.read_text().replace('"scale":65536.0', '"scale":"big"', 1)
    run_file.write_text(text)
    assert main(["report", str(run_file)]) == 0
    captured = capfd.readouterr()
    assert "'scale' must be a number or null, got \"big\"" in captured.err
    assert captured.err.count("\n") == 1
    assert "The run file is damaged: 1 line left out" in captured.out


def test_a_torn_run_is_reported_on(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_file.read_bytes()
    run_file.write_bytes(whole[: len(whole) * 2 // 3])
    assert main(["report", str(run_file)]) == 0
    assert "The run file has no end" in capsys.readouterr().out


def test_a_run_file_of_a_header_alone_has_a_page(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_file.write_bytes(run_file.read_bytes().splitlines(keepends=True)[0])
    assert main(["report", str(run_file)]) == 0
    assert capsys.readouterr().out.startswith("No steps. ")
    assert "no steps" in run_file.with_suffix(".html").read_text(encoding="utf-8")


def test_a_missing_argument_and_a_useless_option_are_usage_errors(
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = tmp_path / "empty"  # Without a file, the latest run of the folder is meant.
    empty.mkdir()
    monkeypatch.chdir(empty)
    assert main(["report"]) == 2
    assert main(["report", str(run_file), "--json", "--open"]) == 2
    assert "--open needs a page" in capsys.readouterr().err


def test_names_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("[red]\x1b[2J\u202e", *NAMES)
    run = made_run(names=names, details={"zeros": {names[0]: 0.97}}, plant={9: SKIPPED})
    assert main(["report", str(write(run, tmp_path / "run.jsonl"))]) == 0
    out = capsys.readouterr().out
    assert "[red]\\x1b[2J\\u202e" in out
    assert "\x1b" not in out


def in_a_process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    source = str(Path(gradilocks.__file__).parent.parent)
    script = (
        "import sys; from gradilocks.cli import main; status = main(sys.argv[1:]);"
        "sys.exit(status or 'torch' in sys.modules)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "PYTHONPATH": source, **environment},
        capture_output=True,
        timeout=120,
        check=False,
    )


def test_a_report_does_not_wait_for_torch(run_file: Path) -> None:
    done = in_a_process("report", str(run_file))
    assert done.returncode == 0, done.stderr


def test_a_name_that_the_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    names = ("größe.weight", *NAMES)
    run = made_run(names=names, details={"zeros": {names[0]: 0.97}})
    path = write(run, tmp_path / "run.jsonl")
    done = in_a_process("report", str(path), PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr
    assert b"gr\\xf6\\xdfe.weight" in done.stdout


def test_open_hands_the_page_to_the_browser(run_file: Path, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {asked}\n')
    browser.chmod(0o755)
    done = in_a_process("report", str(run_file), "--open", BROWSER=f"{browser} %s")
    assert done.returncode == 0, done.stderr
    assert asked.read_text().strip() == run_file.with_suffix(".html").as_uri()


def test_no_browser_to_open_is_one_line_after_the_page_was_written(run_file: Path) -> None:
    done = in_a_process("report", str(run_file), "--open", BROWSER="/no/such %s", PATH="")
    assert done.returncode == 1
    assert b"no browser was found" in done.stderr
    assert run_file.with_suffix(".html").exists()


def test_a_terminal_sees_a_bar_while_it_waits(run_file: Path) -> None:
    pty = pytest.importorskip("pty", reason="a terminal of one's own needs a Unix system")
    ours, theirs = pty.openpty()
    source = str(Path(gradilocks.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-m", "gradilocks", "report", str(run_file)],
        env={**os.environ, "PYTHONPATH": source, "TERM": "xterm"},
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=120,
        check=True,
    )
    os.close(theirs)
    shown = b""
    while chunk := _read(ours):
        shown += chunk
    os.close(ours)
    assert b"drawing run.html" in shown
    assert b"\x1b" not in done.stdout


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # How Linux says that nobody writes any more.
        return b""
