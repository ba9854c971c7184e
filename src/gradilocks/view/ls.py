"""Lists the run files of a folder from their first and last lines."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradilocks.view.columns import to_float
from gradilocks.view.report import STYLES
from gradilocks.view.runfile import BadRunFile, Record, parse
from gradilocks.view.text import clean, duration, moment, number

__all__ = ["Entry", "list_runs", "to_text"]

TAIL = 1 << 16
"""Bytes read from the end of a file."""


@dataclass(frozen=True)
class Entry:
    """Contents of the first and last lines of a run file or an audit."""

    path: Path
    header: Record
    end: Record | None
    """None if the run is not closed."""
    last_step: int | None
    final_loss: float
    modified: float
    """Time of the last write."""

    @property
    def is_audit(self) -> bool:
        """True for a file of `gradilocks audit`."""
        return self.header.get("kind") == "audit"

    @property
    def state(self) -> str:
        """Status of the end line; for a run that is not closed, the time since the last write."""
        if self.end is not None:
            return clean(self.end.get("status", "finished"))
        return f"not closed, last written {duration(max(0.0, time.time() - self.modified))} ago"


def list_runs(folder: Path | str) -> list[Entry]:
    """The run files and audits in a folder, oldest first, without files of ranks above 0.

    Raises:
        BadRunFile: the folder does not exist.
    """
    if not Path(folder).is_dir():
        raise BadRunFile(f"{folder} is not a folder")
    entries = [
        entry
        for entry in map(_entry, sorted(Path(folder).glob("*.jsonl")))
        if entry is not None and not entry.header.get("rank")
    ]
    return sorted(entries, key=lambda entry: to_float(entry.header.get("time") or 0))


def _entry(path: Path) -> Entry | None:
    """Reads the first line and the last lines; None if the first one is not a header."""
    try:
        with path.open("rb") as file:
            header = parse(file.readline())
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL))
            tail = [record for record in map(parse, file.read().split(b"\n")) if record is not None]
            modified = path.stat().st_mtime
    except OSError:
        return None
    if header is None or header.get("kind") not in ("header", "audit"):
        return None
    steps = [record for record in tail if record.get("kind") == "step"]
    end = tail[-1] if tail and tail[-1].get("kind") == "end" else None
    losses = [to_float(step.get("loss")) for step in steps]
    final = [loss for loss in losses if math.isfinite(loss)][-1:]
    numbers = [step["step"] for step in steps if isinstance(step.get("step"), int)]
    last = max(numbers) if numbers else (end or {}).get("steps")
    final_loss = to_float((end or {}).get("final_loss", final[0] if final else None))
    return Entry(path, header, end, last if isinstance(last, int) else None, final_loss, modified)


def to_text(entries: list[Entry]) -> RenderableType:
    """Tables of the runs and of the audits, for a rich Console."""
    return Group(*_tables(entries)) if entries else Text("The folder contains no run files.")


def _tables(entries: list[Entry]) -> Iterator[RenderableType]:
    runs = [entry for entry in entries if not entry.is_audit]
    audits = [entry for entry in entries if entry.is_audit]
    if runs:
        table = Table(box=None, pad_edge=False)
        for name in ("file", "run", "started", "last step", "final loss", "state", "verdict"):
            is_number = name in ("last step", "final loss")
            # A file name on two lines cannot be copied.
            table.add_column(name, overflow="fold", no_wrap=name == "file", justify="right" if is_number else "left")
        for entry in runs:
            table.add_row(*_row(entry))
        yield table
    if audits:
        table = Table(box=None, pad_edge=False, title="Audits", title_justify="left")
        for name in ("file", "label"):
            table.add_column(name, overflow="fold")
        for entry in audits:
            table.add_row(Text(clean(entry.path.name)), Text(clean(entry.header.get("label", ""))))
        yield table


def _row(entry: Entry) -> list[Text]:
    end = entry.end or {}
    style = STYLES.get(str(end.get("severity")), "")
    verdict = "; ".join(str(end.get("verdict", "–")).split("; ")[:2])  # Leaves out the inputs of the culprit.
    return [
        Text(clean(entry.path.name)),
        Text(clean(entry.header.get("label", ""))),
        Text(moment(to_float(entry.header.get("time"))) or "–"),
        Text("–" if entry.last_step is None else f"{entry.last_step:,}"),
        Text("–" if math.isnan(entry.final_loss) else number(entry.final_loss)),
        Text(entry.state),
        Text(clean(verdict), style),
    ]
