"""Where `report` and `export` write: through links, onto files only, and never to "-"."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gradilocks.errors import GradilocksError
from gradilocks.report.destination import settled
from tests.cli.cli_process import run
from tests.runfile.run_files import training, write_run

COMMANDS = {"report": ("report",), "csv": ("export", "--to", "csv")}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run.jsonl", training(30, detail_every=0))


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize("force", [(), ("--force",)], ids=["plain", "force"])
def test_a_pipe_stays_a_pipe(path, tmp_path, words, force):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for place in (pipe, link):
        done = run(*words, path, "-o", place, *force)
        assert (done.returncode, done.stdout) == (1, "")
        said = f"{place} is a pipe, not a file; give the path of a file with -o."
        assert done.stderr == f"gradilocks: {said}\n"
        assert pipe.is_fifo()
        assert link.is_symlink()


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_link_stays_a_link_and_its_target_is_written(path, tmp_path, words):
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "link"
    target.parent.mkdir()
    link.symlink_to(target)
    assert run(*words, path, "-o", link).returncode == 0  # there is no target yet
    assert link.is_symlink()
    assert target.stat().st_size > 100
    target.write_text("")
    assert run(*words, path, "-o", link).returncode == 1
    assert target.read_text() == ""
    assert run(*words, path, "-o", link, "--force").returncode == 0
    assert link.is_symlink()
    assert target.stat().st_size > 100
    target.write_text("mine")
    assert run(*words, path, "-o", link, "--force").returncode == 1
    assert target.read_text() == "mine"


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_a_link_to_the_run_file_is_the_run_file(path, tmp_path, words):
    before = path.read_bytes()
    (tmp_path / "link").symlink_to(path)
    done = run(*words, path, "-o", tmp_path / "link", "--force")
    assert done.returncode == 1
    assert "is the run file itself" in done.stderr
    assert path.read_bytes() == before


@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_standard_output_is_no_place(path, tmp_path, words):
    done = run(*words, path, "-o", "-", "--force", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("gradilocks: -o - would be standard output; ")
    assert done.stderr.count("\n") == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.jsonl"]


def test_a_link_to_itself_is_one_clear_line(tmp_path):
    (tmp_path / "link").symlink_to("link")
    with pytest.raises(GradilocksError, match=r"link cannot be written: "):
        settled(tmp_path / "link")
