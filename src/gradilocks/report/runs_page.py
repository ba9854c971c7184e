"""The runs of a folder → one page with a row for each, which can be sorted and searched.

Each row leads to the report on its run, if there is one. The page holds all that it shows, as the
reports do, and no plots.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from gradilocks.report.destination import identity_of
from gradilocks.report.formatting import clean, count, duration, number
from gradilocks.report.page import to_html
from gradilocks.report.run_list import ListedRun

MOST_NUMBERS = 6
"""Columns for the users' own numbers, those that most runs have first; a page is only so wide."""


class Cell(NamedTuple):
    """What stands in a column of a row."""

    text: str
    value: float | str | None
    """What it is sorted by; None comes last."""
    kind: str = ""
    """'verdict', 'code', or '' for a plain one."""


def render_runs(runs: Sequence[ListedRun], *, folder: Path, links: Mapping[str, str]) -> str:
    """Returns the page.

    Args:
        runs: as `list_runs` has them.
        folder: that they are in, as it was given.
        links: by the path of a run: where its report is, as the page may link to it.
    """
    often = Counter(name for run in runs for name in run.logged or ())
    own = [name for name, _ in often.most_common(MOST_NUMBERS)]
    heads = ["run", "verdict", "ended", "steps", "loss", "started (UTC)", "lasted"]
    heads += [*map(clean, own), "commit", "command"]
    verdicts = Counter(run.verdict for run in runs)
    return to_html(
        "runs.html",
        scripts=("runs.js",),
        title=f"{clean(folder)} · Gradilocks runs",
        kind="Gradilocks runs",
        heading=clean(folder),
        identity=runs_identity(folder),
        about=f"{count(len(runs), 'run')}: "
        + ", ".join(f"{verdict} {many:,}" for verdict, many in verdicts.most_common()),
        heads=heads,
        rows=[(clean(run.name), links.get(run.path, ""), _cells(run, own)) for run in runs],
        sentences=[clean(run.sentence) for run in runs],
    )


def runs_identity(folder: Path) -> str:
    """Names the folder that a page is about, so that it may be replaced by a newer one."""
    return identity_of(f"runs in {folder.absolute()}")


def _cells(run: ListedRun, own: Sequence[str]) -> list[Cell]:
    commit = run.commit or ""
    changed = ", changed" if run.dirty else ""
    return [
        Cell(run.verdict, run.verdict, "verdict"),
        Cell(run.state, run.state),
        Cell(f"{run.steps:,}", run.steps),
        Cell(run.loss or "–", run.last_loss),
        Cell(_moment(run.started), run.started),
        Cell(duration(run.seconds) if run.seconds > 0 else "–", run.seconds),
        *(_own(run, name) for name in own),
        Cell(f"{clean(commit[:9])}{changed}" if commit else "–", clean(commit) or None),
        Cell(clean(run.command), clean(run.command), "code"),
    ]


def _own(run: ListedRun, name: str) -> Cell:
    if name not in (run.logged or {}):
        return Cell("–", None)
    value = (run.logged or {})[name]
    known = value is not None and math.isfinite(value)
    return Cell(number(value) if known and value is not None else "NaN", value if known else None)


def _moment(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, tz=timezone.utc):%Y-%m-%d %H:%M}"
    except (OverflowError, OSError, ValueError):
        return "not known"
