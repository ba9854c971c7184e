"""What a header tells of where a run came from: the commit, the command, the configuration."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch

from gradilocks import GradientControl, Recorder, read_run
from gradilocks.git_state import git_state
from gradilocks.runfile import is_running, process_here
from tests.record.recorded import small_model


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@localhost", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path):
    """A repository with one commit of one file."""
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "trunk")
    (folder / "train.py").write_text("pass\n")
    git(folder, "add", "train.py")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_commit_branch_and_changes_of_a_repository_are_known(repository):
    commit = git(repository, "rev-parse", "HEAD")
    assert git_state(repository) == {"commit": commit, "branch": "trunk", "dirty": False}
    inner = repository / "package" / "deep"
    inner.mkdir(parents=True)
    (inner / "notes.txt").write_text("untracked files are no change\n")
    assert git_state(inner)["dirty"] is False
    (repository / "train.py").write_text("print()\n")
    assert git_state(inner) == {"commit": commit, "branch": "trunk", "dirty": True}


def test_packed_branches_worktrees_and_detached_heads_are_read(repository, tmp_path):
    commit = git(repository, "rev-parse", "HEAD")
    git(repository, "branch", "some/topic")
    git(repository, "pack-refs", "--all")
    assert git_state(repository)["commit"] == commit
    git(repository, "worktree", "add", "-q", str(tmp_path / "tree"), "some/topic")
    found = git_state(tmp_path / "tree")
    assert (found["commit"], found["branch"]) == (commit, "some/topic")
    git(repository, "checkout", "-q", "--detach")
    assert git_state(repository) == {"commit": commit, "branch": None, "dirty": False}


def test_without_git_the_commit_is_known_and_changes_are_not(repository, tmp_path, monkeypatch):
    commit = git(repository, "rev-parse", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(repository) == {"commit": commit, "branch": "trunk", "dirty": None}


def test_a_git_that_does_not_answer_is_not_waited_for(repository, tmp_path, monkeypatch):
    slow = tmp_path / "git"
    slow.write_text(f"#!{sys.executable}\nimport time; time.sleep(600)\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("gradilocks.git_state.PATIENCE", 0.05)
    assert git_state(repository)["dirty"] is None


def test_outside_of_a_repository_nothing_is_known_and_nothing_is_started(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *a, **k: pytest.fail("started a process"))
    assert git_state(tmp_path) is None
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    assert git_state(tmp_path) is None
    (tmp_path / ".git").write_bytes(b"\xff\xfe\0")
    assert git_state(tmp_path) is None


def test_a_repository_without_a_commit_has_none(tmp_path):
    git(tmp_path, "init", "-q")
    assert git_state(tmp_path) is None


def test_the_first_folder_that_lies_in_a_repository_counts(repository, tmp_path):
    assert git_state(tmp_path, repository)["branch"] == "trunk"


def test_a_header_tells_of_the_commit_and_of_the_configuration(tmp_path, repository, monkeypatch):
    monkeypatch.chdir(repository)
    monkeypatch.setattr("gradilocks.record.recorder.folder_of_main", lambda: repository)
    args = argparse.Namespace(lr=3e-4, out=Path("runs/x"), layers=(1, 2), seed=None, deep={"a": 1})
    Recorder(tmp_path / "a", config=vars(args)).close()
    header = read_run(tmp_path / "a").header
    assert header.git["commit"] == git(repository, "rev-parse", "HEAD")
    assert header.config == {
        "lr": 3e-4, "out": "runs/x", "layers": [1, 2], "seed": None, "deep": {"a": 1},
    }  # fmt: skip


def test_a_control_hands_its_configuration_to_the_file_that_it_makes(tmp_path):
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    control = GradientControl(optimizer, record=tmp_path / "a", config={"lr": 0.1})
    control.recorder.close()
    assert read_run(tmp_path / "a").header.config == {"lr": 0.1}
    GradientControl(optimizer, config={"lr": 0.1})  # Nobody records.
    said = r"Give it to the Recorder: Recorder\(path, config="
    with Recorder(tmp_path / "b") as recorder, pytest.raises(ValueError, match=said):
        GradientControl(optimizer, record=recorder, config={"lr": 0.1})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (argparse.Namespace(lr=1), r"config must be a mapping, as vars\(args\) .* got Namespace"),
        ([1], "config must be a mapping"),
        ({"model": {"w": torch.zeros(2)}}, r"config\['model'\]\['w'\] must be .* got Tensor"),
        ({"many": [1, numpy.zeros(2)]}, r"config\['many'\]\[1\] must be .* got ndarray"),
    ],
)  # fmt: skip
def test_a_configuration_that_json_cannot_hold_is_refused(tmp_path, config, said):
    with pytest.raises(TypeError, match=said):
        Recorder(tmp_path / "a", config=config)
    assert not (tmp_path / "a").exists()
    model = small_model()
    with pytest.raises(TypeError, match=said):
        GradientControl(torch.optim.SGD(model.parameters(), lr=0.1), config=config)


def test_a_process_is_known_to_run_and_to_have_ended(tmp_path):
    mark = process_here()
    assert mark is not None
    assert is_running(mark) is True
    assert is_running({**mark, "began": mark["began"] + 1}) is False  # Another with its number.
    assert is_running({**mark, "boot": "another machine"}) is None
    assert is_running({}) is is_running(None) is None
    program = "from gradilocks.runfile import process_here; print(process_here())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert is_running(eval(done.stdout)) is False
