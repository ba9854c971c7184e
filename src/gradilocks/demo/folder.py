"""A folder that somebody named → one that holds this experiment and nothing of an older one.

The demo replaces its own files, other run files and pages of Gradilocks' if it is asked to, and no
others. Each of them says whose it is: run files in their settings, pages in a ``meta`` element, the
summary in a key.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gradilocks.demo.arms import ARMS, MADE_BY, Arm
from gradilocks.errors import BadRunFile, GradilocksError
from gradilocks.runfile import refuse_foreign

__all__ = ["PAGE", "SUMMARY", "page_of", "prepare", "run_of", "write_summary"]

SUMMARY, PAGE = "summary.json", "report.html"
_HEAD = 4096
_GENERATORS = (MADE_BY, "gradilocks report")


def run_of(folder: Path, arm: Arm, seed: int) -> Path:
    """Where the run file of an arm and a seed goes."""
    return folder / f"{arm.name}-{seed}.jsonl"


def page_of(folder: Path, arm: Arm) -> Path:
    """Where an arm's own report goes."""
    return folder / f"{arm.name}.html"


def prepare(folder: Path, *, arms: Sequence[Arm], seeds: Sequence[int], force: bool) -> None:
    """Makes the folder, and removes from it what an earlier demo has left.

    Raises:
        GradilocksError: it cannot be made or written, or a file of somebody else is in the way.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trial = folder / f".{os.getpid()}.part"
        trial.touch()
        trial.unlink()
    except FileExistsError as error:
        raise GradilocksError(
            f"-o {folder} is a file; expected a folder, as {folder.with_name('demo')}."
        ) from error
    except OSError as error:
        raise GradilocksError(
            f"-o {folder} cannot be written: {error.strerror or error}."
        ) from error
    wanted = [folder / PAGE, folder / SUMMARY]
    for arm in arms:
        wanted += [page_of(folder, arm), *(run_of(folder, arm, seed) for seed in seeds)]
    for path in wanted:
        if not path.exists() or (path.is_file() and _ours(path)):
            continue
        may = path.is_file() and _other_of_gradilocks(path)
        if not may or not force:
            raise GradilocksError(
                f"{path} is there and was not written by the demo; choose another folder with -o"
                + (", or replace it with --force." if may else ".")
            )
    for path in _left(folder):
        path.unlink(missing_ok=True)


def write_summary(folder: Path, summary: dict[str, Any]) -> Path:
    """Writes ``summary.json``, whole or not at all; returns its path."""
    path = folder / SUMMARY
    beside = folder / f".{SUMMARY}.{os.getpid()}.part"
    try:
        beside.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise GradilocksError(f"{path} cannot be written: {error.strerror or error}.") from error
    finally:
        beside.unlink(missing_ok=True)
    return path


def _left(folder: Path) -> Iterator[Path]:
    """What an earlier demo has left, by name and by content."""
    names = "|".join(re.escape(arm.name) for arm in ARMS)
    ours = re.compile(rf"(({names})(-\d+\.jsonl|\.html)|{re.escape(SUMMARY)}|{re.escape(PAGE)})")
    for path in sorted(folder.iterdir()):
        if ours.fullmatch(path.name) and path.is_file() and _ours(path):
            yield path


def _other_of_gradilocks(path: Path) -> bool:
    """Whether it is a run file or empty; pages of all of Gradilocks' commands count as ours."""
    if not path.stat().st_size:
        return True
    if path.suffix != ".jsonl":
        return False
    try:
        refuse_foreign(path)
    except BadRunFile:
        return False
    return True


def _ours(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            if path.suffix == ".html":
                head = file.read(_HEAD)
                return any(f'<meta name="generator" content="{g}">' in head for g in _GENERATORS)
            if path.suffix == ".jsonl":
                found = json.loads(file.readline(_HEAD)).get("settings")
            else:
                found = json.load(file)
    except OSError as error:
        raise GradilocksError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, AttributeError):
        return False
    return isinstance(found, dict) and found.get("made_by") == MADE_BY
