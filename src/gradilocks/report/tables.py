"""A run → rows for programs that read tables: one a step, and one a tensor and detailed step.

The steps are wide, as they are in the file; the detail is long, one row for each parameter of each
step that has detail, so that it can be filtered and grouped.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any

from gradilocks.runfile import Detail, Run, Step

__all__ = ["DETAIL_COLUMNS", "STEP_COLUMNS", "csv_columns", "detail_rows", "step_rows", "write_csv"]

STEP_COLUMNS = tuple(name for name in Step._fields if name != "detail")
DETAIL_COLUMNS = ("step", "optimizer", "parameter", *Detail._fields)


def step_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row a step, along `STEP_COLUMNS`."""
    return map(attrgetter(*STEP_COLUMNS), run.steps)


def detail_rows(run: Run) -> Iterator[tuple[Any, ...]]:
    """A row for each parameter of each step that has detail, along `DETAIL_COLUMNS`."""
    for step in run.steps:
        if step.detail is not None:
            names = run.optimizers[step.optimizer].names
            for name, *numbers in zip(names, *step.detail, strict=True):
                yield (step.step, step.optimizer, name, *numbers)


def write_csv(
    path: Path,
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    progress: Callable[[int], None],
) -> None:
    """Writes rows as CSV: nothing for None, true and false, culprits as JSON."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for done, row in enumerate(rows, start=1):
            writer.writerow(map(_cell, row))
            if done % 1000 == 0:
                progress(done)


def csv_columns(path: Path) -> list[str]:
    """The first line of a file, split as `write_csv` joins it."""
    with path.open("rb") as file:
        first = file.readline(1 << 16)
    return first.decode("utf-8", "replace").rstrip("\n").split(",")


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        named = [culprit._asdict() for culprit in value]
        return json.dumps(named, ensure_ascii=False, separators=(",", ":")) if named else None
    return value
