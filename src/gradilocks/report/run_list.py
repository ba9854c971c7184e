"""A folder enters; the runs in it leave, newest first, each in a line of facts with its verdict.

The verdict is that of the report, for which a file must be read whole. What was found is kept in
the user's cache by path, size and time of change, so that hundreds of runs are read once. Imports
no torch, and draws nothing.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gradilocks._version import __version__
from gradilocks.errors import BadRunFile, GradilocksError
from gradilocks.report.comparison import seconds_of
from gradilocks.report.run_report import main_numbers, report_on
from gradilocks.runfile import Header, Run, read_quietly, read_start, state_without_end

Progress = Callable[[int, int], None]

MOST_KEPT = 5000
"""Runs that the cache knows: about 2 MB."""
UNREADABLE = "cannot be read"


@dataclass(frozen=True)
class ListedRun:
    """One run, in a line."""

    path: str
    name: str
    """Below the folder, without its suffix."""
    started: float
    """In seconds since 1970."""
    state: str
    """'finished', 'error', 'interrupted', 'exit'; of a run without an end 'running' or 'killed' if
    that can be seen from here, else 'no end'."""
    verdict: str
    """As the report has it, or 'cannot be read'."""
    sentence: str
    """Why."""
    steps: int = 0
    seconds: float = 0.0
    loss: str = ""
    """Where it began and where it ended, in words, as in the report; of several optimizers that of
    the one that stepped last."""
    last_loss: float | None = None
    """None if it is not known, or NaN."""
    logged: Mapping[str, float | None] | None = None
    """The last of each of the user's own numbers; None for one that was not finite."""
    command: str = ""
    commit: str | None = None
    dirty: bool | None = None
    process: Mapping[str, Any] | None = None
    """Which writes the file."""

    def to_plain(self) -> dict[str, Any]:
        """The same as plain data, for JSON."""
        plain = asdict(self)
        del plain["process"]
        return plain


def find_runs(folder: Path) -> list[Path]:
    """The run files in a folder and below it, the one that was begun last first.

    Raises:
        GradilocksError: there is no such folder, or it cannot be read.
    """
    if not folder.is_dir():
        what = "is a file; expected a folder" if folder.exists() else "does not exist"
        raise GradilocksError(f"{folder} {what}. Runs are usually under runs/.")
    found = []
    for path in _candidates(folder):
        with suppress(BadRunFile):  # Other files may end in .jsonl too.
            found.append((read_start(path).started, path))
    found.sort(key=lambda pair: (-pair[0], str(pair[1])))
    return [path for _, path in found]


def list_runs(folder: Path, *, progress: Progress | None = None) -> list[ListedRun]:
    """The runs in a folder, newest first, each with its verdict.

    Args:
        folder: where to look, and below it.
        progress: called with how many runs are done, and how many there are.

    Raises:
        GradilocksError: there is no such folder, or it cannot be read.
    """
    paths = find_runs(folder)
    cache = _Cache()
    listed = []
    for done, path in enumerate(paths):
        if progress is not None:
            progress(done, len(paths))
        known = cache.get(path)
        if known is None:
            known = _examined(path)
            cache.put(path, known)
        name = path.relative_to(folder).with_suffix("").as_posix()
        listed.append(replace(known, path=str(path), name=name, state=_state(known)))
    cache.save()
    return listed


def _candidates(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if name.endswith(".jsonl") and not name.startswith("."):
                yield Path(place, name)


def _examined(path: Path) -> ListedRun:
    try:
        run = read_quietly(path)
        reported = report_on(run, path.stem)
    except BadRunFile as error:
        header = read_start(path)
        return replace(_begun(path, header), verdict=UNREADABLE, sentence=str(error))
    loss, last = "", math.nan
    for track in reported.tracks:
        if track.optimizer.index == run.steps[-1].optimizer:
            loss = dict(main_numbers(reported, track))["loss"]
            last = track.loss_ends.last
    return replace(
        _begun(path, run.header),
        state="no end" if run.end is None else run.end.status,
        verdict=reported.health.verdict,
        sentence=reported.health.sentence,
        steps=len(run.steps),
        seconds=seconds_of(run),
        loss=loss,
        last_loss=None if math.isnan(last) else last,
        logged=_last_logged(run),
        process=run.process,
    )


def _begun(path: Path, header: Header) -> ListedRun:
    git = header.git or {}
    return ListedRun(
        path=str(path),
        name=path.stem,
        started=header.started,
        state="no end",
        verdict="",
        sentence="",
        command=" ".join(header.command),
        commit=git.get("commit"),
        dirty=git.get("dirty"),
        process=header.process,
    )


def _last_logged(run: Run) -> dict[str, float | None]:
    last = {name: pairs[-1][1] for name, pairs in run.logged.items()}
    return {name: None if math.isnan(value) else value for name, value in last.items()}


def _state(listed: ListedRun) -> str:
    return state_without_end(listed.process) if listed.state == "no end" else listed.state


class _Cache:
    """What was found in files that have not changed since; a cache that fails is none."""

    def __init__(self) -> None:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
        self._place = Path(home, "gradilocks", "runs.json")
        self._changed = False
        self._kept: dict[str, dict[str, Any]] = {}
        with suppress(OSError, ValueError):
            kept = json.loads(self._place.read_text(encoding="utf-8"))
            if isinstance(kept, dict) and kept.get("gradilocks") == __version__:
                self._kept = kept["runs"]

    def get(self, path: Path) -> ListedRun | None:
        kept = self._kept.get(str(path.absolute()))
        if kept is None or kept.get("mark") != _mark(path):
            return None
        with suppress(TypeError):
            return ListedRun(**kept["run"])
        return None

    def put(self, path: Path, run: ListedRun) -> None:
        key = str(path.absolute())
        self._kept.pop(key, None)  # Those that were read last stand last.
        self._kept[key] = {"mark": _mark(path), "run": _fields(run)}
        self._changed = True

    def save(self) -> None:
        if not self._changed:
            return
        kept = dict(list(self._kept.items())[-MOST_KEPT:])
        unfinished = self._place.with_name(f"runs.{os.getpid()}.part")
        with suppress(OSError, ValueError):
            self._place.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"gradilocks": __version__, "runs": kept})
            unfinished.write_text(text, encoding="utf-8")
            unfinished.replace(self._place)


def _fields(run: ListedRun) -> dict[str, Any]:
    return {each.name: getattr(run, each.name) for each in fields(run)}


def _mark(path: Path) -> list[int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return [found.st_size, found.st_mtime_ns]
