"""What `gradilocks run` costs a script: each runs by Python and under watch, in turn, each time in
a process of its own.

A script times itself: blocks of steps after some that do not count, on the wall and by the
processor's time of its process. A run is told by the median of its blocks, and a contender by the
median of its runs; what counts is the ratio, and what is added to a step. Each block holds steps
with detail, and what they take to be written is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

_LOOP = """
import json, sys, time, torch
torch.set_num_threads(1)
torch.manual_seed(0)
{made}

def step():
    optimizer.zero_grad()
    loss = {loss}
    loss.backward()
    {clip}optimizer.step()

for _ in range({block}):
    step()
wall, processor = [], []
for _ in range({blocks}):
    begin, used = time.perf_counter(), time.process_time()
    for _ in range({block}):
        step()
    processor.append((time.process_time() - used) * 1e3 / {block})
    wall.append((time.perf_counter() - begin) * 1e3 / {block})
with open(sys.argv[1], "w") as file:
    json.dump([wall, processor, sum(len(g["params"]) for g in optimizer.param_groups)], file)
"""
_MLP = """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, targets = torch.randn(32, 64), torch.randint(0, 10, (32,))
"""
_MANY = """
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(200)])
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
data = torch.randn(16, 32)
"""
_CLIP = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n    "
_MLP_LOSS = "torch.nn.functional.cross_entropy(model(data), targets)"
_MANY_LOSS = "model(data).square().mean()"
SCRIPTS: dict[str, dict[str, Any]] = {
    "a two-layer MLP": {"made": _MLP, "loss": _MLP_LOSS, "clip": "", "block": 100},
    "400 small tensors": {"made": _MANY, "loss": _MANY_LOSS, "clip": "", "block": 20},
    "400 small tensors, clipped": {"made": _MANY, "loss": _MANY_LOSS, "clip": _CLIP, "block": 20},
}


def watching(options: argparse.Namespace) -> dict[str, Any]:
    """Runs each script by Python and by `gradilocks run`; what a step took."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in SCRIPTS.items():
            script = Path(folder) / "script.py"
            script.write_text(_LOOP.format(blocks=options.watch_blocks, **settings))
            _run(script, watched=True)  # Builds and caches what there is to build.
            runs: list[list[Any]] = [[], []]
            for _ in range(options.watch_rounds):
                for place in (0, 1):
                    runs[place].append(_run(script, watched=place == 1))
            rows.append(_row(name, runs))
    return {"rounds": options.watch_rounds, "blocks": options.watch_blocks, "rows": rows}


def _run(script: Path, *, watched: bool) -> list[Any]:
    told, run_file = script.with_name("times.json"), script.with_name("run.jsonl")
    prefix = ["-m", "gradilocks", "run", "--force", "-o", str(run_file)] if watched else []
    done = subprocess.run(
        [sys.executable, *prefix, str(script), str(told)],
        capture_output=True,
        text=True,
        env={"GRADILOCKS_NATIVE": "wait", **os.environ, "OMP_NUM_THREADS": "1"},
    )
    if done.returncode or (watched and "watching ended" in done.stderr):
        sys.exit(f"{script} failed:\n{done.stderr}")
    times: list[Any] = json.loads(told.read_text())
    return times


def _row(name: str, runs: list[list[Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"script": name, "tensors": runs[0][0][2]}
    for place, measure in enumerate(("wall", "cpu")):
        plain, watched = ([statistics.median(run[place]) for run in each] for each in runs)
        row |= {
            f"plain_{measure}_ms": statistics.median(plain),
            f"watched_{measure}_ms": statistics.median(watched),
            f"{measure}_ratio": statistics.median(watched) / statistics.median(plain),
            f"{measure}_ratios": [b / a for a, b in zip(plain, watched, strict=True)],
            f"{measure}_added_ms": statistics.median(watched) - statistics.median(plain),
        }
    return row


def table(found: dict[str, Any]) -> str:
    lines = [
        "| script | tensors | ms a step | watched | added | wall | processor |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['script']} | {row['tensors']} | {row['plain_wall_ms']:.3f} | "
            f"{row['watched_wall_ms']:.3f} | {row['wall_added_ms']:+.3f} ms | "
            f"{row['wall_ratio']:.2f}x | {row['cpu_ratio']:.2f}x |"
        )
    return "\n".join(lines)
