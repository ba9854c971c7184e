"""Where a session's run file goes: a fresh name, or the one that was asked for, looked at first."""

from __future__ import annotations

import os
import time
from pathlib import Path

from gradilocks.errors import BadRunFile
from gradilocks.runfile import refuse_foreign

__all__ = ["check_target", "fresh_name", "rank_of_process"]


def rank_of_process() -> int:
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


def fresh_name(stem: str) -> Path:
    """A name under runs/ that nobody has taken."""
    base = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    name, number = base, 1
    while (path := Path("runs", f"{name}.jsonl")).exists():
        number += 1
        name = f"{base}-{number}"
    return path


def check_target(path: Path, shown: Path, exists: str, *, rank: int, ways: str) -> list[Path]:
    """Refuses before the script runs, and not after an hour of it.

    Args:
        path: the run file, as it will be opened.
        shown: the same as it was typed.
        exists: as the Recorder has it.
        rank: of this process, if every rank writes.
        ways: what else can be done about a file that is there already.

    Returns:
        The folders that were made for it, innermost first.
    """
    if path.is_dir():
        raise BadRunFile(f"{shown} is a folder. Expected the name of a run file.")
    if rank:  # As the Recorder names it.
        path, shown = (p.with_name(f"{p.stem}.rank{rank}{p.suffix}") for p in (path, shown))
    if path.exists():
        if path.is_file():
            refuse_foreign(shown)  # It may be the script itself.
        if exists == "refuse":
            raise BadRunFile(f"{shown} is there already. {ways}")
        if not os.access(path, os.W_OK):
            raise BadRunFile(f"{shown} cannot be written. Choose another name.")
        return []
    missing = [path.parent, *path.parent.parents]
    missing = [folder for folder in missing if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadRunFile(
            f"{shown} cannot be written: {error.strerror or error}. Choose another folder."
        ) from error
    if not os.access(path.parent, os.W_OK):
        raise BadRunFile(f"{shown} cannot be written: {path.parent} is read-only.")
    return missing
