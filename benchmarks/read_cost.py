"""What it costs to read a run file back.

A file of a million steps, one in 5,000 skipped, none with detail, is read by `read_run`, by
`json.loads` line by line into plain dictionaries, and by pandas where that is installed. Each reads
the whole file in turn, and again; what was read is dropped outside the clock.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradilocks
from gradilocks.runfile import (
    Culprit,
    Header,
    OptimizerInfo,
    Step,
    header_line,
    optimizer_line,
    step_line,
)
from report import spread


def reading(options: argparse.Namespace) -> dict[str, Any]:
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
        size = path.stat().st_size
    return {
        "steps": options.steps,
        "bytes": size,
        "rounds": options.rounds,
        "rows": [{"contender": name, **asdict(spread(times))} for name, times in taken.items()],
    }


def table(found: dict[str, Any]) -> str:
    """In Markdown."""
    lines = [
        f"{found['steps']:,} steps, {found['bytes'] / 2**20:.0f} MiB",
        "| | seconds (10 % to 90 %) |",
        "|---|---|",
    ]
    for each in found["rows"]:
        low, high = each["p10_ms"] / 1e3, each["p90_ms"] / 1e3
        lines.append(
            f"| {each['contender']} | {each['median_ms'] / 1e3:.2f} ({low:.2f} to {high:.2f}) |"
        )
    return "\n".join(lines)


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
