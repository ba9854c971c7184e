"""A folder enters; the commit, the branch and whether files were changed leave: for run files.

The commit is read from the repository's own files, so that it is known also where git is not
installed or does not trust the folder, as in containers. Whether tracked files were changed only
git can say: it is asked once, when a run begins, and not waited for longer than `PATIENCE`.
Whatever fails leaves "not known", and no error. Imports no torch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

__all__ = ["PATIENCE", "folder_of_main", "git_state"]

PATIENCE = 2.0
"""Seconds. A status of 100,000 files takes a tenth of one when the disk's cache is warm."""

_COMMIT = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def folder_of_main() -> Path:
    """The folder of the script that this process runs; the working directory if it has none."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(script).absolute().parent if script else Path.cwd()


def git_state(*folders: Path) -> dict[str, str | bool | None] | None:
    """What the first of these folders that lies in a git repository was checked out from.

    Returns:
        'commit', 'branch' (None if none is checked out) and 'dirty': whether files that git tracks
        were changed since that commit; None if it is not known. None outside of a repository, and
        where nothing was committed yet.
    """
    for folder in folders:
        found = _repository(folder)
        commit, branch = (None, None) if found is None else _head(found)
        if commit is not None:
            return {"commit": commit, "branch": branch, "dirty": _is_dirty(folder)}
    return None


def _repository(folder: Path) -> Path | None:
    """The folder in which git keeps what belongs to a working tree: '.git', or what that names."""
    for each in (folder, *folder.parents):
        place = each / ".git"
        if place.is_dir():
            return place
        if place.is_file():  # Of a worktree or a submodule: one line, "gitdir: path".
            named = _text(place).removeprefix("gitdir:").strip()
            return (each / named) if named else None
    return None


def _head(repository: Path) -> tuple[str | None, str | None]:
    """The commit that is checked out, and the branch."""
    head = _text(repository / "HEAD")
    if not head.startswith("ref:"):
        return (head if _COMMIT.fullmatch(head) else None), None
    ref = head.removeprefix("ref:").strip()
    branch = ref.removeprefix("refs/heads/")
    common = _text(repository / "commondir")  # A worktree's branches lie with the main one's.
    for home in (repository, repository / common if common else repository):
        commit = _text(home / ref)
        if not commit:
            packed = _text(home / "packed-refs").splitlines()
            commit = next((line.split()[0] for line in packed if line.endswith(f" {ref}")), "")
        if _COMMIT.fullmatch(commit):
            return commit, branch
    return None, branch


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):  # The second is about a path that can be none.
        return ""


def _is_dirty(folder: Path) -> bool | None:
    command = ["git", "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            env={**os.environ, "GIT_TERMINAL_PROMPT": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() != b"" if done.returncode == 0 else None
