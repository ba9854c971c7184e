"""Reads run files: JSON Lines, format 3, one file per rank.

Later lines replace earlier ones of the same kind, optimizer and step. A last line without a newline is not read: it may
be incomplete. A line that is not a record is skipped and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["FORMAT", "BadRunFile", "Record", "Run", "follow", "merge", "rank_files", "read"]

FORMAT = 3

Record = dict[str, Any]
"""One line of a run file."""

TENSOR_FIELDS = ("norms", "zeros", "updates")
"""Fields of a step with one number per tensor."""


class BadRunFile(Exception):
    """Raised for a file that does not exist, cannot be read, or is not a run file of this format."""


@dataclass
class Run:
    """The records of a run.

    `Run(path)` is empty; `add` takes records in the order of the file.
    """

    path: Path
    header: Record = field(default_factory=dict)
    """The last header; empty before the first."""
    optimizers: dict[int, Record] = field(default_factory=dict)
    """The optimizer records by index."""
    steps: dict[int, dict[int, Record]] = field(default_factory=dict)
    """The step records by optimizer and step."""
    logs: list[Record] = field(default_factory=list)
    culprits: dict[tuple[int, int, int], Record] = field(default_factory=dict)
    """The culprit records by step, optimizer and rank."""
    end: Record | None = None
    """The end record; None while the run is not closed."""
    last_time: float = 0.0
    """The time of the last record that has one."""
    skipped_lines: int = 0
    """Number of lines that are not records."""

    def add(self, records: Iterable[Record | None]) -> None:
        """Adds records in the order of the file; None stands for a line that is not a record."""
        for record in records:
            try:
                self._add(record or {})
            except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
                self.skipped_lines += 1

    def _add(self, record: Record) -> None:
        kind = record["kind"]
        if kind == "header":
            self.header, self.end = record, None
        elif kind == "optimizer":
            self.optimizers[_integer(record["optimizer"])] = record
        elif kind == "start":
            self._discard_after(_integer(record["step"]))
        elif kind == "step":
            for name in TENSOR_FIELDS:
                if name in record:
                    record[name] = np.array(record[name], dtype=np.float64).ravel()
            self.steps.setdefault(_integer(record.get("optimizer", 0)), {})[_integer(record["step"])] = record
        elif kind == "log":
            record["step"] = _integer(record["step"])
            record["values"] = {str(name): float(value) for name, value in record["values"].items()}
            self.logs.append(record)
        elif kind == "culprit":
            key = _integer(record["step"]), _integer(record.get("optimizer", 0)), _integer(record.get("rank", 0))
            self.culprits[key] = record
        elif kind == "end":
            self.end = record
        if "time" in record:
            self.last_time = max(self.last_time, float(record["time"]))

    def _discard_after(self, last: int) -> None:
        """Drops steps, logs and culprits after a step; a resumed run writes them again."""
        self.end = None
        for steps in self.steps.values():
            for step in [step for step in steps if step > last]:
                del steps[step]
        self.logs = [log for log in self.logs if log["step"] <= last]
        self.culprits = {key: culprit for key, culprit in self.culprits.items() if key[0] <= last}

    @property
    def name(self) -> str:
        """The label of the header, else the name of the file."""
        return str(self.header.get("label") or self.path.stem)


def _integer(value: Any) -> int:
    """An integer from a run file; ValueError if it does not fit in 64 bits."""
    number = int(value)
    if abs(number) >= 1 << 63:
        raise ValueError("not a 64-bit integer")
    return number


def follow(path: Path, offset: int) -> tuple[list[Record | None], int]:
    """Reads the lines after a byte offset.

    Returns:
        The records (None for a line that is not one) and the offset for the next call; ([], 0) if the file has become
        shorter, because it was replaced.

    Raises:
        BadRunFile: the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) < offset:
                return [], 0
            file.seek(offset)
            data = file.read()
    except OSError as error:
        raise BadRunFile(f"{path}: {error.strerror or error}") from error
    end = data.rfind(b"\n") + 1
    return [parse(line) for line in data[:end].split(b"\n") if line.strip()], offset + end


def parse(line: bytes) -> Record | None:
    """The record of a line; None if it is not one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read(path: Path | str) -> Run:
    """Reads a run file together with the files of the other ranks (`run.rank1.jsonl` beside `run.jsonl`).

    Raises:
        BadRunFile: the file cannot be read, has no header, or has another format.
    """
    path = Path(path)
    runs = []
    for file in [path, *rank_files(path)]:
        run = Run(file)
        run.add(follow(file, 0)[0])
        runs.append(run)
    check_format(runs[0])
    return merge(runs)


def check_format(run: Run) -> None:
    """Raises BadRunFile unless the run has a header of this format."""
    version = run.header.get("format")
    if not run.header:
        raise BadRunFile(f"{run.path} is not a run file: it has no header line.")
    if version != FORMAT:
        raise BadRunFile(
            f"{run.path} has format {version}; this version of gradilocks reads format {FORMAT}. "
            "Use the version that wrote the file."
        )


def rank_files(path: Path) -> list[Path]:
    """The files of ranks above 0 in the folder of rank 0's file, in the order of ranks."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank(\d+)" + re.escape(path.suffix))
    folder = path.parent
    matches = [(pattern.fullmatch(file.name), file) for file in folder.iterdir()] if folder.is_dir() else []
    return [file for _, file in sorted((int(match[1]), file) for match, file in matches if match)]


def merge(runs: list[Run]) -> Run:
    """Merges the files of the ranks of one run.

    Numbers are those of rank 0, the first in the list. For a step with NaN or Inf on another rank only, the counts
    `nan` and `inf` are that rank's, and `rank` is its number.
    """
    first, *others = runs
    if not others:
        return first
    steps = {optimizer: dict(records) for optimizer, records in first.steps.items()}
    culprits = dict(first.culprits)
    for other in others:
        rank = other.header.get("rank", 0)
        culprits.update(other.culprits)
        for optimizer, records in other.steps.items():
            merged = steps.setdefault(optimizer, {})
            for step, record in records.items():
                if is_nonfinite(record) and not is_nonfinite(merged.get(step, {})):
                    base = merged.get(step) or {
                        name: record[name] for name in ("step", "time", "skipped") if name in record
                    }
                    counts = {"nan": record.get("nan", 0), "inf": record.get("inf", 0)}
                    merged[step] = {**base, **counts, "rank": rank}
    return replace(
        first,
        steps=steps,
        optimizers={**{k: v for other in reversed(others) for k, v in other.optimizers.items()}, **first.optimizers},
        culprits=culprits,
        skipped_lines=sum(run.skipped_lines for run in runs),
        last_time=max(run.last_time for run in runs),
    )


def is_nonfinite(step: Record) -> bool:
    """True if a step's gradients contained NaN or Inf."""
    return bool(step.get("nan") or step.get("inf"))
