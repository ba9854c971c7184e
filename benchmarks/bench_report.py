"""What a report costs: a long run file made up here, read, judged and drawn.

    python benchmarks/bench_report.py                    # 100,000 steps, 200 tensors, minutes
    python benchmarks/bench_report.py --steps 10000
    python benchmarks/bench_report.py -o benchmarks/results/report_cpu.json

The file has a loss, a scale with skips, a limit, spikes, and detail of every tensor now and then.
Each round is a fresh process that runs `gradilocks report`, as a user does, and its parts are timed
once more in this one. The goals: under 30 s in all, and a page under 10 MB.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from environment import environment

from gradilocks.report import render, report_on
from gradilocks.runfile import (
    Culprit,
    Detail,
    End,
    Header,
    OptimizerInfo,
    Step,
    end_line,
    header_line,
    optimizer_line,
    read_run,
    step_line,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--detail-every", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path, default=None, help="also write JSON here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        make_run(
            path, steps=options.steps, tensors=options.tensors, detail_every=options.detail_every
        )
        found: dict[str, Any] = {
            "command": " ".join(["python", *sys.argv]),
            "environment": environment(torch.device("cpu")),
            "steps": options.steps,
            "tensors": options.tensors,
            "detail_every": options.detail_every,
            "run_file_megabytes": round(path.stat().st_size / 1e6, 1),
            **measure(path, options.rounds),
        }
    print(json.dumps(found, indent=1))
    if options.output:
        options.output.write_text(json.dumps(found, indent=1) + "\n")


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """The command in a process of its own, then its parts in this one."""
    walls = []
    for _ in range(rounds):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "gradilocks", "report", str(path)],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        walls.append(round(time.perf_counter() - began, 2))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    reading, run = timed(lambda: read_run(path))
    judging, reported = timed(lambda: report_on(run, "run"))
    drawing, _ = timed(lambda: render([reported]))
    return {
        "seconds": {"median": statistics.median(walls), "all": walls},
        "parts_seconds": {"read": reading, "judge": judging, "draw": drawing},
        "peak_memory_megabytes": round(peak / 1000),
        "page_megabytes": round(path.with_suffix(".html").stat().st_size / 1e6, 2),
    }


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    made = work()
    return round(time.perf_counter() - began, 2), made


def make_run(path: Path, *, steps: int, tensors: int, detail_every: int) -> None:
    """Writes a run file of this size, the same each time."""
    draw = random.Random(0)
    names = tuple(f"transformer.blocks.{i // 8}.part{i % 8}.weight" for i in range(tensors))
    header = Header(1, 0.0, ("train.py",), {"torch": "2"}, {"cores": 2}, {}, 0, 1)
    with path.open("w", encoding="utf-8") as file:
        file.write(header_line(header))
        info = OptimizerInfo(0, "AdamW", names, (2**20,) * tensors, ("float32",) * tensors)
        file.write(optimizer_line(info))
        for number in range(1, steps + 1):
            detailed = number % detail_every == 0
            file.write(step_line(made_up_step(draw, number, names, steps=steps, detailed=detailed)))
        file.write(end_line(End(float(steps), "finished", 0, None)))


def made_up_step(
    draw: random.Random, number: int, names: tuple[str, ...], *, steps: int, detailed: bool
) -> Step:
    """A step of a run that learns, overflows every 2,000 steps and has a spike every 9,999."""
    skipped = number % 2000 == 0
    norm = (1.0 + 4.0 * math.exp(-20.0 * number / steps)) * draw.lognormvariate(-0.6, 0.25)
    norm *= 30.0 if number % 9999 == 0 else 1.0
    return Step(
        step=number,
        time=number * 0.5,
        optimizer=0,
        loss=2.0 + 6.0 * math.exp(-8.0 * number / steps) + draw.gauss(0, 0.05),
        scale=2.0 ** (16 + number // 2000 % 3),
        norm=None if skipped else norm,
        limit=1.0,
        clipped=not skipped and norm > 1.0,
        skipped=skipped,
        reason="nonfinite" if skipped else None,
        culprits=(Culprit(names[-1], 0, 7),) if skipped else (),
        lr=3e-4,
        nan=0,
        inf=7 if skipped else 0,
        detail=made_up_detail(draw, len(names), norm) if detailed else None,
    )


def made_up_detail(draw: random.Random, tensors: int, norm: float) -> Detail:
    each = norm / math.sqrt(tensors)
    return Detail(
        norm=[each * draw.uniform(0.3, 1.7) for _ in range(tensors)],
        largest=[each * draw.uniform(0.01, 0.1) for _ in range(tensors)],
        zeros=[draw.random() * 0.02 for _ in range(tensors)],
        nan=[0] * tensors,
        inf=[0] * tensors,
        weight=[draw.uniform(10, 40) for _ in range(tensors)],
        update=[draw.lognormvariate(-7, 0.5) for _ in range(tensors)],
    )


if __name__ == "__main__":
    main()
