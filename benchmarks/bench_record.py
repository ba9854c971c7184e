"""What a run file costs: reading one back.

    python benchmarks/bench_record.py                    # every section, minutes
    python benchmarks/bench_record.py --only reading --steps 100000
    python benchmarks/bench_record.py -o benchmarks/results/record_cpu.json

reading: a file of a million steps, one in 5,000 skipped, none with detail, is read by `read_run`,
    by `json.loads` line by line into plain dictionaries, and by pandas where that is installed.
    Each reads the whole file in turn, and again; what was read is dropped outside the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from environment import environment

import gradilocks
from gradilocks.runfile import Culprit, Header, OptimizerInfo, Step
from gradilocks.runfile.writing import header_line, optimizer_line, step_line
from report import Spread, spread


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    section: str
    what: str
    contender: str
    rounds: int
    wall: Spread
    """Milliseconds."""


def main() -> None:
    sections: dict[str, Callable[[argparse.Namespace], list[Row]]] = {"reading": reading}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(sections), default=None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of the file that is read")
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    rows = [
        row
        for name, section in sections.items()
        if options.only in (None, name)
        for row in section(options)
    ]
    print(table(rows))
    if options.output:
        found = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment(torch.device("cpu")),
            "rows": [asdict(row) for row in rows],
        }
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    lines = ["| section | what | contender | median | 10 % to 90 % |", "|---|---|---|---|---|"]
    for row in rows:
        wall = row.wall
        lines.append(
            f"| {row.section} | {row.what} | {row.contender} | {_time(wall.median_ms)} "
            f"| {_time(wall.p10_ms)} to {_time(wall.p90_ms)} |"
        )
    return "\n".join(lines)


def _time(ms: float) -> str:
    return f"{ms / 1e3:.2f} s" if ms >= 1e3 else f"{ms:.3g} ms"


# --- reading -------------------------------------------------------------------------------------


def reading(options: argparse.Namespace) -> list[Row]:
    """A long file, read whole."""
    ways: dict[str, Callable[[Path], object]] = {
        "gradilocks.read_run": gradilocks.read_run,
        "json.loads, line by line": _read_by_line,
    }
    try:
        import pandas
    except ImportError:
        print("note: pandas is not installed, and left out", file=sys.stderr)
    else:
        ways["pandas.read_json"] = lambda path: pandas.read_json(path, lines=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        _write_steps(path, options.steps)
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, read in ways.items():
                taken[name].append(_timed(read, path))
        what = f"{options.steps:,} steps, {path.stat().st_size / 2**20:.0f} MiB"
    return [
        Row("reading", what, name, options.rounds, spread(times)) for name, times in taken.items()
    ]


def _timed(read: Callable[[Path], object], path: Path) -> float:
    gc.collect()
    start = time.perf_counter()
    kept = read(path)
    taken = (time.perf_counter() - start) * 1e3
    del kept
    return taken


def _read_by_line(path: Path) -> list[dict[str, Any]]:
    with path.open("rb") as file:
        return [json.loads(line) for line in file]


def _write_steps(path: Path, count: int) -> None:
    draw = random.Random(0)
    names = ("embed.weight", "head.weight")
    with path.open("w") as file:
        file.write(header_line(Header(1, 1.7e9, ("train.py",), {}, {}, {}, 0, 1)))
        file.write(optimizer_line(OptimizerInfo(0, "AdamW", names, (64, 64), ("float32",) * 2)))
        for number in range(1, count + 1):
            skipped = number % 5000 == 0
            file.write(
                step_line(
                    Step(
                        step=number,
                        time=number * 0.0113,
                        optimizer=0,
                        loss=3.0 * draw.random(),
                        scale=65536.0,
                        norm=None if skipped else draw.random(),
                        limit=1.0,
                        clipped=draw.random() < 0.3,
                        skipped=skipped,
                        reason="nonfinite" if skipped else None,
                        culprits=(Culprit(names[0], 0, 2),) if skipped else (),
                        lr=3e-4 * draw.random(),
                        nan=0,
                        inf=2 * skipped,
                        detail=None,
                    )
                )
            )


if __name__ == "__main__":
    main()
