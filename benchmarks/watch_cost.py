"""What `gradilocks run` costs a script: each runs by Python and under watch, in turn, each time in
a process of its own.

A script times itself: blocks of steps after some that do not count, on the wall, by the processor's
time of its process, and by that of the thread that trains. A run is told by the median of its
blocks, and a contender by the median of its runs; what counts is the ratio, and what is added to a
step. Each block holds steps with detail, and what they take to be written is in it.

On a GPU the time that counts is the thread's, of a block until its last step has returned: the wall
of a busy host is too noisy to show 1 %, and in `synchronize`, which comes after it, a thread spins.
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
device = {device!r}
synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
{made}

def step():
    optimizer.zero_grad()
    loss = {loss}
{taken}

for _ in range({block}):
    step()
times = [], [], []
for _ in range({blocks}):
    synchronize()
    begin = time.perf_counter(), time.process_time(), time.thread_time()
    for _ in range({block}):
        step()
    thread = time.thread_time()
    synchronize()
    end = time.perf_counter(), time.process_time(), thread
    for each, before, after in zip(times, begin, end):
        each.append((after - before) * 1e3 / {block})
with open(sys.argv[1], "w") as file:
    json.dump([*times, sum(len(g["params"]) for g in optimizer.param_groups)], file)
"""
_MLP = """
layers = torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10)
model = torch.nn.Sequential(*layers).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data, targets = torch.randn(32, 64).to(device), torch.randint(0, 10, (32,)).to(device)
"""
_MANY = """
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(200)]).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
data = torch.randn(16, 32).to(device)
"""
_SCALED = _MANY + "scaler = torch.amp.GradScaler(device)\n"
_PLAIN = """
    loss.backward()
    optimizer.step()
"""
_CLIPPED = """
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
"""
_BY_SCALER = """
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""
_MLP_LOSS = "torch.nn.functional.cross_entropy(model(data), targets)"
_MANY_LOSS = "model(data).square().mean()"
_SMALL = {"made": _MLP, "loss": _MLP_LOSS, "block": 100}
_MANY_SMALL = {"made": _MANY, "loss": _MANY_LOSS, "block": 20}
SCRIPTS: dict[str, dict[str, Any]] = {
    "a two-layer MLP": {**_SMALL, "taken": _PLAIN},
    "a two-layer MLP, clipped": {**_SMALL, "taken": _CLIPPED},
    "400 small tensors": {**_MANY_SMALL, "taken": _PLAIN},
    "400 small tensors, clipped": {**_MANY_SMALL, "taken": _CLIPPED},
    "400 small tensors, a scaler, clipped": {**_MANY_SMALL, "made": _SCALED, "taken": _BY_SCALER},
}
MEASURES = ("wall", "cpu", "thread")
ROUNDS = {"cpu": 5, "cuda": 2}
BLOCKS = {"cpu": 10, "cuda": 5}


def watching(options: argparse.Namespace) -> dict[str, Any]:
    """Runs each script by Python and by `gradilocks run`; what a step took."""
    device = options.device
    rounds = options.watch_rounds or ROUNDS[device]
    blocks = options.watch_blocks or BLOCKS[device]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, settings in SCRIPTS.items():
            script = Path(folder) / "script.py"
            script.write_text(_LOOP.format(blocks=blocks, device=device, **settings))
            if not rows:
                _run(script, watched=True)  # Builds and caches what there is to build.
            runs: list[list[Any]] = [[], []]
            for _ in range(rounds):
                for place in (0, 1):
                    runs[place].append(_run(script, watched=place == 1))
            rows.append(_row(name, runs))
    return {"device": device, "rounds": rounds, "blocks": blocks, "rows": rows}


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
    row: dict[str, Any] = {"script": name, "tensors": runs[0][0][-1]}
    for place, measure in enumerate(MEASURES):
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
    counts = "thread" if found["device"] == "cuda" else "cpu"
    whose = {"cpu": "of the processor", "thread": "of the training thread"}[counts]
    lines = [
        f"| script | tensors | ms a step, {whose} | watched | added | ratio | wall |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        plain, watched, added, ratio = (
            row[name.format(counts)]
            for name in ("plain_{}_ms", "watched_{}_ms", "{}_added_ms", "{}_ratio")
        )
        lines.append(
            f"| {row['script']} | {row['tensors']} | {plain:.3f} | {watched:.3f} | {added:+.3f} ms "
            f"| {ratio:.2f}x | {row['wall_ratio']:.2f}x |"
        )
    return "\n".join(lines)
