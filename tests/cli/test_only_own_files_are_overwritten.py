"""Whatever `--force` says, only what Gradilocks wrote is overwritten: no script and no data."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import pytest

from gradilocks import Recorder, read_run
from gradilocks.cli import main
from gradilocks.errors import BadRunFile
from tests.cli.cli_process import run
from tests.runfile.run_files import training, write_run

SCRIPT = """import torch
param = torch.zeros(2, requires_grad=True)
optimizer = torch.optim.SGD([param], lr=0.1)
param.sum().backward()
optimizer.step()
"""
FOREIGN = {
    "train.py": SCRIPT.encode(),
    "blank_first.py": b"\n\n" + SCRIPT.encode(),
    "one_line.py": b"print(1)",
    "config.json": b'{\n  "lr": 0.1\n}\n',
    "table.jsonl": b'{"lr": 0.1}\n{"lr": 0.2}\n',
    "header.jsonl": b'{"kind":"header","of":"something else"}\n',
    "page.html": b"<!doctype html><title>mine</title>\n",
    "mine.csv": b"step,loss\n1,2\n",
    "model.pt": bytes(range(256)) * 40,
    "text.txt": b"\xef\xbb\xbfnotes\n",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "run.jsonl", training(12, detail_every=3))
    (tmp_path / "a.py").write_text(SCRIPT)
    for name, content in FOREIGN.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def refused(folder: Path, capsys: pytest.CaptureFixture[str]):
    """Runs a command that must fail and change nothing; what it says."""

    def command(*words: str) -> str:
        before = everything(folder)
        assert main(list(words)) in (1, 2), words
        shown = capsys.readouterr()
        if words[0] == "report":  # What happened is told, page or none.
            assert shown.out.startswith("Healthy.")
            assert "Report: " not in shown.out
        else:
            assert shown.out == ""
        assert everything(folder) == before, words
        assert shown.err.count("\n") == 1, shown.err
        return shown.err

    return command


@pytest.mark.parametrize("name", FOREIGN)
def test_no_command_overwrites_what_is_somebody_elses(folder, refused, name):
    for option in ("--force", "--append"):
        said = refused("run", option, "-o", name, "a.py")
        assert name in said
        assert "Only a run file is ever overwritten or gone on in: choose another name." in said
    assert "Only a run file" in refused("run", "-o", name, "a.py")
    said = refused("report", "run.jsonl", "--force", "-o", name)
    assert f"{name} is already there and is no report on these runs, nor another page" in said
    assert "so it is never overwritten" in said
    for to in ("csv", "parquet"):
        said = refused("export", "run.jsonl", "--to", to, "--force", "-o", name)
        assert f"{name} is already there and was not written by gradilocks export" in said
    assert name in refused("audit", "-o", name, "a.py")
    assert name in refused("audit", "--json", name, "a.py")
    assert name in refused("audit", "--html", name, "a.py")
    for exists in ("refuse", "append", "replace"):
        with pytest.raises(BadRunFile, match="Only a run file is ever overwritten or gone on in"):
            Recorder(folder / name, exists=exists)
    assert (folder / name).read_bytes() == FOREIGN[name]


def test_the_script_itself_is_safe_in_every_spelling(folder, refused):
    (folder / "sub").mkdir()
    os.symlink("train.py", folder / "link.jsonl")
    os.link(folder / "train.py", folder / "hard.jsonl")
    os.symlink(folder, folder / "sub" / "up")
    spellings = [
        "train.py", "./train.py", "sub/../train.py", str(folder / "train.py"), "sub/up/train.py",
        "link.jsonl", "hard.jsonl",
    ]  # fmt: skip
    for place in spellings:
        for option in ("--force", "--append"):
            said = refused("run", option, "-o", place, "train.py")
            assert "is no run file: it begins with 'import torch" in said
    for place in (".", "sub"):
        assert "folder" in refused("run", "--force", "-o", place, "train.py")


def test_the_files_of_other_ranks_are_looked_at_too(folder):
    (folder / "b.rank1.jsonl").write_text("mine\n")
    before = everything(folder)
    words = ("run", "--force", "--all-ranks", "-o", "b.jsonl", "a.py")
    done = run(*words, cwd=folder, RANK="1", WORLD_SIZE="2")
    assert done.returncode == 1
    assert "b.rank1.jsonl is no run file" in done.stderr
    assert everything(folder) == before


def test_what_appears_after_the_command_has_looked_is_safe_too(folder):
    script = "from pathlib import Path\nPath('new.jsonl').write_text('mine\\n')\n" + SCRIPT
    (folder / "writes.py").write_text(script)
    done = run("run", "--force", "-o", "new.jsonl", "writes.py", cwd=folder)
    assert "new.jsonl is no run file" in done.stderr
    assert (folder / "new.jsonl").read_text() == "mine\n"


def test_own_files_are_still_replaced(folder, capsys):
    whole = (folder / "run.jsonl").read_bytes()
    for content in (b"", whole, whole[:30]):  # A kill leaves half a header.
        (folder / "b.jsonl").write_bytes(content)
        Recorder(folder / "b.jsonl", exists="replace").close()
        assert read_run(folder / "b.jsonl").steps == []
    os.symlink("b.jsonl", folder / "to_run")
    done = run("run", "--force", "-o", "to_run", "a.py", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(read_run(folder / "b.jsonl").steps) == 1
    assert (folder / "to_run").is_symlink()
    for path in ("run.jsonl", "b.jsonl"):  # Another run's page, with --force alone.
        assert main(["report", path, "--force", "-o", "p.html"]) == 0
    assert main(["report", "run.jsonl", "-o", "p.html"]) == 1
    (folder / "empty.html").touch()
    assert main(["report", "run.jsonl", "--force", "-o", "empty.html"]) == 0
    for _ in range(2):
        assert main(["export", "run.jsonl", "--to", "csv", "--force", "-o", "out.csv"]) == 0
    with (folder / "out.csv").open() as file:
        assert len(list(csv.reader(file))) == 13


def test_an_export_leaves_the_event_files_of_others_alone(folder, refused):
    pytest.importorskip("tensorboard")
    theirs = folder / "logs" / "events.out.tfevents.1700000000.host.123.0"
    theirs.parent.mkdir()
    theirs.write_bytes(b"their numbers")
    words = ("export", "run.jsonl", "--to", "tensorboard", "--force", "-o", "logs")
    assert f"gradilocks did not write ({theirs.name})" in refused(*words)
    theirs.unlink()
    for _ in range(2):
        assert main(list(words)) == 0
    assert len(list((folder / "logs").iterdir())) == 1
