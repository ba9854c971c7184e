"""What comes out of a run: rows with medians, spreads and ratios, as a table and as JSON.

A ratio is the median of the fastest baseline, by the same measure, over the row's own median:
above 1 is faster than torch's best.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from environment import environment
from harness import Contender, Times


@dataclass(frozen=True)
class Spread:
    """One measure over all rounds."""

    median_ms: float
    p10_ms: float
    p90_ms: float


@dataclass(frozen=True)
class Row:
    """One contender's result on one workload."""

    workload: str
    contender: str
    rounds: int
    times: dict[str, Spread]
    faster: dict[str, float] = field(default_factory=dict)
    """By measure: the baseline's median over this one."""
    baseline: dict[str, str] = field(default_factory=dict)
    """By measure: who the baseline was."""
    floor_ms: float | None = None
    """What the bytes take at the copy bandwidth of the same run."""


@dataclass
class Notes:
    """What has to be said beside the numbers: on stderr at once, in the file at the end."""

    lines: list[str] = field(default_factory=list)
    failed: bool = False

    def say(self, line: str, *, failure: bool = False) -> None:
        print(f"note: {line}", file=sys.stderr, flush=True)
        self.lines.append(line)
        self.failed = self.failed or failure


def spread(taken: Sequence[float]) -> Spread:
    """Median, 10 % and 90 %."""
    tenths = (
        statistics.quantiles(taken, n=10, method="inclusive") if len(taken) > 1 else [taken[0]] * 2
    )
    return Spread(statistics.median(taken), tenths[0], tenths[-1])


def rows_of(
    workload: str,
    contenders: Sequence[Contender],
    times: Sequence[Times],
    *,
    floor_ms: float | None = None,
) -> list[Row]:
    """The rows of one competition, each against the fastest baseline in it."""
    spreads = [{m: spread(taken) for m, taken in each.items()} for each in times]
    best: dict[str, tuple[float, str]] = {}
    for contender, each in zip(contenders, spreads, strict=True):
        for measure, found in each.items() if contender.baseline else ():
            best[measure] = min((found.median_ms, contender.name), best.get(measure, (1e99, "")))
    return [
        Row(
            workload,
            contender.name,
            rounds=len(taken["wall"]),
            times=each,
            faster={m: best[m][0] / each[m].median_ms for m in each if m in best},
            baseline={m: best[m][1] for m in each if m in best},
            floor_ms=floor_ms,
        )
        for contender, each, taken in zip(contenders, spreads, times, strict=True)
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table; `*` marks the baseline of the ratios."""
    return _gpu_table(rows) if any("gpu" in r.times for r in rows) else _cpu_table(rows)


def _cpu_table(rows: Sequence[Row]) -> str:
    lines = [
        "| workload | contender | median ms | 10 % to 90 % | faster than torch's best (*) "
        "| by the processor's time |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        wall = row.times["wall"]
        lines.append(
            f"| {row.workload} | {_named(row)} | {wall.median_ms:.2f} "
            f"| {wall.p10_ms:.2f} to {wall.p90_ms:.2f} | {_times(row.faster.get('wall'))} "
            f"| {_times(row.faster.get('cpu'))} |"
        )
    return "\n".join(lines)


def _gpu_table(rows: Sequence[Row]) -> str:
    measures = ["gpu", "wall", "host"]
    heads = ["GPU ms", "wall ms", "host ms", "× faster, GPU", "× faster, wall", "× floor"]
    queued = any("queued" in row.times for row in rows)
    if queued:
        measures.append("queued")
        heads[3:3] = ["queued ms"]
        heads += ["× faster, queued", "× floor, queued"]
    lines = [
        "| " + " | ".join(["workload", "contender", *heads]) + " |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for before, row in zip([None, *rows], rows, strict=False):
        again = before is not None and before.workload == row.workload
        cells = ["" if again else row.workload, _named(row)]
        cells += [f"{row.times[m].median_ms:.3f}" if m in row.times else "–" for m in measures]
        cells += [_times(row.faster.get("gpu")), _times(row.faster.get("wall"))]
        cells.append(_of_floor(row, "gpu"))
        if queued:
            cells += [_times(row.faster.get("queued")), _of_floor(row, "queued")]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _named(row: Row) -> str:
    return row.contender + (" *" if row.baseline.get("wall") == row.contender else "")


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.{2 if ratio > 2 else 3}f}×"


def _of_floor(row: Row, measure: str) -> str:
    if row.floor_ms is None or measure not in row.times:
        return "–"
    return f"{row.times[measure].median_ms / row.floor_ms:.3f}"


def save(
    path: Path,
    rows: Sequence[Row],
    *,
    device: torch.device,
    notes: Notes,
    extra: dict[str, object] | None = None,
) -> None:
    """Writes results with hardware, versions and the command that made them."""
    # The command as it is typed in the repository, whatever the folders it was run from and for.
    given = [f"benchmarks/results/{path.name}" if arg == str(path) else arg for arg in sys.argv[1:]]
    command = " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *given])
    content = {
        "command": command,
        "environment": environment(device),
        "note": "\n".join(notes.lines),
        **(extra or {}),
        "rows": [asdict(row) for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
